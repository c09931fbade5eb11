"""Attention sites that kernels are judged on: all of Pi0.5's, and awkward ones. Also their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.dtypes import round_to
from frtc.kernels.spec import Operand, Site

Array = NDArray[Any]
VIEWS, PROMPTS, HORIZONS = (1, 2, 3), (48, 200), (10, 50)
PATCHES = 256  # image tokens of a view


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """A site and what its inputs hold.

    length   the number of valid keys on the device, where the site has that operand
    spread   standard deviation of the scores: 1 soft, 30 nearly one-hot
    hidden   what keys and values hold that no query sees
    """

    name: str
    site: Site
    length: int = 0
    spread: float = 1.0
    hidden: float = np.nan

    @property
    def flops(self) -> float:
        """Of both products over the visible keys (of all of them where a mask or causality hides some)."""
        q, k, v, _, length = self.site.operands[:5]
        assert q and k and v
        resume = self.site.attrs.get("resume", -1)
        after = k.shape[-2] - max(resume, self.length) if resume >= 0 else 0
        keys = min(k.shape[-2], self.length + after) if length else k.shape[-2]
        return 2.0 * math.prod(q.shape[:-1]) * keys * (q.shape[-1] + v.shape[-1])

    @property
    def judged(self) -> dict[str, Any]:
        """What a Case of the site is made with.

        level_rows: probabilities rounded to bf16 (2^-9 each) are by themselves over 4 bars in a row of 72 values whose
        one loud channel happens to cancel; against the size of a typical row they are under 2.
        bar: a step of e4m3 is 6 to 12 %, and one result in twenty lies within that error of the next. Together 1.3e-2,
        0.13 in the worst row of 72; the same sums are judged by the bar of bf16 where they are stored so.
        """
        bar = {"bar": 4e-2} if self.site.results[0].dtype == "e4m3" else {}
        return {"inputs": self.inputs, "flops": self.flops, "level_rows": True, **bar}

    def inputs(self, site: Site, rng: np.random.Generator) -> list[Array | None]:
        """N(0, 1), 1 % of channels times 30, q scaled to the spread of scores; keys that nobody sees hold `hidden`."""
        q, k, v, mask, length, *inv = site.operands
        assert q and k and v
        draws = [_loud_channels(rng, operand.shape) for operand in (q, k, v)]
        sample = np.einsum("...qd,...kd->...qk", draws[0][..., :1, :16, :], draws[1][..., :1, :256, :])
        draws[0] *= self.spread / (site.attrs["scale"] * (float(np.std(sample)) or 1.0))  # 0: a single score
        masks: Array | None = rng.random(mask.shape) < 0.7 if mask else None
        if masks is not None:
            masks[..., 3:5] = False
        for draw in draws[1:]:
            draw[self._unseen(k, masks)] = self.hidden
        rounded = [round_to(draw, operand.dtype) for draw, operand in zip(draws, (q, k, v), strict=True)]
        valid = np.array(self.length, np.int32) if length else None
        return [*rounded, masks, valid, *(np.asarray(rng.uniform(20, 100), np.float32) if o else None for o in inv)]

    def _unseen(self, k: Operand, masks: Array | None) -> Array:
        """Bool [..., Hkv, Sk]: keys that length, resume or the mask hide from every query."""
        key, resume = np.arange(k.shape[-2]), self.site.attrs.get("resume", -1)
        seen: Array = np.ones(k.shape[:-1], np.bool_)
        if self.site.operands[4] is not None:
            seen &= (key < self.length) | ((key >= resume) if resume >= 0 else np.False_)
        if masks is not None:  # by any query of any head
            q = self.site.operands[0]
            assert q
            scores = np.broadcast_to(masks, (*q.shape[:-1], k.shape[-2]))
            seen &= np.any(scores, axis=(-3, -2), keepdims=True)[..., 0, :]
        return ~seen


def _loud_channels(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    draw: Array = rng.standard_normal(shape, dtype=np.float32)
    draw[..., rng.permutation(shape[-1])[: max(1, shape[-1] // 100)]] *= 30
    return draw


def rows_of(dtype: str, batch: int, heads: int, length: int, size: int, width: int) -> Operand:
    """[batch, heads, length, size] in a row-major [batch, length, width] whose rows hold the heads side by side."""
    return Operand(dtype, (batch, heads, length, size), (length * width, size, width, 1))


def self_site(batch: int, heads: int, length: int, size: int, dtype: str = "bf16", **attrs: Any) -> Site:
    """q, k and v side by side in rows of one width, and so is the result."""
    qkv = rows_of(dtype, batch, heads, length, size, 3 * heads * size)
    out = rows_of(dtype, batch, heads, length, size, heads * size)
    return Site("attention", (qkv, qkv, qkv, None, None), (out,), {"scale": size**-0.5, **attrs})


def cached_site(
    heads: tuple[int, int],
    queries: int,
    keys: int,
    size: int,
    values: int = 0,
    batch: int = 1,
    dtype: str = "bf16",
    **attrs: Any,
) -> Site:
    """q in rows of q|k|v, k and v [batch, Hkv, keys, size] in a cache, the number of valid keys on the device."""
    hq, hkv = heads
    values = values or size
    q = rows_of(dtype, batch, hq, queries, size, (hq + 2 * hkv) * size)
    k, v = Operand.packed(dtype, batch, hkv, keys, size), Operand.packed(dtype, batch, hkv, keys, values)
    out = rows_of(dtype, batch, hq, queries, values, hq * values)
    return Site("attention", (q, k, v, None, Operand.packed("i32")), (out,), {"scale": size**-0.5, **attrs})


def heads_apart(site: Site) -> Site:
    """The result with a matrix for each head."""
    (out,) = site.results
    return replace(site, results=(Operand.packed(out.dtype, *out.shape),))


def in_e4m3(about: AttentionSite, per_row: bool) -> AttentionSite:
    """The result in e4m3: times an operand, or with a scale for each token."""
    site = about.site
    out = replace(site.results[0], dtype="e4m3")
    if per_row:
        scales = Operand.packed("f32", *out.shape[:-3], out.shape[-2], 1)
        site = replace(site, results=(out, scales), attrs={**site.attrs, "per_row": True})
    else:
        site = replace(site, results=(out,), operands=(*site.operands, Operand.packed("f32")))
    return replace(about, name=f"{about.name}, e4m3 {'per row' if per_row else 'times inv'}", site=site)


def with_mask(site: Site, *shape: int) -> Site:
    q, k, v, _, length = site.operands
    return replace(site, operands=(q, k, v, Operand.packed("bool", *shape), length))


def real_sites() -> list[AttentionSite]:
    """Pi0.5 at 1 to 3 views, prompts of 48 and 200, chunks of 10 and 50: vision, prefix, denoise step."""
    sites = [AttentionSite(f"vision {v} views", self_site(v, 16, PATCHES, 72)) for v in VIEWS]
    for views in VIEWS:
        for budget in PROMPTS:
            keys = views * PATCHES + budget
            for used in sorted({budget, 48}):
                about, valid = f"{views} views, prompt {used} of {budget}", views * PATCHES + used
                sites.append(AttentionSite(f"prefix {about}", cached_site((8, 1), keys, keys, 256), valid))
                for chunk in HORIZONS:
                    step = cached_site((8, 1), chunk, keys + chunk, 256, resume=keys)
                    sites.append(AttentionSite(f"step {about}, chunk {chunk}", step, valid))
    return sites


def awkward_sites() -> list[AttentionSite]:
    """Other head sizes, few and odd rows, grouped queries, causal, masks, a hole in the keys, nothing visible."""
    sizes = (8, 16, 32, 64, 72, 80, 96, 128, 256)
    step = cached_site((8, 1), 50, 610, 256, resume=560)
    one = cached_site((8, 1), 10, 570, 256)
    return [
        *(AttentionSite(f"head size {d}", self_site(2, 3, 65, d)) for d in sizes),
        *(AttentionSite(f"{n} queries", cached_site((8, 1), n, 700, 256, resume=690), 561) for n in (7, 50, 561)),
        AttentionSite("1 query", cached_site((8, 1), 1, 700, 256, batch=8, resume=690), 561),
        AttentionSite("f16", cached_site((4, 2), 50, 130, 64, dtype="f16"), 99),
        AttentionSite("values 48 wide, keys 80", cached_site((4, 2), 33, 200, 80, values=48), 177),
        AttentionSite("groups of 3", cached_site((15, 5), 50, 300, 64, resume=250), 211),
        AttentionSite("groups of 40", cached_site((80, 2), 7, 90, 16, batch=2), 77),
        AttentionSite("groups of 2", cached_site((16, 8), 31, 300, 128), 287),
        AttentionSite("heads apart", heads_apart(self_site(2, 3, 70, 64))),
        AttentionSite("causal prefill", cached_site((16, 8), 150, 150, 128, causal=True), 150),
        AttentionSite("causal decode", cached_site((8, 1), 1, 513, 256, batch=8, causal=True), 513),
        AttentionSite("causal and length", cached_site((8, 1), 40, 200, 256, causal=True), 170),
        AttentionSite(
            "probabilities in bf16", cached_site((8, 1), 50, 610, 256, batch=4, resume=560, probs="bf16"), 553
        ),
        AttentionSite("sharp", step, 553, spread=30.0),
        AttentionSite("one key", one, 1),
        AttentionSite("no key", one, 0),
        AttentionSite("no hole", cached_site((8, 1), 10, 570, 256, resume=560), 560),
        AttentionSite("whole tiles hidden", cached_site((8, 1), 10, 1018, 256, resume=1008), 5),
        AttentionSite("key mask", with_mask(self_site(2, 4, 100, 64), 2, 1, 1, 100)),
        AttentionSite("full mask", with_mask(self_site(2, 4, 100, 72), 2, 4, 100, 100)),
        AttentionSite("row mask and length", with_mask(step, 50, 610), 553),
    ]
