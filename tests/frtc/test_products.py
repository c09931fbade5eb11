"""`frtc inspect` says of every site what it multiplies and whose scales its activations have."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from frtc.passes.sites import UNNORMED
from frtc.products import precision_data, precision_line, precision_rows, products_of
from tests.frtc.in_memory import KINDS, Maker

STORED = "FP8 storage, bf16 rate: these kernels have no instructions of this GPU for FP8"
SAID = {
    "bf16": ("bf16", "16-bit weights and activations", ""),
    "w8a16": ("w8a16", "FP8 storage of weights, bf16 rate", ""),
    "fp8": ("fp8", "FP8 x FP8", "static"),
    "rows": ("fp8", "FP8 x FP8", "per row"),
}


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("products"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_site_is_said(kind: str, maker: Maker) -> None:
    program = maker.make(kind).plan.program
    expected, words, scales = SAID[kind]
    assert precision_line(program) == f"precision: {expected} ({words})"
    found = products_of(program)
    inner = [p for p in found if ".layers." in p.site]
    assert {(p.kind, p.scales) for p in inner} == {(expected, scales)} and len(found) > len(inner) > 20
    assert {p.site for p in inner} == {s for s in maker.scales.sites if ".layers." in s and not s.endswith(UNNORMED)}
    data = precision_data(program)
    assert len(data["products"]) == len(found) and data["products"][0]["kind"] == "f32"
    said = f"{expected}, {scales} scales" if scales else expected
    count = Counter((p.stage, p.kind) for p in found)["prefix", expected]
    assert dict(precision_rows(program))["prefix"] == f"{count} {said}"


@pytest.mark.parametrize(
    ("target", "family", "words"),
    [
        ("hopper", "baseline+sm_90a", "FP8 x FP8"),
        ("hopper", "baseline", STORED),
        ("rtx5090", "baseline", "FP8 x FP8"),
        ("thor", "baseline", STORED),
    ],
)
def test_who_multiplies_fp8_decides_what_it_is_called(target: str, family: str, words: str, maker: Maker) -> None:
    program = maker.make("fp8").plan.program
    there = replace(program, target=replace(program.target, name=target, family=family))
    assert precision_line(there) == f"precision: fp8 ({words})"
