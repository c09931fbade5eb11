"""canonicalize: one spelling of everything, whatever the front end wrote, so that later passes match once.

IR ops only. Each list of rules states in its file what it recognises and which roundings it drops. The lists run
together until none fires: a recognised norm may be what lets a cast vanish, and the other way round.
"""

from __future__ import annotations

from frtc import plugins
from frtc.lowering.ir import Module
from frtc.passes import (
    canonical_activation,
    canonical_attention,
    canonical_cast,
    canonical_gated,
    canonical_heads,
    canonical_layer_norm,
    canonical_linear,
    canonical_literal,
    canonical_logic,
    canonical_lookup,
    canonical_norm,
    canonical_pointwise,
    canonical_rope,
    canonical_shape,
)
from frtc.passes.rewrite import rewrite

RULES = (
    canonical_literal.RULES,  # first: no rule below has to know arithmetic on literals
    canonical_cast.RULES,  # before the formulas: their patterns speak of no casts
    canonical_shape.RULES,
    canonical_lookup.RULES,
    canonical_pointwise.RULES,
    canonical_logic.RULES,
    canonical_activation.RULES,
    *canonical_norm.RULES,
    canonical_layer_norm.RULES,
    canonical_rope.RULES,
    canonical_linear.RULES,
    canonical_attention.RULES,
    canonical_heads.RULES,
    canonical_gated.RULES,
    *(rules.RULES for rules in plugins.table("rules", "frtc.passes", ()).values()),
)


def canonicalize(module: Module) -> Module:
    return module.map(lambda graph: rewrite(graph, *RULES))
