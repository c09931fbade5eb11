"""Every distinct site of the policies' compiled programs, full size: sites.json, which `python -m bench.sites` writes.

The hand-written lists beside this file say what kernels are built for; this table says what the compiler asks for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.sites import from_json
from frtc.kernels.product import PLACES
from frtc.kernels.spec import Operand, Site
from tests.kernels import sites_gemm, sites_pointwise, sites_rope_gemm, sites_rows
from tests.kernels.harness import Case, chosen
from tests.kernels.sites_attention import AttentionSite

TABLE = Path(__file__).parent / "sites.json"
VOCABULARY = 4096  # rows of an embedding table that are drawn: which ones are asked for changes no kernel
HOLE = 13  # keys before the last or before the resumed ones that are hidden


def policy_sites() -> list[Site]:
    return [from_json(line) for lines in json.loads(TABLE.read_text()).values() for line in lines]


def case_of(site: Site) -> Case:
    """The site with inputs of its kind, on the kernel that codegen would take."""
    if site.op == "attention":
        return chosen(site, **attention(site).judged)
    if site.op in ("linear", "gated_linear", "matmul"):
        return chosen(site, inputs=linear_inputs(site), flops=sites_gemm.flops_of(site))
    if site.op == "linear_rope_qkv":
        return chosen(site, inputs=sites_rope_gemm.inputs, flops=sites_rope_gemm.flops_of(site))
    if site.op == "pointwise":
        return chosen(site, inputs=sites_pointwise.inputs)
    if site.op == "embedding":
        site = with_rows(site, VOCABULARY)
    return chosen(site, inputs=sites_rows.inputs, in_place=((0, 0),) if site.op == "write" else ())


def attention(site: Site) -> AttentionSite:
    """Where keys are counted, some before the end, or before the resumed ones, are hidden."""
    keys = site.operands[1]
    assert keys is not None
    resume = int(site.attrs.get("resume", -1))
    return AttentionSite("", site, max(1, (keys.shape[-2] if resume < 0 else resume) - HOLE))


def linear_inputs(site: Site) -> Any:
    """A count of rows says that all are read."""
    x, place = site.operands[0], PLACES.get(site.op, {}).get("rows", len(site.operands))
    assert x is not None
    counted = place < len(site.operands) and site.operands[place] is not None
    return sites_gemm.inputs_with_rows(x.shape[-2]) if counted else sites_gemm.inputs_of


def with_rows(site: Site, rows: int) -> Site:
    table = site.operands[0]
    assert table is not None
    fewer = Operand(table.dtype, (min(rows, table.shape[0]), *table.shape[1:]), table.strides)
    return replace(site, operands=(fewer, *site.operands[1:]))
