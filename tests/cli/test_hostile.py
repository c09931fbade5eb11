"""Users' mistakes and broken files: each has a code, an exit status and no traceback. Readers have their own tests."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frtc.commands.models
from frtc import cli, plugins
from frtc.codegen import plan_writer
from frtc.console import Result
from frtc.errors import FrtcError
from frtc.models.checkpoint import read_header
from frtc.runtime import driver
from frtc.runtime.plan_file import open_plan
from tests.cli.face import Said, call
from tests.conftest import ROOT, Demo, checkout
from tests.runtime.null_driver import NullApi

Capture = pytest.CaptureFixture[str]
Edit = Callable[[Path], object]
STATS = "assets/synthetic/norm_stats.json"
EXPERT = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"


def json_edit(name: str, change: Callable[[Any], object]) -> Edit:
    def edit(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return edit


def header_edit(change: Callable[[dict[str, Any]], object]) -> Edit:
    """The weights' header changed in place, the data as they are."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def rename(old: str, new: str) -> Edit:
    return header_edit(lambda header: header.update({new: header.pop(old)}))


def transposed(folder: Path) -> None:
    header_edit(lambda header: header[EXPERT]["shape"].reverse())(folder)


def not_a_number(folder: Path) -> None:
    info = read_header(folder / "model.safetensors")[EXPERT]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(info.offset + 6)
        file.write(b"\xc0\x7f")  # bf16 NaN


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1_000_000)


def no_statistics(folder: Path) -> None:
    shutil.rmtree(folder / "assets")


def constant(data: Any) -> None:
    data["norm_stats"]["state"]["q99"] = data["norm_stats"]["state"]["q01"]


def index_without_shard(folder: Path) -> None:
    names = read_header(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
    )


CHECKPOINTS: dict[str, tuple[Edit, int, str]] = {
    "a missing tensor": (rename(EXPERT, "x.y"), 4, "weights."),
    "an extra tensor": (lambda f: rename(EXPERT, EXPERT + ".scale")(f), 4, "weights."),
    "a mis-shaped tensor": (transposed, 4, "weights."),
    "a tensor with NaN": (not_a_number, 4, "checkpoint.nonfinite"),
    "a truncated file": (truncated, 4, "checkpoint.truncated"),
    "no safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"PK\x03\x04 pickled"), 4, "checkpoint.format"),
    "an index naming an absent shard": (index_without_shard, 4, "checkpoint.shard"),
    "a wrong config field": (json_edit("config.json", lambda c: c.update(action_dim=7)), 4, "checkpoint.config"),
    "missing statistics": (no_statistics, 4, "statistics.missing"),
    "constant statistics": (json_edit(STATS, constant), 4, "statistics.constant"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), 2, "tokenizer.missing"),
    "a tokenizer that is none": (lambda f: (f / "tokenizer.json").write_text("{}"), 4, "tokenizer.unreadable"),
    "config.json that is no JSON": (lambda f: (f / "config.json").write_text("{"), 4, "checkpoint.json"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name: str, demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    edit, exit_code, code = CHECKPOINTS[name]
    folder = shutil.copytree(demo.checkpoint, tmp_path / "ck")
    edit(folder)
    said = call(capsys, "compile", folder, "--arch", "thor", "-o", tmp_path / "out.plan")
    assert (said.code, said.error.startswith(code)) == (exit_code, True), said.err
    assert "Traceback" not in said.err and not said.out
    assert [p.name for p in tmp_path.iterdir()] == ["ck"], "something half-written"


OPTIONS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "unknown arch": (("compile", "CK", "--arch", "thorr"), 2, "option.arch"),
    "no arch": (("compile", "CK"), 2, "usage.option"),
    "unknown precision": (("compile", "CK", "--arch", "thor", "--precision", "int8"), 2, "option.precision"),
    "no precision file": (("compile", "CK", "--arch", "thor", "--precision", "no.toml"), 2, "precision.file"),
    "an arch without a name": (("compile", "CK", "--arch", ""), 2, "option.arch"),
    "seconds of no tuning": (("compile", "CK", "--arch", "thor", "--tune-seconds", "5"), 2, "usage.option"),
    "estimated scales of 16 bits": (("estimate", "CK", "--precision", "bf16", "--static-scales"), 2, "option.scales"),
    "fp8 where there is none": (("compile", "CK", "--arch", "orin", "--precision", "fp8"), 2, "option.precision"),
    "scales of a Plan": (
        ("compile", "CK", "--arch", "thor", "--precision", "fp8", "--scales", "PLAN"), 4, "scales.format",
    ),
    "data that no option names": (
        ("compile", "CK", "--arch", "thor", "--precision", "fp8", "--allow-synthetic"), 2, "calibrate.options",
    ),
    "a seed of none": (("calibrate", "CK", "--into", "PLAN", "--scales", "x", "--seed", "3"), 2, "calibrate.options"),
    "scales from nowhere": (("calibrate", "CK", "--seed", "0"), 2, "calibrate.source"),
    "scales over weights": (
        ("calibrate", "CK", "--data", "x.npz", "-o", "CK/model.safetensors"), 2, "output.exists",
    ),
    "a Plan without static scales": (("calibrate", "CK", "--data", "x.npz", "--into", "PLAN"), 2, "calibrate.plan"),
    "no such checkpoint": (("compile", "nowhere", "--arch", "thor"), 4, "checkpoint.not_found"),
    "unknown camera": (("compile", "CK", "--arch", "thor", "--camera", "base=base_1_rgb"), 2, "policy.cameras"),
    "camera without key": (("compile", "CK", "--arch", "thor", "--camera", "base"), 2, "policy.cameras"),
    "too many views": (("compile", "CK", "--arch", "thor", "--views", "4"), 2, "policy.cameras"),
    "no views": (("check", "CK", "--views", "0"), 2, "usage.option"),
    "wrong origin": (("check", "CK", "--origin", "lerobot-0.6"), 2, "policy.origin"),
    "unknown asset": (("check", "CK", "--asset", "aloha"), 2, "policy.asset"),
    "actions of no kind": (("check", "CK", "--actions", "relative"), 2, "policy.actions"),
    "too many dims": (("check", "CK", "--state-dim", "15"), 2, "policy.dims"),
    "strict": (("check", "CK", "--strict"), 2, "policy.assumed"),
    "strict about sizes": (
        ("check", "CK", "--strict", "--views", "3", "--actions", "absolute", "--state-in-prompt", "yes"), 2,
        "policy.assumed",
    ),
    "a level too high": (("compile", "CK", "--arch", "thor", "--debug", "6"), 2, "usage.option"),
    "no folder": (("compile", "CK", "--arch", "thor", "-o", "no/where/x.plan"), 2, "output.folder"),
    "output is a folder": (("compile", "CK", "--arch", "thor", "-o", "CK"), 2, "output.folder"),
    "output is no Plan": (("compile", "no", "--arch", "thor", "-o", "CK/model.safetensors"), 2, "output.exists"),
    "output is a device": (("compile", "no", "--arch", "thor", "-o", "/dev/null"), 2, "output.exists"),
    "unknown command": (("compil", "CK"), 2, "usage.command"),
    "unknown option": (("run", "PLAN", "--cpu"), 2, "usage.option"),
    "unknown device": (("run", "PLAN", "--device", "gpu"), 2, "option.device"),
    "unknown role": (("run", "PLAN", "--device", "cpu", "--image", "left=x.png"), 2, "option.image"),
    "no picture": (("run", "PLAN", "--device", "cpu", "--image", "base=x.png"), 4, "input.file"),
    "image without role": (("run", "PLAN", "--device", "cpu", "--image", "x.png"), 2, "option.image"),
    "too long a prompt": (("run", "PLAN", "--device", "cpu", "--prompt", "q" * 300), 4, "prompt.too_long"),
    "no Plan": (("run", "nowhere.plan", "--device", "cpu"), 4, "plan.missing"),
    "a file that is no Plan": (("inspect", "CK/model.safetensors"), 4, "plan.invalid"),
    "bisect against nothing": (("verify", "PLAN", "--device", "cpu", "--bisect"), 2, "verify.bisect"),
    "a self-test against a checkpoint": (("verify", "PLAN", "--self-test", "CK"), 2, "verify.options"),
    "a self-test and a bisection": (("verify", "PLAN", "--bisect", "--self-test"), 2, "verify.options"),
    "samples of a self-test": (("verify", "PLAN", "--samples", "3"), 2, "verify.options"),
    "samples of a bisection": (("verify", "PLAN", "--bisect", "CK", "--samples", "3"), 2, "verify.options"),
    "a self-test that records nothing": (("verify", "PLAN", "--no-record"), 2, "verify.options"),
    "a Plan without a name": (("run", ""), 2, "usage.option"),
    "a Plan named like an option": (("inspect", "--", "-x"), 4, "plan.missing"),
    "a folder as a Plan": (("run", "CK"), 4, "plan.missing"),
    "a checkpoint without a name": (("compile", "", "--arch", "thor"), 2, "usage.option"),
    "a report without a name": (("run", "PLAN", "--report", ""), 2, "usage.option"),
    "a dump without a name": (("compile", "CK", "--arch", "thor", "--dump", ""), 2, "usage.option"),
    "a dump into a file": (("compile", "CK", "--arch", "thor", "--dump", "PLAN"), 4, "output.write"),
    "an estimate of a Plan's choices": (("estimate", "PLAN", "--prompt-tokens", "5"), 2, "estimate.option"),
    "two frames of a camera": (("run", "PLAN", "--image", "base=a", "--image", "base=b"), 2, "option.image"),
    "IR that is none": (("explain", "CK/nothing.ir", "--arch", "thor"), 4, "input.file"),
}  # fmt: skip


def test_what_excludes_each_other_says_which_to_leave_out(demo: Demo, capsys: Capture) -> None:
    for words, hint in (
        (("--self-test", demo.checkpoint), "leave out --self-test, or CHECKPOINT"),
        (("--bisect", "--self-test", demo.checkpoint), "leave out --self-test, or --bisect"),
        (("--samples", "2", "--no-record"), "leave out --no-record, --samples, or compare with a CHECKPOINT"),
        ((demo.checkpoint, "--bisect", "--no-record"), "leave out --no-record\n"),
    ):
        assert f"hint  {hint}" in call(capsys, "verify", demo.plan, *words).err
    assert "--prompt-tokens says nothing" in call(capsys, "estimate", demo.plan, "--prompt-tokens", "5").err


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str, demo: Demo, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words, exit_code, code = OPTIONS[name]
    monkeypatch.chdir(tmp_path)
    real = {"CK": str(demo.checkpoint), "PLAN": str(demo.plan)}
    filled = [real.get(w, w).replace("CK/", f"{demo.checkpoint}/") for w in words]
    said = call(capsys, *filled)
    assert (said.code, said.error) == (exit_code, code), said.err
    assert not said.out and "Traceback" not in said.err and not list(tmp_path.iterdir())
    as_json = call(capsys, filled[0], "--json", *filled[1:])
    assert as_json.code == exit_code and as_json.json()["error"]["code"] == code and not as_json.err.count("error[")


def damaged(demo: Demo, path: Path, edit: Callable[[bytearray], object]) -> Path:
    data = bytearray(demo.plan.read_bytes())
    edit(data)
    path.write_bytes(data)
    return path


def flip(at: int) -> Callable[[bytearray], object]:
    def edit(data: bytearray) -> None:
        data[at] ^= 1

    return edit


def newer(data: bytearray) -> None:
    at = data.find(b"frtc.plan/1")
    data[at : at + 11] = b"frtc.plan/9"


PLANS: dict[str, tuple[Callable[[Demo], Callable[[bytearray], object]], str]] = {
    "truncated": (lambda demo: lambda data: data.__delitem__(slice(len(data) - 5000, None)), "plan.truncated"),
    "cut in its header": (lambda demo: lambda data: data.__delitem__(slice(900, None)), "plan.truncated"),
    "a flipped byte in the manifest": (lambda demo: flip(5000), "plan.damaged"),
    "a flipped byte in the weights": (lambda demo: flip(start_of(demo) + 12345), "plan.damaged"),
    "a flipped byte in a cubin": (lambda demo: flip(start_of(demo) + first_cubin(demo) + 200), "plan.damaged"),
    "too new": (lambda demo: newer, "plan.version"),
    "empty": (lambda demo: lambda data: data.clear(), "plan.truncated"),
}


def start_of(demo: Demo) -> int:
    with open(demo.plan, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def first_cubin(demo: Demo) -> int:
    return next(t.start for t in open_plan(demo.plan).tensors if t.name == "cubin.000")


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str, demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    edit, code = PLANS[name]
    path = damaged(demo, tmp_path / "bad.plan", edit(demo))
    said = call(capsys, "run", path, "--device", "cpu")
    assert (said.code, said.error) == (4, code), said.err
    assert "Traceback" not in said.err and not said.out


def test_plan_for_another_gpu(demo: Demo, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_bindings", lambda: NullApi({}, sm=89))
    said = call(capsys, "run", demo.plan)
    assert (said.code, said.error) == (5, "plan.target")
    assert "thor (sm_110a)" in said.err and "--arch rtx4090" in said.err


FRAME = np.zeros((20, 30, 3), np.uint8)
FRAMES = {
    "wrong type": (FRAME.astype(np.int64), "input.image_dtype"),
    "floats where bytes are declared": (FRAME.astype(np.float32), "input.image_dtype"),
    "wrong layout": (FRAME.transpose(2, 0, 1), "input.image_shape"),
    "no picture": (FRAME[0, 0], "input.image_shape"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_image(name: str, demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    array, code = FRAMES[name]
    np.save(tmp_path / "a.npy", array)
    said = call(capsys, "run", demo.plan, "--device", "cpu", "--image", f"base={tmp_path / 'a.npy'}")
    assert (said.code, said.error) == (4, code), said.err


def compile_to(capsys: Capture, demo: Demo, out: Path) -> Said:
    return call(capsys, "compile", demo.checkpoint, "--arch", "thor", "-o", out)


def test_disk_full_while_writing(demo: Demo, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in the middle of the weights: the old Plan stays, nothing else does."""
    out, writes = tmp_path / "x.plan", 0

    def pwrite(file: int, data: Any, at: int) -> int:
        nonlocal writes
        writes += 1
        if writes > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, at)

    real = os.pwrite
    shutil.copy(demo.plan, out)
    monkeypatch.setattr(plan_writer.os, "pwrite", pwrite)
    said = compile_to(capsys, demo, out)
    assert (said.code, said.error) == (5, "plan.write") and "No space left" in said.err
    assert out.read_bytes() == demo.plan.read_bytes() and [p.name for p in tmp_path.iterdir()] == ["x.plan"]


def test_file_size_limit_in_a_child(demo: Demo, tmp_path: Path) -> None:
    """RLIMIT_FSIZE below the size of the Plan, in a process of its own."""
    code = f"""
import resource, sys
from frtc.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
sys.exit(main(["compile", {str(demo.checkpoint)!r}, "--arch", "thor", "-o", {str(tmp_path / "x.plan")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], env=checkout(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 5 and "error[plan.write]" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_while_writing(demo: Demo, tmp_path: Path, number: signal.Signals) -> None:
    """In the middle of the weights, in a process of its own: nothing is left."""
    code = f"""
import os, sys
from frtc.cli import main
real, count = os.pwrite, 0
def pwrite(*given):
    global count
    count += 1
    if count == 20:
        assert len(os.listdir({str(tmp_path)!r})) == 1
        os.kill(os.getpid(), {number.value})
    return real(*given)
os.pwrite = pwrite
sys.exit(main(["compile", {str(demo.checkpoint)!r}, "--arch", "thor", "-o", {str(tmp_path / "x.plan")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], env=checkout(), capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (128 + number, "") and not list(tmp_path.iterdir())


def test_a_bug_writes_a_report(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Any) -> Any:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(frtc.commands.models, "run", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = call(capsys, "models")
    (report,) = tmp_path.iterdir()
    assert said.code == 1 and said.error == "internal" and str(report) in said.err and "Traceback" not in said.err
    assert "the sky fell" in report.read_text() and "command: frtc models" in report.read_text()


def test_interrupt(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(frtc.commands.models, "run", interrupted)
    assert call(capsys, "models").code == 130


def test_handlers_are_restored_and_nohup_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is not the main one cannot set any, and runs commands without."""

    def run(args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return Result("still here")

    monkeypatch.setattr(frtc.commands.models, "run", run)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    codes: list[int] = []
    try:
        assert cli.main(["models"]) == 0 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        thread = threading.Thread(target=lambda: codes.append(cli.main(["models"])))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert codes == [0] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_broken_plugin_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_plugged", lambda name: (("bad", "no_such_package"),) if name == "targets" else ())
    said = call(capsys, "models")
    assert (said.code, said.error) == (5, "plugin.load") and "no_such_package" in said.err


def test_old_python_cannot_compile(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 10, 9, "final", 0))
    said = call(capsys, "compile", "x", "--arch", "thor")
    assert (said.code, said.error) == (5, "env.python")


PIPES = {
    "run --image": (("run", "PLAN", "--device", "cpu", "--image", "base=PIPE"), "input.file"),
    "run --state": (("run", "PLAN", "--device", "cpu", "--state", "PIPE"), "input.file"),
    "run --baseline": (("run", "PLAN", "--device", "cpu", "--baseline", "PIPE"), "run.baseline_file"),
    "check --data": (("check", "CK", "--data", "PIPE"), "input.file"),
    "explain IR": (("explain", "PIPE.ir", "--arch", "thor"), "input.file"),
    "explain --scales": (("explain", "CK", "--arch", "hopper", "--scales", "PIPE"), "scales.read"),
}


@pytest.mark.parametrize("name", PIPES)
def test_nobody_waits_for_who_writes_into_a_pipe(name: str, demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    words, code = PIPES[name]
    for suffix in ("", ".ir"):
        os.mkfifo(tmp_path / f"pipe{suffix}")
    given = {"PLAN": str(demo.plan), "CK": str(demo.checkpoint), "PIPE": str(tmp_path / "pipe")}
    said = call(capsys, *(re.sub("PLAN|CK|PIPE", lambda found: given[found[0]], word) for word in words))
    assert (said.code, said.error) == (4, code) and "no regular file" in said.err, said.err


def test_further_lines_of_an_error_are_no_rows() -> None:
    """Names in files may hold line ends, and a hint of a file's would pass for ours."""
    said = str(FrtcError("a.b", "no\nhint  x", [("c\nhint", "d\n  hint  e\n")], "the hint"))
    assert said.split("\n") == ["error[a.b]: no", "    hint  x", "  c\\nhint  d", "             hint  e", "           ",
                                "  hint     the hint"]  # fmt: skip
