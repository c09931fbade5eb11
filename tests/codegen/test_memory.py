"""The arena plan: nothing that lives together overlaps, and memory is reused."""

from __future__ import annotations

import random

from frtc.codegen.memory import ALIGN, Lifetime, aligned, plan_arena


def overlaps(a: Lifetime, at: int, b: Lifetime, bt: int) -> bool:
    together = a.first <= b.last and b.first <= a.last
    return together and at < bt + b.nbytes and bt < at + a.nbytes


def test_random_plans_never_overlap_and_stay_aligned() -> None:
    rng = random.Random(0)
    for _ in range(50):
        buffers = []
        for _ in range(40):
            first = rng.randrange(30)
            buffers.append(Lifetime(rng.randrange(1, 5000), first, first + rng.randrange(6)))
        offsets, size = plan_arena(buffers)
        placed = list(zip(buffers, offsets, strict=True))
        assert all(at % ALIGN == 0 and at + b.nbytes <= size for b, at in placed)
        for i, (a, at) in enumerate(placed):
            assert not any(overlaps(a, at, b, bt) for b, bt in placed[i + 1 :])
        alive = max(sum(aligned(b.nbytes) for b in buffers if b.first <= t <= b.last) for t in range(40))
        assert alive <= size <= 2 * alive


def test_a_chain_needs_two_buffers() -> None:
    chain = [Lifetime(1000, i, i + 1) for i in range(20)]
    assert plan_arena(chain)[1] == 2 * aligned(1000)


def test_touching_lifetimes_do_not_share() -> None:
    offsets, _ = plan_arena([Lifetime(256, 0, 3), Lifetime(256, 3, 5)])
    assert offsets[0] != offsets[1]
