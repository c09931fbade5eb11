"""The compiler driver: what comes out, what is kept, and what it says when it cannot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from frtc.codegen import nvrtc
from frtc.codegen.nvrtc import CompileFailed, Cubin, Job, compile_all, compile_one
from frtc.codegen.render import headers_of
from frtc.errors import EnvironmentFault
from frtc.kernels.cubin import parameters_of, resources_of, sm_of
from frtc.kernels.targets import load_targets

TARGETS = load_targets()
SOURCE = """
#include "numeric.cuh"
namespace frtc {
template <typename T, int N>
__global__ void __launch_bounds__(64) reverse(const T* x, T* y, int n, float scale) {
    __shared__ float row[N];
    row[threadIdx.x] = to_f32(x[threadIdx.x]);
    __syncthreads();
    y[threadIdx.x] = from_f32<T>(scale * row[n - 1 - threadIdx.x]);
}
__global__ void spill(float* y, int i) {
    volatile float values[100];
    for (int j = 0; j < 100; ++j) values[j] = y[j];
    y[0] = values[i];
}
}
"""
REVERSE = Job(SOURCE, "frtc::reverse<frtc::bf16, 64>", TARGETS["hopper"])


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRTC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries that the compiler really ran for."""
    entries: list[str] = []
    really = nvrtc._compile

    def count(job: Job) -> Cubin:
        entries.append(job.entry)
        return really(job)

    monkeypatch.setattr(nvrtc, "_compile", count)
    return entries


def test_every_target() -> None:
    jobs = [replace(REVERSE, target=target) for target in TARGETS.values()]
    for job, cubin in zip(jobs, compile_all(jobs), strict=True):
        assert cubin.sm == sm_of(cubin.image) == job.target.sm
        assert cubin.symbol == "_ZN4frtc7reverseI13__nv_bfloat16Li64EEEvPKT_PS2_if"
        assert parameters_of(cubin.image, cubin.symbol) == (8, 8, 4, 4)
        assert cubin.resources.smem == 256 and cubin.resources.local == 0 and 8 <= cubin.resources.registers <= 40


def test_local_memory_is_seen() -> None:
    assert compile_one(replace(REVERSE, entry="frtc::spill")).resources.local >= 400


def test_no_path_reaches_the_cubin(compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = compile_one(REVERSE).image
    monkeypatch.setenv("FRTC_CACHE", str(tmp_path / "another"))
    assert compile_one(REVERSE).image == first and len(compiled) == 2
    for folder in (str(Path(nvrtc.__file__).parent), str(tmp_path), str(Path.home())):
        assert folder.encode() not in first


def test_equal_jobs_are_compiled_once_and_kept(compiled: list[str]) -> None:
    done: list[float] = []
    cubins = compile_all(
        [REVERSE, REVERSE, replace(REVERSE, entry="frtc::spill")], done=lambda job, part: done.append(part)
    )
    assert cubins[0] is cubins[1] and sorted(compiled) == ["frtc::reverse<frtc::bf16, 64>", "frtc::spill"]
    assert done == [0.5, 1.0]
    assert compile_one(REVERSE).image == cubins[0].image and len(compiled) == 2


def test_everything_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        job.key()
        for job in (
            REVERSE, replace(REVERSE, source=SOURCE + " "), replace(REVERSE, entry="frtc::spill"),
            replace(REVERSE, target=TARGETS["thor"]), replace(REVERSE, defines=("A",)),
        )
    }  # fmt: skip
    monkeypatch.setattr(nvrtc, "headers_of", lambda source: {"numeric.cuh": "changed"})
    assert len(keys | {REVERSE.key()}) == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b[:-100] + bytes([b[-100] ^ 1]) + b[-99:],
        lambda b: b.replace(b"reverse", b"REVERSE", 1),
        lambda b: b"",
        lambda b: b"{}\n",
    ],
)
def test_damaged_entries_are_compiled_again(compiled: list[str], damage: object) -> None:
    good = compile_one(REVERSE).image
    (path,) = nvrtc.cache_folder().rglob("*.cubin")
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert compile_one(REVERSE).image == good and len(compiled) == 2
    assert compile_one(REVERSE).image == good and len(compiled) == 2, "the entry is whole again"


def test_a_cache_that_cannot_be_written_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FRTC_CACHE", str(tmp_path / "file"))
    assert compile_one(REVERSE).sm == 90


def test_a_refused_source_shows_the_log() -> None:
    with pytest.raises(CompileFailed) as caught:
        compile_one(replace(REVERSE, source=SOURCE + "int broken = undefined_name;"))
    text = str(caught.value)
    assert text.startswith("frtc::reverse<frtc::bf16, 64> for sm_90a: NVRTC_ERROR_COMPILATION\n")
    assert 'identifier "undefined_name" is undefined' in text


def test_the_compiler_must_be_the_targets() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        compile_one(replace(REVERSE, target=replace(TARGETS["hopper"], nvrtc_major=12)))
    assert caught.value.code == "compiler.version" and "needs NVRTC 12" in caught.value.what


def test_headers_are_found_through_each_other() -> None:
    assert {"numeric.cuh", "smxx_norm.cuh", "vector.cuh"} <= set(headers_of('#include "smxx_norm.cuh"\n'))


def test_only_cubins_are_read() -> None:
    for image in (b"", b"\x7fELF" + bytes(100), b"text"):
        with pytest.raises(ValueError, match="not a cubin"):
            resources_of(image)


def test_two_processes_make_the_same_bytes() -> None:
    """Names that carry the process id once made every cold compilation differ."""
    code = """
from tests.codegen.test_nvrtc import REVERSE
from frtc.codegen.nvrtc import _compile
from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Operand, Site
import hashlib
from frtc.codegen.nvrtc import Job
site = Site("linear", (Operand.packed("bf16", 10, 64), Operand.packed("bf16", 32, 64), None, None, None, None),
            (Operand.packed("bf16", 10, 32),), {"act": "none"})
choice = CATALOG.select(site, REVERSE.target)
job = Job.of(choice.kernel.stages(site, choice.config, REVERSE.target)[0], REVERSE.target)
print(hashlib.sha256(_compile(job).image).hexdigest())
"""
    run = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    made = {subprocess.run(run, cwd=root, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(made) == 1 and made != {""}


def test_internal_names_are_refused() -> None:
    source = SOURCE.replace("namespace frtc {", "namespace frtc {\n__device__ constexpr int kTable[2] = {3, 4};", 1)
    source = source.replace("y[0] = values[i];", "y[0] = values[i] + kTable[i % 2];")
    with pytest.raises(CompileFailed, match="inline constexpr"):
        compile_one(Job(source, "frtc::spill", TARGETS["hopper"]))
