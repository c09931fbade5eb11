"""The search in the chain as a bench: which sites it takes, what it writes. Times are planted, nothing is compiled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import tests.frtc
from bench import chain_search, gpu_scale
from bench.chain_search import Prepared, Search, cases, prepared, search_all, write
from frtc.codegen import build
from frtc.codegen.nvrtc import Cubin
from frtc.errors import UsageError
from frtc.kernels.tactic import Tactics, read_tactics
from frtc.tuning import builders
from frtc.tuning.builder import Builder
from frtc.tuning.questions import Place
from frtc.tuning.trial import run

(CASE,) = cases("pi05", "cpu")
PROGRAM = "denoise"
FAKES = Path(tests.frtc.__path__[0])


@pytest.fixture(scope="module")
def whole() -> Prepared:
    """With two candidates at most, and nothing compiled."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "compile_all", lambda jobs, **more: [Cubin(b"", job.entry) for job in jobs])
        patched.setattr(chain_search, "MOST", 1)
        return prepared(CASE)


@pytest.fixture
def ready(whole: Prepared) -> Prepared:
    """Of the denoise step three sites."""
    job, places = whole
    return job, sorted((p for p in places if PROGRAM in p.calls), key=lambda place: -place.shares[PROGRAM])[:3]


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    """The table is empty, and every program takes 1000 us."""
    monkeypatch.setattr(
        chain_search, "COMMAND", (sys.executable, str(FAKES / "fake_tuner.py"), str(tmp_path / "planted.json"))
    )
    command = (sys.executable, str(FAKES / "fake_builder.py"), str(tmp_path / "broken.json"))
    monkeypatch.setattr(builders, "COMMAND", command)
    monkeypatch.setattr(chain_search, "EMULATED", "")
    monkeypatch.setattr(chain_search, "table_of", lambda target: Tactics(target, ""))
    monkeypatch.setenv("OUT", str(tmp_path))
    plant(tmp_path)
    return Search(CASE, "cpu", time.monotonic() + 600, again=False)


def plant(folder: Path, does: Sequence[tuple[str, str, Any]] = ()) -> None:
    (folder / "planted.json").write_text(json.dumps({"sm": 90, "times": [], "whole": list(does)}))
    (folder / "broken.json").write_text("{}")


def table(monkeypatch: pytest.MonkeyPatch, places: Sequence[Place]) -> None:
    known = Tactics.of("hopper", "", "", [place.candidates[0] for place in places])
    monkeypatch.setattr(chain_search, "table_of", lambda target: known)


def test_what_is_quicker_stays(search: Search, ready: Prepared, tmp_path: Path, capsys: Any) -> None:
    """One site has a quicker candidate, another one's is quicker by less than what counts; of the third it fails."""
    first, second, third = ready[1]
    does = [(first, 100.0), (second, 1.0), (third, "crash")]
    plant(tmp_path, [(place.key, str(place.candidates[1]), what) for place, what in does])
    for _ in search.run(ready, [PROGRAM]):
        write([search], search.chosen, "cpu", 1.0)
    named = {key: str(tactic) for key, tactic in search.chosen.items()}
    assert named == {p.key: str(p.candidates[i]) for p, i in ((first, 1), (second, 0), (third, 0))}
    written = read_tactics(tmp_path / "hopper.json", "hopper").by_site
    assert written.keys() == search.chosen.keys() and all(0 < t.us < 1000 for t in written.values())
    rows = json.loads((tmp_path / "chain_search.json").read_text())["rows"][CASE.label]
    assert [row.get("times_us", {}).get(PROGRAM) for row in rows[:6]] == [1000.0, 1000.0, 900.0, 900.0, 899.0, 900.0]
    assert [row["tactic"] for row in rows[1:3]] == [str(first.candidates[0]), str(first.candidates[1])]
    assert rows[6]["failed"] == "the measuring process ended: signal 11"
    said = capsys.readouterr().out
    assert f"*     900.0 (-{100 / sum(first.calls.values()):.2f} a launch) {first.candidates[1]}" in said
    assert f"{third.candidates[1]}: the measuring process ended: signal 11" in said


def test_what_the_table_knows_is_left(search: Search, ready: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (one, *others) = ready
    table(monkeypatch, [one])
    assert search.wanted(ready[1]) == others
    search.again = True
    assert search.wanted(ready[1]) == [one, *others]


def test_named_sites_are_searched_whatever_is_known(
    search: Search, ready: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others: that the table has one, or that it has few launches, does not matter."""
    table(monkeypatch, ready[1])
    monkeypatch.setattr(chain_search, "SHARE", 2.0)
    assert search.wanted(ready[1]) == []
    search.texts = (ready[1][1].key,)
    list(search.run(ready, [PROGRAM]))
    assert search.searched == {ready[1][1].key} and len(search.rows) == 3
    assert search.wanted(ready[1]) == []  # as for another program, or case


def test_sites_that_nobody_has_are_a_mistake(search: Search, ready: Prepared) -> None:
    search.texts = ("of no op",)
    with pytest.raises(UsageError, match="no site of denoise holds 'of no op'"):
        search_all([search], [done(ready)], {}, [PROGRAM])


def test_programs_that_nobody_has_are_a_mistake(search: Search, ready: Prepared) -> None:
    with pytest.raises(UsageError, match="there is no program nothing"):
        search_all([search], [done(ready)], {}, [PROGRAM, "nothing"])


def done(ready: Prepared) -> Future[Prepared]:
    future: Future[Prepared] = Future()
    future.set_result(ready)
    return future


@pytest.mark.parametrize("main", [chain_search.main, gpu_scale.main])
def test_cases_that_nobody_has_are_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: Any, main: Any) -> None:
    """Said before anything is compiled, with the labels that there are."""
    monkeypatch.setattr("sys.argv", ["bench", "--only", "c51 fp9"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "c51 fp9" in said and cases("pi05", "cuda")[0].label in said


def test_no_time_no_sites(search: Search, ready: Prepared, capsys: Any) -> None:
    search.until = 0.0
    assert list(search.run(ready, [PROGRAM])) == [] and not search.chosen
    assert "there was no time for it" in capsys.readouterr().out


def test_what_is_prepared_is_every_product_and_attention(whole: Prepared) -> None:
    """Of all programs, with what an inference takes in."""
    job, places = whole
    assert {program for place in places for program in place.calls} >= {"vision", "prefix", "denoise"}
    assert {place.key.partition("(")[0] for place in places} <= set(chain_search.OPS)
    assert all(len(place.candidates) == 2 for place in places) and int(job.inputs["n"]) == CASE.shape.prompt


def test_values_in_fp8_are_no_zeros(whole: Prepared) -> None:
    """Else a kernel that computes nothing passed for one that does."""
    job, places = whole
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "compile_all", lambda jobs, **more: [Cubin(b"", one.entry) for one in jobs])
        trial = Builder(job).trial(())
    keys = [place.key for place in places if "e4m3" in place.key]
    found = run(trial, keys, gpu=False)
    zeros = {key: max(sum(x == 0 for x in some) / len(some) for some in found["probes"][key]) for key in keys}
    assert len(zeros) > 9 and max(zeros.values()) < 0.5
