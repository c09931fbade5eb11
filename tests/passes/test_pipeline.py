"""The runner: what it counts, checks, writes and prints, and what a failing pass leaves behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from frtc.errors import UsageError
from frtc.lowering.ir import Module, Type, make
from frtc.lowering.ops import add, mul
from frtc.lowering.pattern import Var
from frtc.lowering.text import parse_module
from frtc.lowering.verify import Invalid
from frtc.passes import pipeline
from frtc.passes.__main__ import main
from frtc.passes.canonicalize import canonicalize
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.rewrite import Rules, rewrite
from tests.passes.expect import as_module

x, y = Var("x"), Var("y")
TEXT = """
graph g(a: f32[4], b: f32[4]) {
  %0 = const(value=1.0) : f32[]
  %1 = mul(%0, %a) : f32[4]
  %2 = mul(%1, %b) : f32[4]
  return %2
}
"""


def sums(module: Module) -> Module:
    """A pass with a wrong rule: products become sums."""
    return module.map(lambda g: rewrite(g, Rules("sums", [(mul(x, y), lambda x, y: add(x, y))])))


def lies(module: Module) -> Module:
    """A pass that builds an illegal node: exp does not change shapes."""
    return module.map(lambda g: g.replace({n: make("exp", (n,), {}, Type("f32", (5,))) for _, n in g.outputs}))


def breaks(module: Module) -> Module:
    raise ZeroDivisionError("planted")


def nothing(module: Module) -> Module:
    return module


def test_counts_and_times() -> None:
    module, report = run_passes(as_module(TEXT), [canonicalize, nothing], Options())
    assert [name for name, _ in report.passes] == ["canonicalize", "nothing"]
    assert all(seconds >= 0 for _, seconds in report.passes)
    assert dict(report.fired) == {"algebra": 2}  # the literal to the right, then away
    assert [n.op for n in module.graphs[0].nodes] == ["input", "input", "mul"]


def test_a_wrong_rule_is_caught_by_running_both_sides() -> None:
    run_passes(as_module(TEXT), [sums], Options(check=1))  # legal IR: verifying alone does not see it
    with pytest.raises(Invalid, match=r"pass sums failed: pass sums changes out by .* \(wide, allowed 1e-05\)"):
        run_passes(as_module(TEXT), [sums], Options(check=2))


def test_illegal_ir_is_caught_by_default() -> None:
    with pytest.raises(Invalid, match=r"pass lies failed: graph g: exp .* its rule gives f32\[4\]"):
        run_passes(as_module(TEXT), [lies], Options())
    run_passes(as_module(TEXT), [lies], Options(check=0))


def test_a_pass_that_fails_leaves_what_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """The file reads back, and `python -m frtc.passes FILE` runs the pass that its first line names."""
    with pytest.raises(Invalid, match="pass breaks failed: planted; reproducer: ") as caught:
        run_passes(as_module(TEXT), [canonicalize, breaks], Options())
    file = Path(str(caught.value).rpartition("reproducer: ")[2])
    try:
        text = file.read_text()
        assert text.startswith("# pass breaks\nmodule test\n")
        assert parse_module(text) == canonicalize(as_module(TEXT))
        with pytest.raises(UsageError, match="names no pass"):
            main([str(file)])
        file.write_text(text.replace("# pass breaks", "# pass canonicalize"))
        main([str(file)])
        assert "mul(%a, %b)" in capsys.readouterr().out
    finally:
        file.unlink()


def test_dumps_are_numbered(tmp_path: Path) -> None:
    run_passes(as_module(TEXT), [canonicalize, nothing], Options(dump=tmp_path / "ir"))
    files = sorted((tmp_path / "ir").iterdir())
    assert [f.name for f in files] == ["00_import.ir", "01_canonicalize.ir", "02_nothing.ir"]
    assert parse_module(files[1].read_text()) == parse_module(files[2].read_text()) == canonicalize(as_module(TEXT))


def test_stops_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = run_passes(as_module(TEXT), [canonicalize, breaks], Options(stop="canonicalize"))
    assert [name for name, _ in report.passes] == ["canonicalize"]
    assert parse_module(capsys.readouterr().out) == canonicalize(as_module(TEXT))
    with pytest.raises(UsageError, match="FRTC_STOP=canon is no pass"):
        run_passes(as_module(TEXT), [canonicalize], Options(stop="canon"))


def test_debug_levels(capsys: pytest.CaptureFixture[str]) -> None:
    for level, words in enumerate([[], ["pass canonicalize"], ["rule algebra"], [], ["mul(%a, %b)"]]):
        run_passes(as_module(TEXT), [canonicalize], Options(debug=level))
        output = capsys.readouterr()
        assert output.out == ""
        assert all(word in output.err for word in words) and bool(output.err) == (level > 0)


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in the docstring names what the code reads, and each variable arrives."""
    source = Path(pipeline.__file__).read_text()
    read = set(re.findall(r'"(FRTC_[A-Z]+)"', source))
    assert read == set(re.findall(r"^(FRTC_[A-Z]+)=", str(pipeline.__doc__), re.MULTILINE))
    for name, value in {"CHECK": "2", "DUMP": "some/dir", "STOP": "hoist", "DEBUG": "3"}.items():
        monkeypatch.setenv(f"FRTC_{name}", value)
    assert Options.from_environment() == Options(2, Path("some/dir"), "hoist", 3)
    for name in read:
        monkeypatch.delenv(name)
    assert Options.from_environment() == Options()
    monkeypatch.setenv("FRTC_CHECK", "3")
    with pytest.raises(UsageError, match="FRTC_CHECK=3 is no level from 0 to 2"):
        Options.from_environment()


def test_passes_run_without_torch() -> None:
    file = Path(__file__).parent.parent / "lowering" / "data" / "gemma_bf16.ir"
    script = f"""
import sys
sys.modules["torch"] = None
from frtc.passes.standard import FRONT
from tests.passes.expect import as_module
from frtc.passes.canonicalize import canonicalize
assert canonicalize(as_module(open({str(file)!r}).read())).graphs[0].count("rms_norm") == 5 and FRONT
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent.parent)
