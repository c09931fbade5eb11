"""The compile driver: what it refuses at once, and that a trace does not depend on what the process traced before."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from frtc.compiler import CompileOptions, Opened, compile, import_module, resolved, target_named
from frtc.errors import FrtcError, UsageError
from frtc.families import family_notes
from frtc.lowering.ir import Type, fresh_nodes, input_, weight
from frtc.lowering.ops import linear
from frtc.models import load_models
from frtc.models.checkpoint import open_checkpoint
from frtc.models.stages import Run, Schedule, Stage
from frtc.precision import read_precision
from frtc.trace import trace


def test_locations_are_this_models_own() -> None:
    """Nodes are interned and keep their first location; an equal node of an earlier trace must not lend its own."""
    x, w = input_("x", Type("f32", (3, 8))), weight("s.weight", Type("f32", (4, 8)))
    earlier = linear(x, w, loc="elsewhere other.py:1")
    with torch.device("meta"):
        stage = Stage("s", nn.Linear(8, 4, bias=False).eval(), "s", (torch.empty(3, 8),), ("x",), ("y",))
    schedule = Schedule(("x",), (Run("s"),), {"y": "y"})
    with fresh_nodes():
        module = trace("m", {"s": stage}, schedule)
    ((_, traced),) = module.graph("s").outputs
    assert (traced.op, traced.type) == (earlier.op, earlier.type)
    assert traced is not earlier and "other.py" not in traced.loc
    assert linear(x, w) is earlier


def test_a_precision_that_no_kernel_serves_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="precision f32") as refused:
        compile(tmp_path / "absent", "hopper", tmp_path / "a.plan", CompileOptions(precision="f32"))
    assert (refused.value.code, refused.value.exit_code) == ("option.precision", 2)


@pytest.mark.parametrize(
    ("arch", "options", "what", "hint"),
    [
        ("hopper", CompileOptions(precision="bf16"), "precision bf16 has no activation scales", "--precision fp8"),
        ("hopper", CompileOptions(family="baseline"), "precision w8a16, the default of hopper with --family baseline,",
         "--precision fp8"),
        ("orin", CompileOptions(), "precision w8a16, the default of orin, has no", "leave them out: orin"),
    ],
)  # fmt: skip
def test_scales_that_nothing_would_use(arch: str, options: CompileOptions, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolved(options, target_named(arch), scales=True)
    assert refused.value.code == "option.scales"
    assert refused.value.what.startswith(what) and refused.value.hint.startswith(hint)
    assert resolved(options, target_named(arch)).kind in ("bf16", "w8a16")
    assert resolved(replace(options, stages=(("vision", "fp8"),)), target_named("hopper"), scales=True)


def test_a_family_that_has_no_kernels_is_noted() -> None:
    (note,) = family_notes(target_named("orin"), "native")
    assert note.startswith("--family native: orin has no kernels of its own")
    assert not family_notes(target_named("orin"), None) and not family_notes(target_named("hopper"), "native")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff", "is not UTF-8 text"),
        (b"precision =", "is not TOML: "),
    ],
)
def test_a_precision_file_that_is_none(text: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(UsageError) as refused:
        read_precision(str(path))
    assert refused.value.code == "precision.file" and refused.value.hint
    assert refused.value.what.startswith(f"{path} {said}")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "no checkpoint tensor is mapped to s.weight : f32"),
        ({"s.weight": "b"}, "s.weight wants f32.4,8., checkpoint tensor b is bf16.8,4."),
    ],
)
def test_a_weight_map_that_does_not_hold_what_it_promises(keys: dict[str, str], said: str, tmp_path: Path) -> None:
    """Models of plug-ins are checked, too: a parameter that is read is mapped, to a tensor of its shape."""
    header = json.dumps({"b": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with torch.device("meta"):
        stage = Stage("s", nn.Linear(8, 4, bias=False).eval(), "s", (torch.empty(3, 8),), ("x",), ("y",))
    schedule = Schedule(("x",), (Run("s"),), {"y": "y"})
    known = next(iter(load_models().values()))
    model = replace(known, stages=lambda *_: {"s": stage}, schedule=lambda _: schedule)
    opened = Opened(open_checkpoint(tmp_path), model, None, None, (), (), keys)  # type: ignore[arg-type]
    with pytest.raises(FrtcError, match=said) as refused:
        import_module(opened)
    assert refused.value.code == "lowering.weight"
