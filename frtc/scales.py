"""Activation scales of a checkpoint, by GEMM site and denoise round: what a calibration found. frtc/scales_file.py
keeps them in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from frtc.errors import FrtcError, nearest
from frtc.histogram import Histogram
from frtc.lowering.ir import Module, Node, Type, walk
from frtc.passes.norm_readers import unnormed_of
from frtc.passes.quantize import SCALE
from frtc.passes.sites import UNNORMED, GemmSite, sites_of, unnormed
from frtc.scales_key import PARTS, Key, key_of

if TYPE_CHECKING:
    from frtc.compiler import Opened

Array = np.ndarray[Any, Any]

METHODS = ("absmax", "percentile", "mse")
HEADROOM = 1.25  # of absmax: what the samples did not show. e4m3 loses a third of an octave of its eighteen by it
PERCENT = 99.99  # of the method "percentile"
AGAIN = "calibrate this checkpoint with this frtc: `frtc calibrate CKPT --data DATA -o F.scales`"
THRESHOLD = 20.0  # dB: a site whose values e4m3 holds less well stays in 16 bits; a normal distribution has 31


QUIET = ".quiet"  # ends the name of the values before a norm in the quietest of a product's rows
QUIETEST = 16  # one row in so many
QUIET_LOSS = 3.0  # dB: what quiet rows may lose where a product makes up for its norm


@dataclass(frozen=True, slots=True)
class Site:
    """shape of x; rounds of the repeat around the program, None outside of one.

    A product whose x is a norm has two more: NAME.unnormed, the values before the norm as a product that makes up for
    it reads them, and NAME.quiet, those of the rows of least magnitude.
    """

    name: str
    program: str
    rounds: int | None
    shape: tuple[int, ...]

    @staticmethod
    def of(site: GemmSite) -> Site:
        return Site(site.name, site.program, site.rounds, site.x.shape)

    @staticmethod
    def all_of(sites: Iterable[GemmSite]) -> list[Site]:
        """Of all sites, with what is before their norms."""
        own = list(sites)
        return [Site.of(site) for site in own] + [
            replace(Site.of(site), name=site.name + ending)
            for site in own
            if unnormed_of(site.x) is not None
            for ending in (UNNORMED, QUIET)
        ]

    @property
    def product(self) -> bool:
        """Of a product's x, not of what is before its norm."""
        return not self.name.endswith((UNNORMED, QUIET))

    @property
    def rows(self) -> int:
        return self.rounds or 1


@dataclass(frozen=True, slots=True)
class Scales:
    """A calibration.

    histograms   of each site, one for each of its rows
    values       f32 [rows] of each site: its scales
    samples      observations that the histograms count
    data         what they were, for people: {"path", "kind", "frames", "seed"}
    synthetic    why they are not a robot's; () where nothing speaks against them
    """

    key: Key
    sites: Mapping[str, Site]
    histograms: Mapping[str, tuple[Histogram, ...]]
    values: Mapping[str, Array]
    samples: int
    data: Mapping[str, Any]
    synthetic: tuple[str, ...]
    method: str
    headroom: float

    @staticmethod
    def made(
        key: Key,
        sites: Iterable[Site],
        histograms: Mapping[str, tuple[Histogram, ...]],
        samples: int,
        data: Mapping[str, Any],
        synthetic: Iterable[str] = (),
        method: str = "absmax",
        headroom: float = HEADROOM,
    ) -> Scales:
        """Scales by `method`; absmax has the headroom, the others need none."""
        headroom = headroom if method == "absmax" else 1.0
        values = {
            name: np.array([h.scale(method, headroom, PERCENT) for h in rows], np.float32)
            for name, rows in histograms.items()
        }
        named = {site.name: site for site in sites}
        return Scales(key, named, dict(histograms), values, samples, dict(data), tuple(synthetic), method, headroom)

    def of(self, site: str) -> Array:
        """f32 [], or [rounds] in a repeat: what the elements stored at the site are multiplied by."""
        found = self._site(site)
        return self.values[site] if found.rounds is not None else self.values[site][0]

    def sqnr(self, site: str, values: str = "") -> float:
        """dB, in the worst round; minus infinity for a site that never held anything but zeros. values: NAME of others
        that are stored with its scale.
        """
        self._site(site)
        rows = zip(self.histograms[values or site], self.values[site], strict=True)
        return min(h.sqnr(float(s)) for h, s in rows)

    def fallen(self, threshold: float = THRESHOLD) -> dict[str, str]:
        """Sites whose values e4m3 cannot hold well, and why; NAME.unnormed where NAME's norm has to stay."""
        found = {name: self.sqnr(name) for name, site in self.sites.items() if site.product}
        fallen = {
            site: f"SQNR {worst:.1f} dB, under {threshold:g}" if np.isfinite(worst) else "its samples are all zero"
            for site, worst in found.items()
            if worst < threshold
        }
        for site, normed in found.items():
            before, quiet = unnormed(site), site + QUIET
            if before in self.sites and not (worst := self.sqnr(before, quiet)) >= max(threshold, normed - QUIET_LOSS):
                fallen[before] = f"SQNR of quiet rows {worst:.1f} dB, {normed:.1f} behind the norm"
        return fallen

    def __add__(self, other: Scales) -> Scales:
        """One calibration of the samples of both."""
        if self.key != other.key:
            raise _other_key(self.key.differs(other.key), "two calibrations")
        both = {
            name: tuple(a + b for a, b in zip(rows, other.histograms[name], strict=True))
            for name, rows in self.histograms.items()
        }
        why = dict.fromkeys((*self.synthetic, *other.synthetic))
        about = (self.samples + other.samples, self.data, why, self.method, self.headroom)
        return Scales.made(self.key, self.sites.values(), both, *about)

    def require(self, opened: Opened, front: Module) -> None:
        """They are of this checkpoint, with these options, and know each site of the module after FRONT."""
        from frtc.compiler import sizes_of  # it imports torch, which a file of scales does not need

        self.require_key(key_of(opened, front, opened.policy(sizes_of(front))))
        self.require_sites(sites_of(front))

    def require_key(self, key: Key, parts: Iterable[str] = PARTS) -> None:
        if differ := self.key.differs(key, parts):
            raise _other_key(differ, "the checkpoint")

    def require_sites(self, sites: Iterable[GemmSite]) -> None:
        for site in Site.all_of(sites):
            self.require_type(site.name, Type("f32", () if site.rounds is None else (site.rounds,)))

    def require_leaves(self, expressions: Iterable[Node]) -> None:
        """They know each activation scale that weights are made of."""
        for node in walk(expressions):
            if is_scale(node):
                self.require_type(node["key"][len(SCALE) :], node.t)

    def require_type(self, site: str, type: Type) -> None:
        if (found := self.of(site).shape) != type.shape:
            rows = [("scales", _rounds(found)), ("model", _rounds(type.shape))]
            raise FrtcError("scales.rounds", f"the scales of {site} are of another number of rounds", rows, AGAIN)

    def about(self) -> dict[str, Any]:
        """For a Plan's evidence: whose they are and how they were found."""
        return {
            "key": self.key.digest,
            "samples": self.samples,
            "data": dict(self.data),
            "synthetic": list(self.synthetic),
            "method": self.method,
            "headroom": self.headroom,
        }

    def _site(self, name: str) -> Site:
        if name not in self.sites:
            rows = [("nearest", nearest(name, self.sites) or "none"), ("sites", str(len(self.sites)))]
            raise FrtcError("scales.site", f"there is no scale of {name}", rows, AGAIN)
        return self.sites[name]


def is_scale(node: Node) -> bool:
    """A leaf that stands for the activation scales of a site."""
    return node.op == "tensor" and str(node["key"]).startswith(SCALE)


def _rounds(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} rounds" if shape else "one scale"


def _other_key(differ: list[str], whose: str) -> FrtcError:
    rows = [("differs", f"{part}: {PARTS[part]}") for part in differ]
    what = f"the scales are not of {whose}: " + ", ".join(differ)
    return FrtcError("scales.key", what, rows, f"with the same options, {AGAIN}")
