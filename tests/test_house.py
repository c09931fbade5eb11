"""The house: which room may import which, what the robot side never loads, and how quickly frtc imports."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frtc.kernels.targets import load_targets

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "runtime", "models", "lowering", "passes", "codegen", "frtc")

# docs/design.md, section 1. frtc.errors and frtc.plugins are leaves; every room may use them.
MAY_IMPORT = {
    "kernels": set(),
    "runtime": {"kernels"},
    "models": {"runtime"},
    "lowering": {"kernels"},
    "passes": {"lowering", "kernels"},
    "codegen": {"passes", "lowering", "kernels", "runtime"},
    "frtc": set(ROOMS) - {"frtc"},
}
LEAVES = ("frtc.errors", "frtc.plugins")
ROBOT_SIDE = ("kernels", "runtime")
GENERAL = ("lowering", "passes", "codegen", "kernels", "runtime")  # they serve every model and know none
MODEL_WORDS = re.compile(
    r"\b(pi_?0|pi_?05|pi0_?fast|smol_?vla|smolvlm\d?|gr00t|groot|pali_?gemma|gemma\d?|siglip\d?|llama|qwen\d?"
    r"|aloha|libero|droid)\b",
    re.IGNORECASE,
)
NEVER_ON_THE_ROBOT = {"torch", "jinja2", "onnx", "safetensors", "transformers", "PIL"}


def modules(room: str) -> list[Path]:
    files = (ROOT / room).rglob("*.py")
    linked = [ROOT / "frtc" / other for other in ROOMS]
    return [f for f in files if room != "frtc" or not any(f.is_relative_to(link) for link in linked)]


def imports(path: Path) -> set[str]:
    """Dotted names that the file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "frtc" else {module}
    return found


def room_of(name: str) -> str | None:
    """The room that an imported name lies in; None for foreign names and the leaves."""
    parts = name.split(".")
    if parts[0] != "frtc" or name.startswith(LEAVES):
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "frtc"


def forbidden(room: str, names: set[str]) -> list[str]:
    rooms = {name: room_of(name) for name in names}
    return sorted(n for n, r in rooms.items() if r is not None and r != room and r not in MAY_IMPORT[room])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_the_floors_below(room: str) -> None:
    assert modules(room), f"{room} is empty"
    bad = {str(f.relative_to(ROOT)): wrong for f in modules(room) if (wrong := forbidden(room, imports(f)))}
    assert not bad


def test_the_edge_check_sees_a_forbidden_edge() -> None:
    assert forbidden("kernels", {"frtc.runtime.plan"}) == ["frtc.runtime.plan"]
    assert forbidden("runtime", {"frtc.cli"}) == ["frtc.cli"]
    assert not forbidden("runtime", {"frtc.errors", "frtc.kernels.dtypes", "numpy"})


def test_the_leaves_import_nothing_of_ours() -> None:
    assert not [n for n in imports(ROOT / "frtc" / "errors.py") if n.startswith("frtc")]
    assert {n for n in imports(ROOT / "frtc" / "plugins.py") if n.startswith("frtc")} == {"frtc.errors"}


@pytest.mark.parametrize("room", ROBOT_SIDE)
def test_the_robot_side_never_imports_the_compile_side(room: str) -> None:
    bad = {str(f): hit for f in modules(room) if (hit := {n.split(".")[0] for n in imports(f)} & NEVER_ON_THE_ROBOT)}
    assert not bad


@pytest.mark.parametrize("room", GENERAL)
def test_below_the_models_no_file_names_one(room: str) -> None:
    """Code, comments and device templates: what one model needs is a rule or an op for all."""
    files = [f for f in (ROOT / room).rglob("*") if f.suffix in (".py", ".cu", ".cuh", ".j2")]
    named = {str(f.relative_to(ROOT)): hit.group() for f in files if (hit := MODEL_WORDS.search(f.read_text()))}
    assert files and not named


def test_the_search_for_model_names_finds_them() -> None:
    assert all(MODEL_WORDS.search(text) for text in ("models/pi05.py", "a Gemma block", "SmolVLA's mask", "# Pi0"))
    assert not any(MODEL_WORDS.search(text) for text in ("pi = 3.14", "droids", "openpi_mean_std"))


def test_models_name_no_target() -> None:
    targets = re.compile(rf"\b({'|'.join(load_targets())}|sm_?\d+a?)\b")
    named = {f.name: hit.group() for f in modules("models") if (hit := targets.search(f.read_text()))}
    assert not named


def test_every_room_is_linked_into_the_package() -> None:
    for room in set(ROOMS) - {"frtc"}:
        link = ROOT / "frtc" / room
        assert link.is_symlink() and link.readlink() == Path("..") / room


def test_our_kernels_folder_shadows_no_kernels_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    found = importlib.util.find_spec("kernels")
    assert found is None or found.origin is None or not Path(found.origin).is_relative_to(ROOT)


def fresh(code: str) -> str:
    """Standard output of `code` in a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_passes_and_codegen_run_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import frtc.passes.pipeline, frtc.codegen.build
from frtc.lowering.text import parse
print(parse("graph g(x: f32[2]) {\\n  %0 = neg(%x) : f32[2]\\n  return %0\\n}").count("neg"))
"""
    assert fresh(code).strip() == "1"


def test_import_frtc_is_quick() -> None:
    best = 1.0
    for _ in range(3):
        started = time.perf_counter()
        fresh("pass")
        bare = time.perf_counter() - started
        started = time.perf_counter()
        fresh("import frtc; frtc.__version__")
        best = min(best, time.perf_counter() - started - bare)
    assert best < 0.060
    assert fresh("import sys, frtc; print('numpy' in sys.modules)").strip() == "False"
