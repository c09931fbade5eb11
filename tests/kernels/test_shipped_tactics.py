"""Tables of tactics that everybody gets: what stands there is still asked for, and fits."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench.full_model import STATIC, Shape
from bench.sites import uses
from frtc.kernels.catalog import CATALOG
from frtc.kernels.tactic import key_of, table_of
from frtc.kernels.targets import load_targets

TARGETS = load_targets()


def test_the_table_of_hopper_is_used_as_it_stands() -> None:
    """By Pi0.5 in FP8 with static scales, chunk 50, which it was made for."""
    hopper = TARGETS["hopper"]
    families, left = hopper.families(), dict(table_of("hopper").by_site)
    for use in uses(Shape("pi05", precision=STATIC), families=families):
        tactic = left.pop(key_of(use.site), None)
        if tactic is not None:
            choice = CATALOG.select(use.site, hopper, families)
            assert (choice.kernel.name, dict(choice.config)) == (tactic.kernel, dict(tactic.config))
    assert not left, "nobody asks for these"


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - {"hopper"}))
def test_other_targets_were_measured_by_nobody(name: str) -> None:
    assert not table_of(name).by_site
