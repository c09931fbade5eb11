"""Every distinct site of the policies' compiled programs, full size: sites.json, which `python -m bench.sites` writes.

The hand-written lists beside this file say what kernels are built for; this table says what the compiler asks for: of
all policies where it has the baseline's kernels, and of Pi0.5 where it has Hopper's own, in FP8 and in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.sites import NATIVE, from_json
from frtc.kernels.product import PLACES
from frtc.kernels.spec import Operand, Site
from tests.kernels import sites_finish, sites_gemm, sites_moments, sites_pointwise, sites_rope_gemm, sites_rows
from tests.kernels.harness import Case, chosen
from tests.kernels.sites_attention import AttentionSite

TABLE = Path(__file__).parent / "sites.json"
VOCABULARY = 4096  # rows of an embedding table that are drawn: which ones are asked for changes no kernel
HOLE = 13  # keys before the last or before the resumed ones that are hidden
# Tensor cores add products of e4m3 in fewer bits than fp32 has (as cuBLAS does: test_smxx_gemm_e4m3.py): what is small
# because large terms cancel is off by a share of the large ones.
NEAR = 1e-2
BASELINE = ("baseline",)


def policy_sites(native: bool = False) -> list[Site]:
    blocks = json.loads(TABLE.read_text()).items()
    return [from_json(line) for name, lines in blocks if name.endswith(NATIVE) == native for line in lines]


def case_of(site: Site, families: Sequence[str] = BASELINE) -> Case:
    """The site with inputs of its kind, on the kernel that codegen would take of these families."""
    if site.op == "attention":
        return chosen(site, families, **attention(site).judged)
    if site.op == "linear_moments" or site.attrs.get("norm", "none") != "none":
        return chosen(site, families, inputs=sites_moments.inputs, flops=sites_gemm.flops_of(site), near=near(site))
    if site.op in ("linear", "gated_linear", "matmul"):
        return chosen(site, families, inputs=linear_inputs(site), flops=sites_gemm.flops_of(site), near=near(site))
    if site.op == "linear_rope_qkv":
        flops = sites_rope_gemm.flops_of(site)
        return chosen(site, families, inputs=sites_rope_gemm.inputs, flops=flops, near=near(site))
    if site.op == "linear_norm":
        return chosen(site, families, inputs=norm_inputs, flops=sites_gemm.flops_of(site), near=near(site))
    if site.op == "pointwise":
        return chosen(site, families, inputs=sites_pointwise.inputs)
    if site.op == "embedding":
        site = with_rows(site, VOCABULARY)
    return chosen(site, families, inputs=sites_rows.inputs, in_place=((0, 0),) if site.op == "write" else ())


def near(site: Site) -> float:
    """Of a product."""
    x, w = site.operands[:2]
    return NEAR if x and w and x.dtype == w.dtype == "e4m3" else 0.0


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


def norm_inputs(site: Site, generator: np.random.Generator) -> list[NDArray[Any] | None]:
    """Of a linear_norm; all rows are counted."""
    values, place = sites_finish.inputs(site, generator), PLACES["linear"]["rows"]
    if site.operands[place] is not None:
        values[place] = np.array(site.results[0].shape[-2], np.int32)
    return values


def with_rows(site: Site, rows: int) -> Site:
    table = site.operands[0]
    assert table is not None
    fewer = Operand(table.dtype, (min(rows, table.shape[0]), *table.shape[1:]), table.strides)
    return replace(site, operands=(fewer, *site.operands[1:]))
