"""What `run --profile` and `--report` say of a Plan with planted times."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from frtc.arena_map import Lifetime, lifetimes
from frtc.kernels.targets import load_targets
from frtc.profile import FIRST, Report, kernel_of, report_of, short
from frtc.profile_page import html_of
from frtc.runtime.plan import Call, Program, Ref, Stage
from frtc.runtime.profile import LaunchTime, Profile
from frtc.work import Work, kind_of, work_of
from tests.runtime import small_plan

HOPPER = load_targets()["hopper"]
DEVICE = {"name": "Null & GPU", "memory": {"planned": 12_345_678}}
US = [5.0, 2.0, 0.5, 0.5, 30.0, 5.0]  # in.0 (two launches), in.1, in.2, step.0, step.1
HOSTILE = "<script>alert('x')</script>\"&"


def planted(program: Program) -> Report:
    places = [
        (s.name, c, k) for s in program.stages for c, call in enumerate(s.calls) for k in range(len(call.launches))
    ]
    times = (LaunchTime(*place, us + 1, us, 1) for place, us in zip(places, US * 9, strict=False))
    return report_of(program, Profile(tuple(times), 0.25, 1.5, 115.0))


def ref(dtype: str, *shape: int, **fields: object) -> Ref:
    steps = [1]
    for n in reversed(shape[1:]):
        steps.insert(0, steps[0] * n)
    whole: dict[str, object] = {"space": "arena", "offset": 0, "dtype": dtype, "shape": shape, "strides": tuple(steps)}
    return Ref(**{**whole, **fields})  # type: ignore[arg-type]


def call(op: str, operands: tuple[Ref | None, ...], results: tuple[Ref, ...], **attrs: object) -> Call:
    return Call(op, op, attrs, operands, results, ())


# ---- work ------------------------------------------------------------------------------------------------------------


def test_work_of_products() -> None:
    x, w, y = ref("bf16", 50, 1024), ref("e4m3", 4096, 1024), ref("bf16", 50, 4096)
    work = work_of(call("linear", (x, w), (y,), act="none"))
    assert work == Work(2 * 50 * 1024 + 4096 * 1024 + 2 * 50 * 4096, 2.0 * 50 * 1024 * 4096, "bf16")
    assert work_of(call("linear", (replace(x, dtype="e4m3"), w), (y,))).rate == "e4m3"
    gated = work_of(call("gated_linear", (x, w), (ref("bf16", 50, 2048),), act="silu"))
    assert gated.flops == work.flops


def test_work_of_attention_and_of_views() -> None:
    q, k, y = ref("bf16", 8, 50, 256), ref("bf16", 1, 600, 256), ref("bf16", 8, 50, 256)
    work = work_of(call("attention", (q, k, replace(k, offset=4)), (y,), scale=1.0))
    assert (work.flops, work.rate) == (4.0 * 8 * 50 * 600 * 256, "bf16")
    assert work.nbytes == 2 * (2 * 8 * 50 * 256 + 2 * 600 * 256)
    same = work_of(call("add", (q, q), (y,)))  # one operand, read once
    assert (same.nbytes, same.rate) == (2 * 2 * 8 * 50 * 256, "")
    repeated = replace(ref("f32", 50, 256), strides=(0, 1))
    assert work_of(call("add", (ref("f32", 50, 256), repeated), (ref("f32", 50, 256),))).nbytes == 4 * (
        2 * 50 * 256 + 256
    )


def test_a_gather_reads_what_it_writes() -> None:
    table, ids, rows = ref("bf16", 250_000, 64), ref("i32", 7), ref("bf16", 7, 64)
    assert work_of(call("embedding", (table, ids), (rows,))).nbytes == 2 * 2 * 7 * 64 + 4 * 7


def test_the_roofline_is_the_longer_of_both_times() -> None:
    assert Work(3_350_000, 989e6, "bf16").roof_us(HOPPER) == pytest.approx(1.0)
    assert Work(6_700_000, 989e6, "bf16").roof_us(HOPPER) == pytest.approx(2.0)
    assert Work(3_350_000, 3 * 989e6, "bf16").roof_us(HOPPER) == pytest.approx(3.0)
    assert Work(3_350_000, 1e12, "f32").roof_us(HOPPER) == pytest.approx(1.0)  # the target states no such rate


def test_classes() -> None:
    ops = ("linear_norm", "matmul", "attention", "ada_rms_norm", "pointwise", "silu", "embedding")
    assert [kind_of(op) for op in ops] == ["GEMM", "GEMM", "attention", "norm", "pointwise", "pointwise", "other"]


# ---- report ----------------------------------------------------------------------------------------------------------


def test_rows_and_sums() -> None:
    report = planted(small_plan.program())
    assert [row.place for row in report.rows] == ["in/0.0", "in/0.1", "in/1", "in/2", "step/0", "step/1"]
    first, second = report.rows[:2]
    assert first.roof_us > 0 and first.nbytes > 0 and second.nbytes == second.flops == second.roof_us == 0
    assert first.share == second.share == pytest.approx(first.roof_us / 7.0)  # of both launches of the call
    assert [row.count for row in report.rows] == [1, 1, 1, 1, 3, 3]
    assert report.sum_us == 1.5 + 8 + 3 * 35
    step, products = report.stages["step"], report.kinds["GEMM"]
    assert (step.launches, step.in_graph_us, step.alone_us) == (6, 105.0, 111.0)
    assert step.share == pytest.approx(step.roof_us / 105.0)
    assert (products.launches, products.in_graph_us) == (6, 5 + 2 + 0.5 + 3 * 5)
    for name in ("launches", "in_graph_us", "alone_us", "roof_us", "nbytes", "flops"):
        whole = [sum(getattr(s, name) for s in sums.values()) for sums in (report.kinds, report.stages)]
        assert whole[0] == pytest.approx(whole[1]), name


def test_the_slowest_in_an_inference_comes_first() -> None:
    lines = str(planted(small_plan.program())).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["step/0", "step/1", "in/0.0"]
    assert "small_scale" in lines[2] and lines[2].split()[-1] == "step.0"
    assert "sums to 0.115 ms, a replay takes 0.115 ms" in lines[-1] and "0.25 us are noise" in lines[-1]


def test_long_plans_are_cut_in_the_text_and_whole_in_the_data() -> None:
    program = small_plan.program()
    stage = Stage("in", program.stages[0].calls * 12)
    report = planted(replace(program, stages=(stage, program.stages[1])))
    lines = str(report).splitlines()
    assert lines.index("by class of kernels, in a whole inference") == 2 + FIRST
    assert len(report.to_json()["launches"]) == 12 * 4 + 2


def test_a_target_that_is_not_known_here_has_no_roofline() -> None:
    program = small_plan.program()
    report = planted(replace(program, target=replace(program.target, name="elsewhere")))
    assert all(row.share is None for row in report.rows) and report.stages["in"].share is None
    assert " - " in str(report).splitlines()[2]
    assert "Roofline" not in html_of(
        program=replace(program, target=replace(program.target, name="x")), report=report, device=DEVICE
    )


def test_kernels_by_name() -> None:
    symbol = "_ZN4frtc9smxx_gemmI13__nv_bfloat16NS_4TileILi64ELi128ELj32ELb1EEELb0EEEvPKT_"
    assert kernel_of(symbol) == ("smxx_gemm", "64,128,32")
    assert kernel_of("_ZN4frtc5sm1104gemmI13__nv_bfloat16Li128EEEvPKT_") == ("sm110::gemm", "128")
    assert kernel_of("small_linear") == ("small_linear", "")


def test_short_numbers() -> None:
    assert [short(n) for n in (7, 999, 1234, 16.8e6, 2.1e9, 3e12)] == ["7", "999", "1.23 k", "16.8 M", "2.1 G", "3 T"]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_lifetimes() -> None:
    a, b, low = ref("f32", 4), ref("f32", 4, offset=32), ref("f32", 2)
    outside = ref("f32", 4, space="state")
    stage = Stage("s", (
        call("exp", (outside,), (a,)),  # bytes 0..16, last read by call 2
        call("neg", (a,), (b,)),
        replace(call("add", (low, b), (outside,)), scratch=(64, 8)),
        call("abs", (outside,), (low,)),  # takes the place of a
        call("abs", (a,), (outside,)),
    ))  # fmt: skip
    assert lifetimes(stage) == [
        Lifetime("exp", "exp", 0, 2, 0, 16),
        Lifetime("neg", "neg", 1, 2, 32, 48),
        Lifetime("add, workspace", "add", 2, 2, 64, 72),
        Lifetime("abs", "abs", 3, 4, 0, 8),
    ]


# ---- page ------------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """tags, the texts of <title> inside drawings, and the attributes that could reach for something else."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.open: list[str] = []
        self.reaching: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        self.titles += [""] * (tag == "title")
        self.reaching += [a for a in attrs if a[0] in ("src", "href", "action") or a[0].startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles[-1] += data


def renamed(program: Program, name: str) -> Program:
    stages = tuple(replace(s, calls=tuple(replace(c, name=name) for c in s.calls)) for s in program.stages)
    return replace(program, stages=stages, model=name)


def test_the_page_has_every_launch_and_needs_nothing() -> None:
    program = small_plan.program()
    report = planted(program)
    text = html_of(program, report, DEVICE)
    seen = Reader(text)
    assert not seen.open and not seen.reaching and "script" not in seen.tags
    assert "url(" not in text and "@import" not in text and "://" not in text
    for row in report.rows:
        timeline = [t for t in seen.titles if t.startswith(f"{row.place}  {row.op}  {row.name}\n")]
        dots = [t for t in timeline if "FLOPs per byte" in t]
        assert len(timeline) - len(dots) == 1 and len(dots) == (row.launch == 0), row.place
        assert f"{row.in_graph_us:.2f} us in the graph" in timeline[0]
        assert text.count(f'<td class="left">{row.place}</td>') == 1
    held = [t.splitlines()[0] for t in seen.titles if " at " in t and ", calls " in t]
    assert held == ["linear  in.0", "linear  in.1", "linear  step.1, workspace"]
    assert text.count("step: 35.0 us") == 3  # every round of the whole
    assert "prefers-color-scheme: dark" in text and "Null &amp; GPU" in text and "12.35 MB" in text


def test_names_are_escaped() -> None:
    program = renamed(small_plan.program(), HOSTILE)
    text = html_of(program, planted(program), DEVICE)
    assert "<script" not in text and "&lt;script&gt;" in text
    seen = Reader(text)
    assert "script" not in seen.tags and not seen.open and any(HOSTILE in title for title in seen.titles)


def test_boxes_of_launches_that_add_nothing() -> None:
    """Below zero is noise; a box has no width below zero, and a roofline no such dot."""
    program = small_plan.program()
    report = planted(program)
    rows = tuple(replace(row, in_graph_us=-0.5, share=None) for row in report.rows)
    text = html_of(program, replace(report, rows=rows), DEVICE)
    assert 'width="-' not in text and "<circle" not in text
