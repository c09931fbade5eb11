"""Activation scales of a checkpoint, by GEMM site and denoise round: what a calibration found. frtc/scales_file.py
keeps them in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
# Values before a norm are as large as an observation makes them, and a saturated one is wrong by all that it is larger.
# e4m3 has room below: what it holds of a number is the same in the ten octaves under its largest.
UNNORMED_HEADROOM = 8.0
UNBOUND = ("absmax", UNNORMED_HEADROOM, PERCENT)
AGAIN = "calibrate this checkpoint with this frtc: `frtc calibrate CKPT --data DATA -o F.scales`"
THRESHOLD = 20.0  # dB: a site whose values e4m3 holds less well stays in 16 bits; a normal distribution has 31
LOSS = 1.0  # dB: what a product may lose where it makes up for its norm


@dataclass(frozen=True, slots=True)
class Site:
    """shape of x; rounds of the repeat around the program, None outside of one.

    A product whose x is a norm has another: NAME.unnormed, the values before the norm as a product that makes up for
    it reads them.
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
        behind = [site for site in own if unnormed_of(site.x) is not None]
        return [Site.of(s) for s in own] + [replace(Site.of(s), name=unnormed(s.name)) for s in behind]

    @property
    def product(self) -> bool:
        """Of a product's x, not of what is before its norm."""
        return not self.name.endswith(UNNORMED)

    @property
    def rows(self) -> int:
        return self.rounds or 1


@dataclass(frozen=True, slots=True)
class Counted:
    """What a calibration sees: histograms and noise of Scales."""

    histograms: Mapping[str, tuple[Histogram, ...]]
    noise: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scales:
    """A calibration.

    histograms   of each site, one for each of its rows
    noise        f64 [rows, 2] of each site behind a norm: what e4m3 costs there, and before it (frtc/norm_noise.py)
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
    noise: Mapping[str, Array] = field(default_factory=dict)

    @staticmethod
    def made(
        key: Key,
        sites: Iterable[Site],
        counted: Counted,
        samples: int,
        data: Mapping[str, Any],
        synthetic: Iterable[str] = (),
        method: str = "absmax",
        headroom: float = HEADROOM,
    ) -> Scales:
        """Scales by `method`; absmax has the headroom, the others need none."""
        headroom = headroom if method == "absmax" else 1.0
        named = {site.name: site for site in sites}
        how = {name: (method, headroom, PERCENT) if site.product else UNBOUND for name, site in named.items()}
        values = {
            name: np.array([h.scale(*how[name]) for h in rows], np.float32) for name, rows in counted.histograms.items()
        }
        about = (samples, dict(data), tuple(synthetic), method, headroom)
        return Scales(key, named, dict(counted.histograms), values, *about, dict(counted.noise))

    def of(self, site: str) -> Array:
        """f32 [], or [rounds] in a repeat: what the elements stored at the site are multiplied by."""
        found = self._site(site)
        return self.values[site] if found.rounds is not None else self.values[site][0]

    def sqnr(self, site: str) -> float:
        """dB, in the worst round; minus infinity for a site that never held anything but zeros."""
        self._site(site)
        return min(h.sqnr(float(s)) for h, s in zip(self.histograms[site], self.values[site], strict=True))

    def loss(self, site: str) -> float:
        """dB that a product loses where it makes up for its norm, all rounds together; nan: nothing was measured."""
        behind, before = self.noise[site].sum(0)
        return 10 * float(np.log10(before / behind)) if behind > 0 and before > 0 else np.nan

    def fallen(self, threshold: float = THRESHOLD) -> dict[str, str]:
        """Sites whose values e4m3 cannot hold well, and why; NAME.unnormed where NAME's norm has to stay."""
        found = {name: self.sqnr(name) for name, site in self.sites.items() if site.product}
        fallen = {
            site: f"SQNR {worst:.1f} dB, under {threshold:g}" if np.isfinite(worst) else "its samples are all zero"
            for site, worst in found.items()
            if worst < threshold
        }
        for site in self.noise:
            loss = self.loss(site)
            if np.isnan(loss):
                fallen[unnormed(site)] = "nothing says what it loses without its norm"
            elif loss > LOSS:
                fallen[unnormed(site)] = f"loses {loss:.1f} dB without its norm, more than {LOSS:g}"
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
        noise = {name: rows + other.noise[name] for name, rows in self.noise.items()}
        return Scales.made(self.key, self.sites.values(), Counted(both, noise), *about)

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
