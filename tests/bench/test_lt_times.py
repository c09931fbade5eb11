"""The comparison with cuBLASLt without a GPU: what the library is told, the launch behind its product, the verdict."""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench import cublaslt
from bench.cublaslt import Algorithm, Failed, Heuristic, Library, Problem
from bench.lt_chain import copies_of
from bench.lt_times import Row, Task, is_large, line, plain_of, problems_of, searched, table, tasks_of
from bench.product_times import WEIGHTS, size_of
from frtc.codegen.nvrtc import compile_one
from frtc.compiler import target_named
from frtc.errors import EnvironmentFault
from frtc.kernels.catalog import CATALOG, label
from frtc.kernels.spec import Operand, Param, Site
from frtc.tuning.chain import chain_of, jobs_of
from frtc.tuning.questions import Question

HOPPER = target_named("hopper")
NUMPY = {14: np.dtype(ml_dtypes.bfloat16), 28: np.dtype(ml_dtypes.float8_e4m3fn)}


class Fake:
    """cuBLASLt as its header describes it, in NumPy: handles are places in a list, matrices are stored by columns."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def _new(self, handle: Any, value: Any) -> int:
        self.made.append(value)
        handle._obj.value = len(self.made)
        return 0

    def _at(self, handle: Any) -> Any:
        return self.made[handle.value - 1]

    def cublasLtMatmulDescCreate(self, handle: Any, compute: int, scale: int) -> int:
        return self._new(handle, {"compute": compute, "scale": scale})

    def cublasLtMatmulDescSetAttribute(self, handle: Any, which: int, value: Any, size: Any) -> int:
        self._at(handle)[which] = int.from_bytes(bytes(value._obj)[: size.value], "little")
        return 0 if size.value == ctypes.sizeof(value._obj) else 7

    def cublasLtMatrixLayoutCreate(self, handle: Any, kind: int, rows: Any, columns: Any, ld: Any) -> int:
        return self._new(handle, (kind, rows.value, columns.value, ld.value))

    def cublasLtCreate(self, handle: Any) -> int:
        return self._new(handle, "library")

    def cublasLtMatmulPreferenceCreate(self, handle: Any) -> int:
        return self._new(handle, {})

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        found, count = arguments[-2:]
        found[0].state, found[1].state, found[2].state = 0, 15, 0
        count._obj.value = 3
        return 0

    def cublasLtMatmul(self, handle: Any, operation: Any, *arguments: Any) -> int:
        alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, _, _, _, _ = arguments
        assert (alpha._obj.value, beta._obj.value, c.value, of_c.value) == (1, 0, d.value, of_d.value)
        said = self._at(operation)
        assert said["compute"] == 68 and said[3] == 1 and said[4] == 0
        left, right, result = (self._view(*each) for each in ((a, of_a), (b, of_b), (d, of_d)))
        result[...] = left.astype(np.float32).T @ right.astype(np.float32)
        return 0

    def _view(self, address: Any, layout: Any) -> Any:
        kind, rows, columns, ld = self._at(layout)
        size = NUMPY[kind].itemsize
        raw = (ctypes.c_uint8 * (((columns - 1) * ld + rows) * size)).from_address(address.value)
        return np.ndarray((rows, columns), NUMPY[kind], raw, 0, (size, ld * size))


def test_records_have_the_size_of_the_header() -> None:
    assert ctypes.sizeof(Algorithm) == 64
    places = {name: getattr(Heuristic, name).offset for name in ("algorithm", "workspace", "state", "waves")}
    assert places == {"algorithm": 0, "workspace": 64, "state": 72, "waves": 76}
    assert ctypes.sizeof(Heuristic) == 96


@pytest.mark.parametrize(("dtype", "gap"), [("bf16", 0), ("bf16", 8), ("e4m3", 0), ("e4m3", 16)])
def test_what_is_asked_for_is_the_product(dtype: str, gap: int) -> None:
    m, n, k = 3, 8, 32
    kind, generator = NUMPY[cublaslt.TYPES[dtype]], np.random.default_rng(0)
    x, w = (np.asarray(generator.standard_normal((rows, k + gap)), kind) for rows in (m, n))
    y = np.zeros((m, n), ml_dtypes.bfloat16)
    product = Library(Fake()).product(Problem(m, n, k, dtype, k + gap, k + gap), 77)
    first, second = product.algorithms()  # the one that cannot run is left out
    product.run(first, w.ctypes.data, x.ctypes.data, y.ctypes.data, 0, 0)
    wanted = x[:, :k].astype(np.float32) @ w[:, :k].astype(np.float32).T
    assert np.allclose(y.astype(np.float32), wanted, rtol=1e-2, atol=1e-2) and second.state == 0


def test_scales_belong_to_e4m3() -> None:
    told = {which: value.value for which, value in Problem(1, 1, 16, "e4m3").attributes(77)}
    assert told == {3: 1, 4: 0, 17: 77, 18: 77, 25: 1}
    assert set(dict(Problem(1, 1, 16, "bf16").attributes(77))) == {3, 4}


def test_a_status_is_an_error() -> None:
    fake = Fake()
    fake.cublasLtCreate = lambda handle: 1  # type: ignore[method-assign]
    with pytest.raises(Failed, match="cublasLtCreate gave status 1"):
        Library(fake).product(Problem(1, 8, 16, "bf16"), 0).algorithms()


def test_no_library_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cublaslt, "SONAMES", ("libno-such-thing.so.13",))
    with pytest.raises(EnvironmentFault, match="cuBLASLt cannot be loaded") as fault:
        Library.load()
    assert ("tried", "libno-such-thing.so.13") in fault.value.rows
    wheel = tmp_path / cublaslt.WHEELS[1] / "libno-such-thing.so.13"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    assert cublaslt.paths([tmp_path]) == [str(wheel), "libno-such-thing.so.13"]


def e4m3_linear(k: int = 1152, ld: int = 1280) -> Site:
    x, w = Operand("e4m3", (2, 8, k), (8 * ld, ld, 1)), Operand("e4m3", (1152, k), (ld, 1))
    bias, alpha, inv = Operand.packed("bf16", 1152), Operand.packed("f32", 1152), Operand.packed("f32")
    attrs = {"act": "gelu_tanh", "per_row": False, "staged": "bf16"}
    return Site(
        "linear", (x, w, bias, None, None, None, alpha, None, inv), (Operand.packed("e4m3", 2, 8, 1152),), attrs
    )


def test_the_plain_product_has_one_scale_and_nothing_behind_it() -> None:
    site = e4m3_linear()
    plain = plain_of(site)
    assert plain.operands[:2] == site.operands[:2] and plain.operands[6] == Operand.packed("f32")
    assert [o for i, o in enumerate(plain.operands[2:], 2) if i != 6] == [None] * 6
    assert plain.results == (Operand.packed("bf16", 2, 8, 1152),) and plain.attrs["act"] == "none"
    assert CATALOG.select(plain, HOPPER, HOPPER.families("native")).kernel.name.startswith("sm90_")
    assert is_large(site) and not is_large(e4m3_linear(512, 512))


def test_the_library_may_have_rows_without_gaps() -> None:
    assert problems_of(e4m3_linear()) == [
        Problem(16, 1152, 1152, "e4m3", 1280, 1280),
        Problem(16, 1152, 1152, "e4m3", 1152, 1152),
    ]
    assert problems_of(e4m3_linear(1152, 1152)) == [Problem(16, 1152, 1152, "e4m3", 1152, 1152)]


def test_weights_are_as_many_as_in_our_chains() -> None:
    site = plain_of(e4m3_linear(1152, 1152))
    choice = CATALOG.select(site, HOPPER, HOPPER.families("native"))
    question = Question("", site, WEIGHTS, 0.0, (choice,))
    cubins = {job: compile_one(job) for job in jobs_of(question, choice, HOPPER)}
    calls = chain_of(question, choice, HOPPER, cubins).calls
    assert copies_of(1152 * 1152, HOPPER.l2) == len({call.operands[1] for call in calls})


PREFIX = {(560, 2560, 2048), (560, 2048, 2048), (560, 32768, 2048), (560, 2048, 16384)}
VISION = {(512, 3456, 1152), (512, 1152, 1152), (512, 4304, 1152), (512, 1152, 4304)}


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return tasks_of("pi05", ("fp8", "bf16"), HOPPER)


def test_the_shapes_of_the_bars_are_there(tasks: list[Task]) -> None:
    for dtype in ("e4m3", "bf16"):
        found = {size_of(task.site)[:3] for task in tasks if size_of(task.site)[3] == dtype}
        assert found >= PREFIX | VISION


def test_what_runs_behind_the_product_reads_it_and_writes_what_the_site_does(tasks: list[Task]) -> None:
    for task in tasks:
        rest, (m, n, _, _) = task.rest, size_of(task.site)
        product = rest.site.operands[rest.product]
        assert product is not None and (product.dtype, product.nbytes) == ("bf16", 2 * m * n)
        assert rest.site.results == task.site.results
        read = {int(param.value) for param in rest.stage.params if param.kind == "operand"}
        given = {place for place, operand in enumerate(rest.site.operands) if operand is not None}
        assert rest.product in read and read <= given
        dropped = {given_to for given_to in given - read if rest.site.operands[given_to] != Operand("i32", (), ())}
        assert not dropped, f"{rest.site.op} does not read {dropped}"  # but for a count of rows: all are there


def kernel_of(task: Task) -> tuple[str, str]:
    return task.site.op, task.rest.stage.entry.partition("<")[0]


def test_what_runs_behind_the_product_compiles(tasks: list[Task]) -> None:
    """One of each kernel; with factors of rows of the longest moments."""
    chosen = {kernel_of(task): task for task in sorted(tasks, key=lambda task: size_of(task.site)[2])}
    apart = {(op, name.removeprefix("frtc::")) for op, name in chosen}
    assert apart >= {
        ("linear", "factors_apart"),
        ("gated_linear", "factors_apart"),
        ("linear_moments", "moments_apart"),
    }
    for (op, _), task in chosen.items():
        assert compile_one(task.rest.job).resources.local == 0, op


def test_moments_are_read_and_written_behind_the_product(tasks: list[Task]) -> None:
    """As in the fused kernel: all three results, and factors of x's moments where the site has such."""
    both = [task.rest for task in tasks if task.site.op == "linear_moments"]
    assert {rest.site.attrs["norm"] for rest in both} == {"rms", "layer"}
    for rest in both:
        assert {param.value for param in rest.stage.params if param.kind == "result"} == {0, 1, 2}
    readers = [task for task in tasks if task.site.op != "linear_moments" and task.site.attrs["norm"] != "none"]
    assert {size_of(task.site)[3] for task in readers} == {"e4m3", "bf16"}
    for task in readers:
        assert f"frtc::MomentFactors<{size_of(task.site)[2]}, " in task.rest.stage.entry


def test_blocks_that_find_factors_have_every_column_once(tasks: list[Task]) -> None:
    """And none waits for another to end."""
    found = [task for task in tasks if kernel_of(task)[1] == "frtc::factors_apart"]
    assert found
    for task in found:
        (m, n, _, _), (across, down, _) = size_of(task.site), task.rest.stage.grid
        width = task.rest.stage.params[3].value
        assert task.rest.stage.params[1:3] == (Param("i32", m), Param("i32", n)) and width % 256 == 0
        assert (across - 1) * width < n <= across * width and (down - 1) * 32 < m <= down * 32
        assert across * down <= 2 * HOPPER.sms


def row(**changes: Any) -> Row:
    size, kernels, times = (
        (560, 2048, 2048, "e4m3"),
        ("sm90_gemm", "norm", "sm90_norm_gemm"),
        {"after": 9.5, "early": 9.0},
    )
    known = Row("prefix", "linear_norm", size, kernels, 6.4, {"place": 2}, 8, 6.9, times, 8.5)
    return replace(known, **changes)


def test_bars_decide_on_the_faster_rival() -> None:
    assert row().share == pytest.approx(0.928, abs=1e-3) and row().rival == 9.0
    assert row().bars == {"plain": True, "fused": True}
    assert row(plain=7.2).bars == {"plain": False, "fused": True}
    assert row(fused=9.0).bars == {"plain": True, "fused": False}


@dataclass
class Slow:
    """Measures nothing: each candidate takes what is left of `times`."""

    times: list[float | None]

    def measure(self, chain: object) -> Any:
        return SimpleNamespace(us=self.times.pop(0))


@pytest.mark.parametrize(
    ("times", "found"), [([7.5, None, 6.5], 6.5), ([7.5, 7.0, 7.0], 7.0), ([None] * 3, 7.2), ([7.3, 7.2, 9.0], 7.2)]
)
def test_what_else_is_worth_trying_where_a_bar_is_missed(tasks: list[Task], times: list[Any], found: float) -> None:
    task = next(task for task in tasks if size_of(task.site) == (560, 2048, 2048, "e4m3"))
    others = task.others("plain", HOPPER)
    labels = [label(choice.kernel, choice.config) for choice in others.candidates]
    assert len(labels) > 2 and task.names()[0] not in labels
    others = replace(others, candidates=others.candidates[:3])
    better = searched(row(plain=7.2), "plain", others, Slow(list(times)), HOPPER)  # type: ignore[arg-type]
    assert better.plain == found and better.fused == row().fused
    if found == 7.2:
        assert not better.picked and "*" not in "".join(line(better))
    else:
        assert better.picked == {"plain": 7.2} and better.kernels[0] == labels[times.index(found)]
        assert f"{found:.2f}*" in line(better)


@pytest.mark.parametrize("name", ["lt", "plain", "fused"])
def test_what_was_not_measured_meets_no_bar(name: str) -> None:
    assert not all(row(**{name: math.nan}).bars.values())
    assert not row(lt_and_rest={}).bars["fused"] and not row(lt_and_rest={"after": math.nan}).bars["fused"]


def test_rows_are_json_without_nan() -> None:
    said = json.loads(json.dumps(row(lt=math.nan, lt_and_rest={"early": math.nan}).to_json(), allow_nan=False))
    assert said["lt"] is None and said["share"] is None and said["lt_and_rest"] == {"early": None}
    assert said["bars"] == {"plain": False, "fused": False} and said["size"] == [560, 2048, 2048, "e4m3"]


def test_the_table_says_who_won() -> None:
    lines = table([row(), row(plain=7.2, lt_and_rest={"after": 8.0, "early": 8.4})]).splitlines()
    assert line(row())[-4:] == ("9.00 early", "8.50", "1.06", "ok")
    assert "MISSED" not in lines[1] and lines[2].count("MISSED") == 2
    assert lines[3].endswith(
        "plain at 90% of cuBLASLt or more: 1 of 2; fused faster than cuBLASLt and a launch: 1 of 2"
    )
