"""Masked arrays are refused wherever an input comes in: the mask would be dropped, and what it hides read."""

from __future__ import annotations

import numpy as np

from frtc.errors import FrtcError


def require_unmasked(what: str, values: object) -> None:
    if isinstance(values, np.ndarray) and hasattr(values, "mask"):  # nobody loads numpy.ma to ask
        hint = "give all values, with filled(VALUE), or no observation where a sensor has none"
        raise FrtcError("input.masked", f"{what} is a masked array, and masks are not read", hint=hint)
