"""README and docs are run, and compared with the code."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from frtc.cli import Parser
from frtc.commands.compile import options as compile_options
from frtc.debug_options import SETTINGS
from frtc.kernels.targets import load_targets
from frtc.passes import pipeline
from tests.conftest import ROOT, Demo, checkout

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = (
    "frtc", "frtc/commands", "frtc/tuning", "runtime", "models", "lowering", "passes", "codegen", "kernels",
    "kernels/reference",
)  # fmt: skip
UNMADE = {"kernels/targets/l40s.py", "tests/plans"}  # an example; the first release puts a Plan there
ERRORS = {"FrtcError", "UsageError", "CheckFailed", "EnvironmentFault", "DriverFault"}
# codes put together at run time: (the expression, what it can be)
COMPOSED = {
    "f'{kind}.unknown'": ("input.unknown", "output.unknown", "stage.unknown"),
    "f'plan.{code}'": ("plan.truncated", "plan.damaged"),
    "f'input.{missing[0]}_missing'": ("input.state_missing", "input.prompt_missing"),
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def workplace(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as after `make demo`, with `frtc` on the path."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "out").mkdir()
    (folder / "out" / "demo").symlink_to(demo.folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    command = folder / "bin" / "frtc"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m frtc "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=lambda p: p.name)
def test_every_shell_block_runs(page: Path, workplace: Path) -> None:
    env = checkout()
    env["PATH"] = f"{workplace / 'bin'}{os.pathsep}{env['PATH']}"
    script = "\n".join(["set -euo pipefail", *blocks(page, "sh")])
    done = subprocess.run(["bash", "-c", script], cwd=workplace, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_gpu_lines_are_not_fenced_as_sh() -> None:
    for page in PAGES:
        for line in "".join(blocks(page, "sh")).splitlines():
            assert not re.match(r"\s*(make|git|pip) ", line), f"{page.name}: {line}"


def test_the_python_of_the_readme(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(workplace)
    names = {"image": np.zeros((48, 64, 3), np.uint8), "state": np.zeros(14, np.float32)}
    exec(compile(block, "README.md", "exec"), names)
    assert names["answer"].actions.shape == (10, 14) and names["report"].target.name == "thor"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_target_table_is_what_the_targets_say() -> None:
    row = r"^\| `(\w+)` \| .* \| (baseline.*) \| (.*) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [(t.name, ", ".join(t.families()), t.evidence) for t in load_targets().values()]


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            yield path, ast.parse(path.read_text())


def codes() -> set[str]:
    """Every error code that the source can raise."""
    found = {"internal"}
    for path, tree in sources():
        for node in ast.walk(tree):
            value: ast.expr | None = None
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                value = node.args[0] if name in ERRORS or name == "__init__" else None
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).split(",")[0].strip("( ") == "code":
                value = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and "." in value.value:
                found.add(value.value)
            elif isinstance(value, ast.JoinedStr):
                assert ast.unparse(value) in COMPOSED, f"{path.name}: a code of unknown values: {ast.unparse(value)}"
                found.update(COMPOSED[ast.unparse(value)])
    return found


def test_every_error_code_has_its_row() -> None:
    row = r'^\| <a id="([\w.]+)"></a>`\1` \| \d \| .+ \| .+ \|$'
    documented = re.findall(row, (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == codes()


def test_debugging_flags_and_variables_are_one_table() -> None:
    text = (ROOT / "docs/debugging.md").read_text()
    rows = re.findall(r"^\| `(--\w+)` \| `(FRTC_\w+)` \| (\S+) \| (.*) \|$", text, re.MULTILINE)
    assert rows == [tuple(setting) for setting in SETTINGS]
    parser = Parser(prog="frtc compile")
    compile_options(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag for flag, *_ in rows} <= flags
    read = set(re.findall(r'"(FRTC_\w+)"', Path(pipeline.__file__).read_text()))
    assert read == {variable for _, variable, *_ in rows}


def test_variables_are_all_documented() -> None:
    """Every FRTC_* name that the source reads from the environment."""
    read = {name for path, _ in sources() for name in re.findall(r'environ[^\n]*"(FRTC_\w+)"', path.read_text())}
    text = "".join(page.read_text() for page in PAGES)
    assert read and all(name in text for name in read)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    """A path in backticks that begins with one of our folders is there, up to what stands for a name."""
    folders = "frtc|runtime|models|lowering|passes|codegen|kernels|tests|tools|docs|examples|bench"
    for name in re.findall(rf"`((?:{folders})/[\w./*<>-]+)`", page.read_text()):
        pattern = re.sub(r"<[^>]+>", "*", name)
        known = list(ROOT.glob(pattern)) or name in UNMADE
        assert known, f"{page.name} names {name}"
