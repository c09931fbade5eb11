"""The container: what is written is read back, by the safetensors library too; a failed write leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from frtc.codegen.plan_writer import PlanWriter
from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.plan import Program, Ref, WeightEntry
from frtc.runtime.plan_file import TYPES, open_plan
from tests.runtime import small_plan


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path)
    return path


def header_of(path: Path) -> dict[str, dict[str, object]]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length])  # type: ignore[no-any-return]


def test_round_trip(path: Path) -> None:
    plan = open_plan(path)
    assert plan.program == small_plan.program()
    assert plan.evidence == {"source": {"checkpoint": "none"}} and plan.notes == () and plan.verified
    for entry in plan.program.weights:
        stored = np.frombuffer(plan.weights, np.float32, entry.nbytes // 4, entry.offset).reshape(entry.stored_shape)
        array = small_plan.weights()[entry.name]
        assert np.array_equal(stored[..., : array.shape[-1]], array)
        assert not stored[..., array.shape[-1] :].any()
    assert bytes(plan.files()["tokenizer.json"]) == b"{}" * 700


def test_safetensors_library_reads_it(path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, "np") as file:
        names = {name for name in file.keys() if not name.startswith("__pad")}  # noqa: SIM118
        assert names == {"w:w0", "w:b", "w:table", "w:w1", "cubin.000", "tokenizer.json"}
        assert set(file.metadata()) == {"program", "evidence"}
        table = file.get_tensor("w:table")
    assert table.shape == (3, 12) and np.array_equal(table[:, :10], small_plan.weights()["table"])


def test_every_element_type_is_one_of_safetensors(tmp_path: Path) -> None:
    """All types, ranks 0 to 3, an empty one; the library knows each."""
    safetensors = pytest.importorskip("safetensors")
    entries, arrays, at = [], {}, 0
    shapes: list[tuple[int, ...]] = [(), (5,), (2, 5), (2, 3, 5), (0, 4)]
    for i, dtype in enumerate(DTYPES):
        entry = WeightEntry(dtype, at, dtype, shapes[i % len(shapes)])
        entries.append(entry)
        arrays[dtype] = np.ones(entry.shape or (1,), DTYPES[dtype].numpy)
        at += -(-entry.nbytes // 256) * 256
    program = _behind(small_plan.program(), entries, at)
    target = tmp_path / "types.plan"
    with PlanWriter(target, program, small_plan.cubins()) as writer:
        for name, array in {**arrays, **small_plan.weights()}.items():
            writer.write_weight(name, array, 0)
    plan = open_plan(target)
    assert plan.program == program
    assert {v["dtype"] for k, v in header_of(target).items() if k.startswith("w:")} == set(TYPES.values())
    with safetensors.safe_open(target, "np") as file:
        assert file.get_slice("w:bf16").get_shape() == [2, 3, 8]


def _behind(program: Program, entries: list[WeightEntry], nbytes: int) -> Program:
    """The program with its weights moved behind `entries`."""

    def ref(r: Ref | None) -> Ref | None:
        return replace(r, offset=r.offset + nbytes) if r is not None and r.space == "weights" else r

    weights = (*entries, *(replace(w, offset=w.offset + nbytes) for w in program.weights))
    calls = [tuple(replace(c, operands=tuple(map(ref, c.operands))) for c in s.calls) for s in program.stages]
    stages = tuple(replace(s, calls=c) for s, c in zip(program.stages, calls, strict=True))
    return replace(program, weights=weights, stages=stages, weights_nbytes=program.weights_nbytes + nbytes)


def test_layout(path: Path) -> None:
    """Tensors start at multiples of 256 bytes, the weights block first and as in device memory, without gaps."""
    header = header_of(path)
    del header["__metadata__"]
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())  # type: ignore[arg-type]
    assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans))
    base = 8 + struct.unpack_from("<Q", path.read_bytes())[0]
    assert base % 4096 == 0 and path.stat().st_size == base + spans[-1][1]
    for weight in small_plan.program().weights:
        assert header[f"w:{weight.name}"]["data_offsets"] == [weight.offset, weight.offset + weight.nbytes]
    starts = [entry["data_offsets"][0] for name, entry in header.items() if not name.startswith("__")]  # type: ignore[index]
    assert all(start % 256 == 0 for start in starts)


def test_same_bytes_twice_and_evidence_is_apart(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.plan"
    plan_id = small_plan.write(again)
    assert again.read_bytes() == path.read_bytes()
    other = small_plan.write(tmp_path / "other.plan", evidence={"verified": {"samples": 8}})
    assert other == plan_id and (tmp_path / "other.plan").read_bytes() != path.read_bytes()


def test_large_evidence(path: Path, tmp_path: Path) -> None:
    """Evidence that outgrows its room moves the data, and changes nothing else."""
    evidence = {"vectors": "7" * 300_000}
    plan_id = small_plan.write(tmp_path / "large.plan", evidence=evidence)
    plan = open_plan(tmp_path / "large.plan")
    assert plan.plan_id == plan_id == open_plan(path).plan_id and plan.evidence == evidence


def test_evidence_of_another_program_is_ignored(path: Path, tmp_path: Path) -> None:
    plan_id = open_plan(path).plan_id
    raw = path.read_bytes()
    at = raw.index(plan_id.encode(), raw.index(b'"evidence"'))
    forged = tmp_path / "forged.plan"
    forged.write_bytes(raw[:at] + b"0" + raw[at + 1 :])
    plan = open_plan(forged)
    assert plan.evidence == {} and "another program" in plan.notes[0]


def test_sealed_file_opens_before_it_has_its_name(tmp_path: Path) -> None:
    program = small_plan.program()
    path = tmp_path / "sealed.plan"
    with PlanWriter(path, program, small_plan.cubins()) as writer:
        for name, array in small_plan.weights().items():
            writer.write_weight(name, array, 0)
        plan_id = writer.seal()
        assert open_plan(writer.tmp).plan_id == plan_id and not path.exists()
    assert open_plan(path).plan_id == plan_id


# ---- failed writes ---------------------------------------------------------------------------------------------------


def test_missing_rows(tmp_path: Path) -> None:
    writer = PlanWriter(tmp_path / "a.plan", small_plan.program(), small_plan.cubins())
    with pytest.raises(AssertionError, match="rows 5 to 6 are missing"), writer:
        for name, array in small_plan.weights().items():
            writer.write_weight(name, array[:5], 0)
            writer.write_weight(name, array[6:], min(6, len(array)))
    assert os.listdir(tmp_path) == []


def test_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _write_part(tmp_path, KeyboardInterrupt())
    assert os.listdir(tmp_path) == []


def _write_part(folder: Path, fault: BaseException) -> None:
    with PlanWriter(folder / "a.plan", small_plan.program(), small_plan.cubins()) as writer:
        writer.write_weight("b", small_plan.weights()["b"], 0)
        raise fault


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "replace"])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """ENOSPC from any step, in an old Plan's place: an error with its code, the old file as it was."""
    path = tmp_path / "a.plan"
    small_plan.write(path)
    before = path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(EnvironmentFault) as caught:
        small_plan.write(path)
    assert caught.value.code == "plan.write" and "No space left" in caught.value.what
    assert os.listdir(tmp_path) == ["a.plan"] and path.read_bytes() == before


CHILD = """
import resource, sys
from pathlib import Path
from tests.runtime import small_plan
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    small_plan.write(Path(sys.argv[1]))
except Exception as fault:
    print(fault.code, fault.exit_code)
"""


def test_file_size_limit(tmp_path: Path) -> None:
    small_plan.cubins()  # compiled and cached before the limit
    argv = [sys.executable, "-c", CHILD, str(tmp_path / "a.plan")]
    root = Path(__file__).parents[2]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.stdout.split() == ["plan.write", "5"], done.stderr
    assert os.listdir(tmp_path) == []


OTHERS: dict[str, Callable[[Path], object]] = {
    "an empty file": Path.touch,
    "text": lambda path: path.write_text("a week's work"),
    "safetensors": lambda path: path.write_bytes(struct.pack("<Q", 22) + b'{"__metadata__":{"a":1}'),
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/null"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


def identity(path: Path) -> tuple[int, ...]:
    """Which file it is and what is in it; when it was read last does not count."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("name", OTHERS)
def test_what_came_meanwhile_is_not_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.plan"
    writer = PlanWriter(path, small_plan.program(), small_plan.cubins())
    with pytest.raises(UsageError) as caught, writer:
        for weight, array in small_plan.weights().items():
            writer.write_weight(weight, array, 0)
        OTHERS[name](path)
        before = identity(path)
    assert caught.value.code == "output.exists" and str(path) in caught.value.what
    assert os.listdir(tmp_path) == ["a.plan"] and identity(path) == before


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    """Each has a file of its own, which is none of the user's; the last to finish stands, with a usual file's mode."""
    path, users, program = tmp_path / "a.plan", tmp_path / "a.plan.tmp", small_plan.program()
    users.write_text("the user's own")
    blobs = small_plan.cubins()
    with PlanWriter(path, program, blobs) as first, PlanWriter(path, program, blobs) as second:
        for name, array in small_plan.weights().items():
            first.write_weight(name, array, 0)
            second.write_weight(name, np.zeros_like(array), 0)
        first.finish({})
        assert open_plan(path).weights.tobytes().strip(b"\0")
        second.finish({})
    assert not open_plan(path).weights.tobytes().strip(b"\0")
    assert users.read_text() == "the user's own" and sorted(os.listdir(tmp_path)) == ["a.plan", "a.plan.tmp"]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(users.stat().st_mode)


def test_interrupted_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file is reserved there is no `with` block yet."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_plan.write(tmp_path / "a.plan")
    assert os.listdir(tmp_path) == []


# ---- damaged files ---------------------------------------------------------------------------------------------------


def code_of(raw: bytes, folder: Path) -> str:
    path = folder / "damaged.plan"
    path.write_bytes(raw)
    with pytest.raises(FrtcError) as caught:
        open_plan(path)
    return f"{caught.value.code} {caught.value.what} {caught.value.rows}"


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 5000, -4096, -1])
def test_truncated(path: Path, tmp_path: Path, keep: int) -> None:
    assert code_of(path.read_bytes()[:keep], tmp_path).startswith("plan.truncated")


def test_longer(path: Path, tmp_path: Path) -> None:
    assert code_of(path.read_bytes() + b"more", tmp_path).startswith("plan.damaged")


@pytest.mark.parametrize("tensor", ["w:w0", "w:b", "w:table", "w:w1", "cubin.000", "tokenizer.json"])
def test_flipped_byte_names_the_tensor(path: Path, tmp_path: Path, tensor: str) -> None:
    header = header_of(path)
    raw = bytearray(path.read_bytes())
    base = 8 + struct.unpack_from("<Q", raw)[0]
    raw[base + header[tensor]["data_offsets"][1] - 1] ^= 1  # type: ignore[index]
    found = code_of(bytes(raw), tmp_path)
    assert found.startswith("plan.damaged") and tensor in found


def test_flipped_bytes_in_the_header(path: Path, tmp_path: Path) -> None:
    """Any byte of the program entry and of the tensors' table; the evidence is apart, and so are spaces."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    evidence = raw.index(b'"evidence"')
    end = raw.index(b"}}", evidence)
    generator = np.random.default_rng(3)
    places = [p for p in generator.integers(8, len(raw[: 8 + length].rstrip()), 200) if not evidence < p < end + 8]
    assert len(places) > 150
    for at in places:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << int(generator.integers(8))
        assert code_of(bytes(flipped), tmp_path).startswith(("plan.damaged", "plan.invalid", "plan.version")), at


def test_not_a_plan(path: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    assert code_of(b"PK\3\4" + bytes(1000), tmp_path).startswith("plan.invalid this file is not a Plan")
    other = safetensors.save({"a": np.zeros(3, np.float32)})
    assert code_of(other, tmp_path).startswith("plan.invalid this file is not a Plan")
    with pytest.raises(FrtcError) as caught:
        open_plan(tmp_path / "absent.plan")
    assert caught.value.code == "plan.missing"
