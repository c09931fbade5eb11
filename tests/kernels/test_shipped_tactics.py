"""Tables of tactics that everybody gets: what stands in each is a kernel's own config for the site, and asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("torch")

from bench.chain_search import cases
from bench.full_model import STATIC, Shape
from bench.sites import uses
from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Operand, Site
from frtc.kernels.tactic import TABLES, Tactic, key_of, read_tactics, table_of
from frtc.kernels.targets import Target, load_targets
from frtc.models import load_models

TARGETS = load_targets()
NAMES = sorted(path.stem for path in TABLES.glob("*.json"))
EVERY_TABLE = pytest.mark.parametrize("name", NAMES)
SITES = [pytest.param(name, tactic, id=f"{name} {tactic.site[:90]}") for name in NAMES
         for tactic in table_of(name).by_site.values()]  # fmt: skip


def site_of(key: str) -> Site:
    """The site with this text (tactic.key_of)."""
    asked, _, results = key.rpartition(") -> ")
    op, _, asked = asked.partition("(")
    operands, _, attrs = asked.partition("; ")
    made = [view for text in results.split(", ") if (view := view_of(text))]
    return Site(op, tuple(view_of(text) for text in operands.split(", ")), tuple(made), attrs_of(attrs))


def view_of(text: str) -> Operand | None:
    """bf16[2,8]/[16,1], or - for none"""
    if text == "-":
        return None
    dtype, _, sizes = text.partition("[")
    shape, _, strides = sizes.partition("]")
    packed = Operand.packed(dtype, *numbers(shape))
    return Operand(dtype, packed.shape, tuple(numbers(strides[2:-1]))) if strides else packed


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def attrs_of(text: str) -> dict[str, Any]:
    """name=JSON, ..."""
    found, decoder = {}, json.JSONDecoder()
    while text:
        name, _, text = text.partition("=")
        value, end = decoder.raw_decode(text)
        found[name], text = tuples(value), text[end:].removeprefix(", ")
    return found


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def asked_for(shapes: Iterable[Shape], target: Target) -> dict[str, Site]:
    families = target.families()
    return {key_of(use.site): use.site for shape in shapes for use in uses(shape, target.name, families=families)}


def named(tactic: Tactic) -> tuple[str, dict[str, Any]]:
    return tactic.kernel, dict(tactic.config)


def chosen(site: Site, target: Target) -> tuple[str, dict[str, Any]]:
    choice = CATALOG.select(site, target, target.families())
    return choice.kernel.name, dict(choice.config)


@EVERY_TABLE
def test_a_table_is_of_a_target(name: str) -> None:
    """And as its writer leaves it: sorted, one line a site."""
    found = read_tactics(TABLES / f"{name}.json", name)
    assert name in TARGETS and found.by_site and found.by_site.keys() == table_of(name).by_site.keys()
    assert found.text() == (TABLES / f"{name}.json").read_text()


@pytest.mark.parametrize(("name", "tactic"), SITES)
def test_a_tactic_is_the_kernels_own_and_decides(name: str, tactic: Tactic) -> None:
    site, target = site_of(tactic.site), TARGETS[name]
    assert key_of(site) == tactic.site
    own = [(c.kernel.name, dict(c.config)) for c in CATALOG.candidates(site, target, target.families())]
    assert named(tactic) in own and named(tactic) == chosen(site, target)


@EVERY_TABLE
def test_a_table_decides_what_the_compiler_chooses(name: str) -> None:
    """For Pi0.5 with chunk 50, in FP8 where the target has it."""
    target, table = TARGETS[name], table_of(name).by_site
    sites = asked_for([Shape("pi05", precision=STATIC if "fp8" in target.has else "bf16")], target)
    met = sites.keys() & table.keys()
    assert met and all(chosen(sites[key], target) == named(table[key]) for key in met)


@pytest.mark.full
@EVERY_TABLE
def test_a_table_holds_nothing_that_nobody_asks_for(name: str) -> None:
    """Of all policies, as bench/chain_search.py has them."""
    target = TARGETS[name]
    shapes = [case.shape for policy in load_models() for case in cases(policy, "cuda")]
    fitting = [shape for shape in shapes if "fp8" in target.has or shape.precision == "bf16"]
    assert not table_of(name).by_site.keys() - asked_for(fitting, target).keys()


def test_a_sites_text_says_all_of_it() -> None:
    """Absent operands, gaps, texts with commas in attributes."""
    views = (Operand.packed("bf16", 2, 8), None, Operand("e4m3", (2, 8), (32, 1)), Operand.packed("i32"))
    site = Site(
        "linear", views, (views[0],) * 2, {"act": "a, b; c=(d) -> e", "per_row": False, "eps": 1e-6, "at": (1, 2)}
    )
    assert site_of(key_of(site)) == site
