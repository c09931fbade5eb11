"""The pipeline, one literal list. Each ordering constraint stands beside the pass it binds."""

from __future__ import annotations

from frtc.passes.attention_sites import attention_sites
from frtc.passes.canonicalize import canonicalize
from frtc.passes.defer_norms import defer_norms
from frtc.passes.fold_constants import fold_constants
from frtc.passes.fold_linears import fold_linears
from frtc.passes.fold_norms import fold_norms
from frtc.passes.fuse_epilogues import add_behind_views, fuse_epilogues
from frtc.passes.fuse_linear_norm import fuse_linear_norm
from frtc.passes.fuse_pointwise import fuse_pointwise
from frtc.passes.fuse_residual_norm import fuse_residual_norm
from frtc.passes.fuse_rope_linear import fuse_rope_linear
from frtc.passes.fuse_rope_qkv import fuse_rope_qkv
from frtc.passes.hoist import hoist
from frtc.passes.join_pointwise import join_pointwise
from frtc.passes.layout import layout
from frtc.passes.limit_rows import limit_rows
from frtc.passes.merge_linears import merge_linears
from frtc.passes.name_weights import name_weights
from frtc.passes.precision import Precision
from frtc.passes.quantize import Told, quantize
from frtc.passes.rewrite import Implements, Pass
from frtc.passes.split_linears import split_linears

BF16 = Precision()

# What the model means, whatever the GPU.
FRONT: tuple[Pass, ...] = (
    canonicalize,  # first: all later rules match one spelling
    attention_sites,  # before hoist: a mask that becomes a length must not be computed and carried out of the loop
    split_linears,  # before fold_constants: the part of the product that the round alone decides becomes a table
    fold_constants,  # before hoist and merge: the modulation's linears leave the loop instead of being merged into it
    hoist,
    merge_linears,  # after gated linears are recognised (canonicalize), so that gate and up are no candidates
    fold_norms,  # after merge: one norm feeds one linear
    fold_linears,
)


def pipeline(
    implements: Implements,
    precision: Precision = BF16,
    told: Told = lambda note: None,
    front: Pass | None = None,
) -> tuple[Pass, ...]:
    """All passes for a GPU whose kernels run the nodes that `implements` accepts.

    told    hears what became of each product
    front   is shown the module that no GPU has been chosen for yet; its sites are what a calibration has scales of
    """
    return (
        *FRONT,
        *([front] if front else []),
        fuse_epilogues(implements),  # after folds: they match bare linears
        fuse_residual_norm(implements),  # after epilogues: only sums that no linear can absorb
        limit_rows,  # after epilogues: the linears are whole; before layout: a view does not say where an axis goes
        defer_norms(implements, precision),  # after limit_rows, which knows linear and norm; before views hide readers
        # After limit_rows, which knows the two ops apart. With FP8 alone: it saves a launch for each norm of the loop,
        # and a norm of few rows that waits for the last block of its product takes a microsecond longer than alone.
        *([fuse_linear_norm(implements)] if "fp8" in precision.kinds else []),
        layout,  # no rule of the passes above matches views
        add_behind_views(implements),  # after layout: what lies between is a view, or a reshape of one
        fuse_rope_qkv(implements),  # after layout: heads are strides, whatever spelling made them
        fuse_rope_linear(implements),  # after fuse_rope_qkv, which leaves the linear that it absorbs
        quantize(implements, precision, told),  # after all that decides what one launch is; it changes operands only
        fuse_pointwise(implements),  # after all that could absorb a pointwise op
        join_pointwise(implements),  # after fuse_pointwise: no rule before knows a pointwise op with several results
        name_weights,  # last: constant expressions are complete
    )
