"""Tuning without a GPU: a planted process tells times, crashes, hangs and answers nonsense."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc.codegen.nvrtc import CompileFailed, Cubin, Job
from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.kernels.catalog import CATALOG, label
from frtc.kernels.spec import Operand, Site
from frtc.kernels.tactic import Tactic, Tactics, key_of
from frtc.kernels.targets import load_targets
from frtc.runtime.plan import ARENA, STATE, WEIGHTS
from frtc.tuning import search as searching
from frtc.tuning import tuned, worker
from frtc.tuning.chain import COLD, chain_of, jobs_of
from frtc.tuning.inputs import Fill, limits, values
from frtc.tuning.options import Tuning, TuningReport
from frtc.tuning.questions import Question, questions_of, worth_it
from frtc.tuning.search import Timed, decide, search
from frtc.tuning.tuned import prepare, tuned_build, write_tactics
from frtc.tuning.worker import Worker
from tests.codegen.emulated import built, module_of, no_compiler

HOPPER = load_targets()["hopper"]
FAMILIES = ("baseline",)
TEXT = """
graph g(x: bf16[200,1024]) {
  @b : bf16[2048]
  @c : bf16[1024]
  @v : bf16[1024,2048]
  @w : bf16[2048,1024]
  %0 = linear(%x, @w, @b, act=gelu_tanh) : bf16[200,2048]
  %1 = linear(%0, @v, @c) : bf16[200,1024]
  return y=%1
}
"""
Planted = Callable[..., tuple[str, ...]]


def packed(*shape: int) -> Operand:
    return Operand.packed("bf16", *shape)


def linear(m: int = 200, n: int = 2048, k: int = 1024) -> Site:
    return Site("linear", (packed(m, k), packed(n, k), None, None), (packed(m, n),), {"act": "none"})


def question(site: Site, best: int = 4) -> Question:
    found = list(CATALOG.candidates(site, HOPPER, FAMILIES))
    chosen = min(found, key=lambda choice: choice.cost_us)
    return Question(key_of(site), site, frozenset({1}), 1.0, worth_it(found, chosen, best))


def labels(asked: Question) -> list[str]:
    return [label(c.kernel, c.config) for c in asked.candidates]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """The command of a process that tells `times`; nothing is compiled for it."""

    def compiled(jobs: Sequence[Job], **_: object) -> list[Cubin]:
        return [Cubin(b"cubin", "kernel") for _ in jobs]

    def command(times: Sequence[tuple[str, Any]] = (), sm: int = 90) -> tuple[str, ...]:
        path = tmp_path / "planted.json"
        path.write_text(json.dumps({"sm": sm, "times": list(times)}))
        made = (sys.executable, str(Path(__file__).with_name("fake_tuner.py")), str(path))
        monkeypatch.setattr(worker, "COMMAND", made)
        return made

    monkeypatch.setattr(searching, "compile_all", compiled)
    return command


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "planted.starts").read_bytes())


def ask(
    command: tuple[str, ...], asked: Sequence[Question], seconds: float = 60.0, answer_s: float = 30.0
) -> searching.Found:
    with Worker(command, answer_s=answer_s) as working:
        return search(asked, HOPPER, working, seconds, lambda what, share: None)


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_the_planted_fastest_is_chosen(planted: Planted, tmp_path: Path) -> None:
    asked = question(linear())
    fastest = labels(asked)[2]
    found = ask(planted([(fastest, 20.0), (labels(asked)[0], 30.0)]), [asked])
    (tactic,) = found.tactics
    assert (str(tactic), tactic.us, tactic.site) == (fastest, 20.0, asked.key)
    (row,) = found.log
    assert row["chosen"] == fastest and [c["kernel"] for c in row["candidates"]] == labels(asked)
    assert row["candidates"][2]["us"] == [20.0, 20.0] and not found.stopped and starts(tmp_path) == 1


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("crash", "the measuring process ended: signal 11"),
        ("exit", "the measuring process ended: exit status 7: planted"),
        ("hang", "no answer within 3 s"),
        ("garbage", "it answered 'Segmentation fault (core dumped)'"),
        ("list", "it answered '[1, 2]'"),
        ("negative", 'it answered {"us": -1}'),
        ("wrong", "its results are not those of the others: relative error 2.2e-01"),
        ("long", "its results have another size than those of the others"),
        ("lazy", "its results are not those of the others: relative error nan"),
        ("fault", "cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED"),
    ],
)
def test_what_a_candidate_does_to_its_process_is_survived_and_said(
    does: str, reason: str, planted: Planted, tmp_path: Path
) -> None:
    asked, other = question(linear()), question(linear(n=512))
    bad, good = labels(asked)[1], labels(asked)[-1]
    found = ask(planted([(bad, does), (good, 1.0)]), [asked, other], answer_s=3.0 if does == "hang" else 30.0)
    rows = {c["kernel"]: c for c in found.log[0]["candidates"]}
    assert rows[bad]["failed"] == reason and "us" not in rows[bad]
    assert found.log[0]["chosen"] == good and len(found.log) == 2 and not found.stopped
    assert starts(tmp_path) == (
        1 if does in ("wrong", "lazy", "long") else 2
    )  # a candidate that failed is not asked again
    assert sum(c.get("failed") == reason for c in found.log[0]["candidates"]) == 1


def test_a_site_whose_candidates_all_fail_stays_with_the_cost_model(planted: Planted) -> None:
    asked = question(linear())
    found = ask(planted([("", "fault")]), [asked])
    assert found.tactics == () and found.log[0]["chosen"] is None


def test_a_process_that_no_longer_starts_ends_the_search(planted: Planted, tmp_path: Path) -> None:
    asked = [question(linear()), question(linear(n=512))]
    command = planted([(labels(asked[0])[0], "exit")])
    with Worker(command) as working:
        working.start()
        (tmp_path / "planted.json").write_text("{}")  # the next start fails
        found = search(asked, HOPPER, working, 60.0, lambda what, share: None)
    assert found.tactics == () and found.not_reached == 2 and "nothing can be measured here" in found.stopped


def test_time_is_limited(planted: Planted) -> None:
    asked = [question(linear()), question(linear(n=512))]
    found = ask(planted(), asked, seconds=1e-9)
    assert (found.tactics, found.not_reached) == ((), 2)


def test_a_kernel_that_does_not_compile_is_said(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(linear())
    broken = next(iter(jobs_of(asked, asked.candidates[1], HOPPER)))
    command = planted([(labels(asked)[2], 1.0)])

    def compiled(jobs: Sequence[Job], **_: object) -> list[Cubin]:
        if broken in jobs:
            raise CompileFailed("gemm<7>: NVRTC_ERROR_COMPILATION\nline 3")
        return [Cubin(b"cubin", "kernel") for _ in jobs]

    monkeypatch.setattr(searching, "compile_all", compiled)
    found = ask(command, [asked])
    assert found.log[0]["candidates"][1]["failed"] == "it does not compile: gemm<7>: NVRTC_ERROR_COMPILATION"
    assert found.log[0]["chosen"] == labels(asked)[2]


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ([[10.0, 10.0], [9.0, 9.0]], 1),
        ([[10.0, 10.0], [9.95, 9.95]], 0),  # a gain below one per cent
        ([[10.0, 12.0], [9.5, 9.5]], 0),  # the first differs from itself by more
        ([[10.0, 10.0], [8.0, 9.9]], 0),  # the other one does
        ([None, [9.0, 9.0], [8.9, 8.9]], 2),
        ([[10.0, 10.0], None], 0),
        ([None, None], None),
    ],
)
def test_what_is_chosen_without_measuring_stays_within_the_noise(times: list[Any], best: int | None) -> None:
    choice = next(iter(CATALOG.candidates(linear(), HOPPER)))
    timed = [Timed(choice, us or [0.0], "" if us else "failed") for us in times]
    assert decide(timed) == best


# ---- what is asked --------------------------------------------------------------------------------------------------


def test_questions_are_the_distinct_sites_with_a_choice() -> None:
    result = built(module_of(TEXT))
    asked = questions_of(result, HOPPER, FAMILIES, CATALOG, best=3)
    sites = {key_of(c.site): c for calls in result.emitted.values() for c in calls}
    assert [q.key for q in asked if q.site.op == "linear"] == sorted(
        (k for k, c in sites.items() if c.site.op == "linear"), key=lambda k: -sites[k].choice.cost_us
    )
    for q in asked:
        assert q.candidates[0] is sites[q.key].choice
        found = list(CATALOG.candidates(q.site, HOPPER, FAMILIES))
        assert {c.kernel.name for c in q.candidates} == {c.kernel.name for c in found}
        cheapest = sorted(c.cost_us for c in found)[:3]
        assert set(cheapest) <= {c.cost_us for c in q.candidates} and len(set(labels(q))) == len(q.candidates)
        assert q.weights == ({1, 2} if q.site.op == "linear" else q.weights)


def test_a_chain_walks_through_cold_weights() -> None:
    asked = question(linear(n=512))
    choice = asked.candidates[0]
    cubins = {job: Cubin(b"", "k") for job in jobs_of(asked, choice, HOPPER)}
    chain = chain_of(asked, choice, HOPPER, cubins)
    weight = 512 * 1024 * 2
    assert chain.spaces[WEIGHTS] >= min(COLD, 128 * weight) and len(chain.calls) == chain.spaces[WEIGHTS] // weight
    offsets = [call.operands[1].offset for call in chain.calls if call.operands[1]]
    assert len(set(offsets)) == len(chain.calls) and len({c.operands[0] for c in chain.calls}) == 1
    assert [call.after for call in chain.calls] == [(), *((i,) for i in range(len(chain.calls) - 1))]
    for call in chain.calls:
        for ref in (*call.operands, *call.results):
            assert ref is None or ref.offset + 2 * np.prod(ref.shape) <= chain.spaces[ref.space]
        assert sum(call.scratch) <= chain.spaces[ARENA] and sum(call.counters) <= chain.spaces[STATE]
    assert {fill.space for fill in chain.fills} == {WEIGHTS, ARENA}


def test_counters_are_every_launchs_own() -> None:
    asked = question(linear(m=4, n=256, k=4096), best=99)
    split = [c for c in asked.candidates if c.kernel.counters(asked.site, c.config)]
    assert split, "no candidate of this site counts"
    cubins = {job: Cubin(b"", "k") for job in jobs_of(asked, split[0], HOPPER)}
    calls = chain_of(asked, split[0], HOPPER, cubins).calls
    assert len({call.counters[0] for call in calls}) == len(calls)


def scalar(dtype: str = "i32", *shape: int) -> Operand:
    return Operand.packed(dtype, *shape)


@pytest.mark.parametrize(
    ("op", "operands", "place", "expected"),
    [
        ("linear", (packed(7, 64), packed(8, 64), None, None, None, scalar()), 5, (7, 8)),
        ("attention", (packed(2, 9, 64), packed(2, 33, 64), packed(2, 33, 64), None, scalar()), 4, (33, 34)),
        ("attention", (packed(2, 9, 64), packed(2, 33, 64), packed(2, 33, 64), scalar("bool", 9, 33)), 3, (1, 2)),
        ("embedding", (packed(100, 64), scalar("i32", 5)), 1, (0, 100)),
        ("write", (packed(9, 64), packed(1, 64), scalar()), 2, (0, 1)),
        ("pointwise", (scalar("bool", 5),), 0, (0, 2)),
        ("pointwise", (scalar("u8", 5),), 0, (0, 256)),
        ("linear", (packed(7, 64), packed(8, 64)), 0, (0, 0)),
    ],
)
def test_counts_and_positions_are_valid(op: str, operands: Any, place: int, expected: tuple[int, int]) -> None:
    assert limits(Site(op, operands, (packed(9, 8),)), place) == expected


def test_inputs_are_ordinary_numbers() -> None:
    drawn = values(Fill(ARENA, 0, "e4m3", 3 << 20)).astype(np.float32)
    assert drawn.shape == (3 << 20,) and 0.9 < drawn.std() < 1.1 and np.isfinite(drawn).all()
    counts = values(Fill(ARENA, 0, "i32", 500, 3, 9))
    assert counts.dtype == np.int32 and set(counts) == set(range(3, 9))


# ---- tactics decide -------------------------------------------------------------------------------------------------


def other_than_chosen(site: Site) -> Tactic:
    choice = question(site).candidates[-1]
    return Tactic(key_of(site), choice.kernel.name, dict(choice.config), 3.5)


def test_order_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured now, what a file says, the target's table, the cost model."""
    site, candidates = linear(), question(linear(), best=9).candidates
    tables = [
        Tactics.of("hopper", name, "", [Tactic(key_of(site), c.kernel.name, c.config, 1.0)])
        for name, c in zip(("now", "file", "table"), candidates[1:], strict=False)
    ]
    monkeypatch.setattr("frtc.kernels.tactic.table_of", lambda target: tables[2])
    for given, expected in ((tables[:2], 1), (tables[1:2], 2), ([], 3)):
        choice = replace(CATALOG, tactics=tuple(given)).select(site, HOPPER)
        assert (choice.config, choice.pick.index is None) == (candidates[expected].config, False)
    monkeypatch.setattr("frtc.kernels.tactic.table_of", lambda target: Tactics(target, ""))
    assert CATALOG.select(site, HOPPER).config == candidates[0].config
    elsewhere = Tactics.of("hopper", "file", "", [replace(other_than_chosen(site), site=key_of(linear(n=512)))])
    assert replace(CATALOG, tactics=(elsewhere,)).select(site, HOPPER).pick.tactic is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kernel": "smxx_gem"}, "there is no such kernel for the op; nearest: smxx_gemm"),
        ({"config": {"BM": 7}}, "not among the kernel's configs for the site"),
        ({"kernel": "smxx_linear_f32"}, "tensor cores can do it"),
    ],
)
def test_a_tactic_that_does_not_fit_is_left_out_and_said(change: dict[str, Any], reason: str) -> None:
    site = linear()
    stale = Tactics.of("hopper", "old.json", "", [replace(other_than_chosen(site), **change)])
    fresh = Tactics.of("hopper", "new.json", "", [other_than_chosen(site)])
    choice = replace(CATALOG, tactics=(stale,)).select(site, HOPPER)
    assert choice.config == question(site).candidates[0].config and choice.pick.tactic is None
    ((tactic, why),) = choice.pick.ignored
    assert why.startswith(reason) and tactic.endswith("(old.json)") and f"not {tactic}: {why}" in str(choice)
    assert replace(CATALOG, tactics=(stale, fresh)).select(site, HOPPER).pick.origin == "new.json"


def test_sites_are_told_apart_exactly() -> None:
    site = linear()
    wide = Operand("bf16", (200, 1024), (1032, 1))
    differing = [
        site,
        linear(n=2056),
        replace(site, op="matmul"),
        replace(site, attrs={"act": "silu"}),
        replace(site, attrs={}),
        replace(site, operands=(wide, *site.operands[1:])),
        replace(site, operands=(*site.operands[:2], packed(2048), None)),
        replace(site, operands=(*site.operands[:2], None, packed(2048))),
        replace(site, results=(Operand.packed("f32", 200, 2048),)),
    ]
    assert len({key_of(s) for s in differing}) == len(differing)
    assert key_of(site) == 'linear(bf16[200,1024], bf16[2048,1024], -, -; act="none") -> bf16[200,2048]'
    assert key_of(differing[5]).startswith("linear(bf16[200,1024]/[1032,1], ")


# ---- whole builds ---------------------------------------------------------------------------------------------------


def build_with(tuning: Tuning) -> tuple[Any, TuningReport]:
    with no_compiler():
        return tuned_build(prepare(tuning, HOPPER), module_of(TEXT), FAMILIES, lambda what, share: None)


def configs(result: Any) -> list[str]:
    return [label(c.choice.kernel, c.choice.config) for calls in result.emitted.values() for c in calls]


def test_measured_choices_are_frozen_written_and_used_again(planted: Planted, tmp_path: Path) -> None:
    plain, none = build_with(Tuning())
    asked = questions_of(plain, HOPPER, FAMILIES, CATALOG)
    planted([(labels(asked[0])[-1], 1.0)])
    file = tmp_path / "t.json"
    first, report = build_with(Tuning(measure=True, file=file))
    assert labels(asked[0])[-1] in configs(first) and configs(first) != configs(plain)
    assert report.measured == {"measured now": len(asked)} and none.measured == {} and none.evidence() == {}
    log = report.evidence()["tuning"]
    assert (log["gpu"], log["target"], log["not_reached"]) == ("Planted", "hopper", 0)
    assert {row["site"] for row in log["log"]} == {q.key for q in asked}
    assert all(len(row["candidates"]) > 1 for row in log["log"]) and json.loads(json.dumps(log)) == log
    assert not list(tmp_path.glob("*.partial")) and f"{len(asked)} measured now" in str(report)
    (tmp_path / "planted.starts").unlink()
    again, used = build_with(Tuning(file=file))
    assert again.program == first.program  # so that the plan_id is the same
    assert used.measured == {"t.json": len(asked)} and used.evidence() == {}
    assert not (tmp_path / "planted.starts").exists()  # no process, no GPU


def test_a_file_is_added_to(planted: Planted, tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "t.json", other_than_chosen(linear(n=512))
    write_tactics(file, Tactics.of("hopper", "", "H", [elsewhere]))
    planted()
    _, report = build_with(Tuning(measure=True, file=file))
    kept = {line["site"] for line in json.loads(file.read_text())["tactics"]}
    assert elsewhere.site in kept and len(kept) == 1 + report.measured["measured now"]


def test_tactics_round_trip(tmp_path: Path) -> None:
    file, tactics = tmp_path / "t.json", [other_than_chosen(linear()), other_than_chosen(linear(n=512))]
    write_tactics(file, Tactics.of("hopper", "", "NVIDIA H200", tactics))
    found = prepare(Tuning(file=file), HOPPER).given
    assert (dict(found.by_site), found.gpu) == ({t.site: t for t in tactics}, "NVIDIA H200")
    assert Tactics.of("hopper", "", "NVIDIA H200", reversed(tactics)).text() == file.read_text()


LINE = {"site": "s", "kernel": "k", "config": {"BM": 64}, "us": 1.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON: lists or records too deep"),
        ("\x00\xff", "it is not JSON"),
        ("\ufeff{}", "it starts with a byte-order mark; save it as UTF-8 without one"),
        ("[]", "its schema is not frtc.tactics/1"),
        ('{"schema": "frtc.tactics/2"}', "its schema is not frtc.tactics/1"),
        ([{**LINE, "us": "fast"}], "tactic 0: us is not a positive number"),
        ([{**LINE, "us": True}], "tactic 0: us is not a positive number"),
        ([{**LINE, "us": float("nan")}], "tactic 0: us is not a positive number"),
        ([{**LINE, "us": 10**400}], "tactic 0: us is not a positive number"),
        ([{**LINE, "us": 10**5000}], "tactic 0: us is not a positive number"),
        ([{**LINE, "site": 7}], "tactic 0: site 7 is not a text"),
        ([{**LINE, "site": "a\nb"}], r"tactic 0: site 'a\nb' is not a text of 1 to 16384 printable ASCII"),
        ([{**LINE, "site": "s" * 200_000}], "tactic 0: site 'sss"),
        ([{**LINE, "kernel": ""}], "tactic 0: kernel '' is no name"),
        ([LINE, {**LINE, "site": "t", "kernel": "\ud800x"}], r"tactic 1: kernel '\ud800x' is no name"),
        ([{**LINE, "kernel": "\x1b[31mred\n"}], r"tactic 0: kernel '\x1b[31mred\n' is no name"),
        ([{**LINE, "kernel": "k" * 81}], "tactic 0: kernel 'kkk"),
        ([{**LINE, "config": [64]}], "tactic 0: config is not a record"),
        ([{**LINE, "config": {"BM": {}}}], "tactic 0: config has 'BM': {}"),
        ([{**LINE, "config": {"B\n": 1}}], r"tactic 0: config has 'B\n': 1"),
        ([{**LINE, "config": {"BM": "\x07"}}], r"tactic 0: config has 'BM': '\x07'"),
        ([{**LINE, "config": {"BM": 10**5000}}], "tactic 0: config has 'BM': inf"),
        ([{**LINE, "more": 1}], "tactic 0: it needs exactly the fields"),
        ([LINE, LINE], "tactic 1: its site stands twice"),
        ([LINE, 3], "tactic 1: it needs exactly the fields"),
    ],
)
def test_a_hostile_file_is_refused_with_its_fault(text: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    head = {"schema": "frtc.tactics/1", "target": "hopper", "gpu": ""}
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)  # to write what a stranger may write
    file.write_text(text if isinstance(text, str) else json.dumps({**head, "tactics": text}))
    sys.set_int_max_str_digits(digits)
    with pytest.raises(FrtcError) as refused:
        prepare(Tuning(file=file), HOPPER)
    assert refused.value.code == "tactics.file" and said in refused.value.what and refused.value.hint
    assert refused.value.what.isascii() and refused.value.what.isprintable() and len(refused.value.what) < 400


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(FrtcError, match="it is not a regular file") as refused:
            prepare(Tuning(file=place), HOPPER)
        assert refused.value.code == "tactics.file"


@pytest.mark.parametrize(("field", "value"), [("gpu", "\x1b[31m"), ("gpu", 7), ("target", "a\nb"), ("target", [])])
def test_the_head_of_a_file_is_plain(field: str, value: Any, tmp_path: Path) -> None:
    head = {"schema": "frtc.tactics/1", "target": "hopper", "gpu": "", "tactics": []}
    (tmp_path / "t.json").write_text(json.dumps({**head, field: value}))
    with pytest.raises(FrtcError, match="target and gpu are not names in plain ASCII") as refused:
        prepare(Tuning(file=tmp_path / "t.json"), HOPPER)
    assert refused.value.code == "tactics.file"


def test_what_cannot_be_tuned_is_refused_at_once(planted: Planted, tmp_path: Path) -> None:
    def code(tuning: Tuning) -> str:
        with pytest.raises(FrtcError) as refused:
            prepare(tuning, HOPPER)
        assert refused.value.hint
        return refused.value.code

    planted(sm=80)
    assert code(Tuning(measure=True)) == "tune.gpu"
    planted()
    assert code(Tuning(file=tmp_path / "absent.json")) == "tactics.file"
    with pytest.raises(UsageError) as elsewhere:
        prepare(Tuning(measure=True, file=tmp_path / "absent" / "t.json"), HOPPER)
    assert (elsewhere.value.code, "--tactics" in elsewhere.value.hint) == ("output.folder", True)
    other = tmp_path / "a100.json"
    write_tactics(other, Tactics("a100", ""))
    assert code(Tuning(file=other)) == "tactics.target"
    (tmp_path / "mine.txt").write_text("dear diary")
    assert code(Tuning(measure=True, file=tmp_path / "mine.txt")) == "tactics.file"
    assert (tmp_path / "mine.txt").read_text() == "dear diary"
    with pytest.raises(EnvironmentFault) as unwritten:
        write_tactics(tmp_path / "absent" / "t.json", Tactics("hopper", ""))
    assert unwritten.value.code == "tactics.write"


def test_without_a_gpu_the_real_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EnvironmentFault) as refused:
        prepare(Tuning(measure=True), HOPPER)
    assert (refused.value.code, refused.value.exit_code) == ("tune.process", 5)
    assert "GPU" in dict(refused.value.rows)["found"] or "driver" in dict(refused.value.rows)["found"]


def test_the_seconds_of_the_command_line_are_checked() -> None:
    import argparse

    from frtc.commands.compile import _tuning

    for seconds in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(UsageError, match="more than 0, at most 86400 seconds"):
            _tuning(argparse.Namespace(tune=True, tactics=None, tune_seconds=seconds))
    with pytest.raises(UsageError, match="without --tune there are none") as refused:
        _tuning(argparse.Namespace(tune=False, tactics=None, tune_seconds=5.0))
    assert refused.value.code == "usage.option"
    assert _tuning(argparse.Namespace(tune=False, tactics=None, tune_seconds=None)) == Tuning()
    assert _tuning(argparse.Namespace(tune=True, tactics=None, tune_seconds=5.0)) == Tuning(True, None, 5.0)


def test_the_tables_that_are_shipped_fit(tmp_path: Path) -> None:
    """Every table is one of a target's, and reads."""
    for path in tuned.Path(tuned.__file__).parents[2].glob("kernels/tactics/*.json"):
        assert path.stem in load_targets()
        prepare(Tuning(file=path), load_targets()[path.stem])
