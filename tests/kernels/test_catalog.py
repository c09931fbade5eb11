"""Selection: the cheapest that fits wins, and each other one has its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frtc.kernels.catalog import CATALOG, Catalog, NoKernel
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target, load_targets

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]
SITE = Site("fold", (Operand.packed("bf16", 4, 8),), (Operand.packed("bf16", 4),))


def kernel(name: str, costs: dict[int, float], refusal: str = "", family: str = "baseline") -> Kernel:
    """A kernel whose configs are shared-memory sizes with given costs."""

    def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
        return (Stage("fold.cuh", "frtc::fold", (1, 1, 1), 32, config["SMEM"], (Param("operand", 0),)),)

    return Kernel(
        name, "fold", family, lambda site, target: refusal, lambda site, target: [{"SMEM": size} for size in costs],
        lambda site, config, target: costs[config["SMEM"]], stages,
    )  # fmt: skip


def test_the_cheapest_wins_and_the_others_say_why_not() -> None:
    catalog = Catalog(
        (
            kernel("slow", {0: 9.0}),
            kernel("fast", {1000: 3.0, 2000: 2.0, 300_000: 1.0}),
            kernel("picky", {0: 0.5}, "wants rows of 16"),
            kernel("fancy", {0: 0.1}, family="sm_90a"),
            kernel("exotic", {0: 0.1}, family="sm_110a"),
        )
    )
    choice = catalog.select(SITE, HOPPER)
    assert str(choice).splitlines() == [
        "fast SMEM=2000: 2.0 us estimated",
        "  not fast SMEM=300000: 300000 bytes of shared memory, hopper has 232448",
        "  not picky: wants rows of 16",
        "  not fancy: its family sm_90a was not asked for",
        "  not exotic: its family sm_110a is another GPU's",
        "  not slow SMEM=0: 9.0 us estimated",
        "  not fast SMEM=1000: 3.0 us estimated",
    ]
    assert catalog.select(SITE, HOPPER, ("baseline", "sm_90a")).kernel.name == "fancy"


def test_a_config_that_fits_one_target_need_not_fit_another() -> None:
    catalog = Catalog((kernel("big", {1000: 2.0, 150_000: 1.0}),))
    assert catalog.select(SITE, HOPPER).config == {"SMEM": 150_000}
    assert catalog.select(SITE, TARGETS["rtx4090"]).config == {"SMEM": 1000}


def test_equals_go_to_the_first() -> None:
    assert Catalog((kernel("a", {0: 1.0}), kernel("b", {0: 1.0}))).select(SITE, HOPPER).kernel.name == "a"


def test_no_kernel() -> None:
    catalog = Catalog((kernel("picky", {0: 1.0}, "wants rows of 16"),))
    assert not catalog.implements(SITE, HOPPER)
    with pytest.raises(NoKernel) as caught:
        catalog.select(SITE, HOPPER)
    assert str(caught.value).splitlines() == [
        "error[kernel.none]: no kernel runs fold(bf16[4,8]) -> bf16[4] on hopper",
        "  picky  wants rows of 16",
    ]
    with pytest.raises(NoKernel, match="no kernel runs unknown"):
        catalog.select(replace(SITE, op="unknown"), HOPPER)


def test_kernels_are_named_after_their_files() -> None:
    for record in CATALOG.kernels:
        arch = "smxx" if record.family == "baseline" else record.family.replace("_", "").rstrip("a")
        assert record.name.startswith(f"{arch}_"), f"{record.name} of family {record.family}"
