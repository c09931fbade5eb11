"""The compile driver: what it refuses at once, and that a trace does not depend on what the process traced before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from frtc.compiler import CompileOptions, compile
from frtc.errors import UsageError
from frtc.lowering.ir import Type, fresh_nodes, input_, weight
from frtc.lowering.ops import linear
from frtc.models.stages import Run, Schedule, Stage
from frtc.trace import trace


def test_locations_are_this_models_own() -> None:
    """Nodes are interned and keep their first location; an equal node of an earlier trace must not lend its own."""
    x, w = input_("x", Type("f32", (3, 8))), weight("s.weight", Type("f32", (4, 8)))
    earlier = linear(x, w, loc="elsewhere other.py:1")
    with torch.device("meta"):
        stage = Stage("s", nn.Linear(8, 4, bias=False).eval(), "s", (torch.empty(3, 8),), ("x",), ("y",))
    schedule = Schedule(("x",), (Run("s"),), {"y": "y"})
    with fresh_nodes():
        module = trace("m", {"s": stage}, schedule, {"s.weight": ("w", Type("f32", (4, 8)))})
    ((_, traced),) = module.graph("s").outputs
    assert (traced.op, traced.type) == (earlier.op, earlier.type)
    assert traced is not earlier and "other.py" not in traced.loc
    assert linear(x, w) is earlier


def test_a_precision_that_no_kernel_serves_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="precision f32") as refused:
        compile(tmp_path / "absent", "hopper", tmp_path / "a.plan", CompileOptions(precision="f32"))
    assert (refused.value.code, refused.value.exit_code) == ("option.precision", 2)
