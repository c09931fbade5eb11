"""What every op means, in NumPy. Emulator, interpreter, constant folding and kernel tests share it.

    REFERENCES["rms_norm"](x, w, eps=1e-6, offset=1.0)     # unrounded: fp32, or float64 where an operand is float64

Operands come in the order of the op's row, None where an optional one is absent; attributes come by name. A reference
computes in fp32 from operands in their storage type and does not round its results; who calls it does that, once, to
the result type. An op that rounds inside (residual_norm, attention's probabilities) says so in its docstring.

Each module below holds a table OPS of the references it defines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from frtc import plugins

MODULES = ["pointwise", "shape", "norm", "attention", "linear"]


def _load() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {}
    for name, module in plugins.table("references", "frtc.kernels.reference", MODULES).items():
        ops = module.OPS
        twice = table.keys() & ops.keys()
        assert not twice, f"{sorted(twice)} defined in {name} and before it"
        table |= ops
    return table


REFERENCES = _load()
