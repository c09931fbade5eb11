"""Classic mistakes of each model, made in the IR and taken through all passes: each fails a bar that the right keep.

A mistake counts as seen only well above the bar, so that no bar is loosened into missing it. That the eager model's
mutants are seen, too, is tested in tests/models.
"""

from __future__ import annotations

import pytest

from frtc.lowering.ir import Module
from frtc.passes.canonicalize import canonicalize
from frtc.passes.check import relative_error
from tests.truth.ir_mutants import MUTANTS
from tests.truth.test_truth import LOOP_BAR, STEP_BAR
from tests.truth.traced import Subject, ask, optimised, subject

CLEARLY = 2  # times the bar
SUBJECTS = ("pi05.golden", "pi05.pick", "pi0.golden", "pi0.pick")
CASES = [(name, mutant) for name in SUBJECTS for mutant in MUTANTS[name.partition(".")[0]]]
# One wrong key of some hundred, or one wrong eps, shows in a single velocity; a missing step only at the end.
BY_LOOP = frozenset({"step_count"})


def errors(one: Subject, module: Module) -> tuple[float, float]:
    """(worst velocity, actions - noise) against the foreign answers, widened, after all passes."""
    found = ask(one, optimised(module, "hopper"), "wide")
    worst = max(relative_error(v, w) for v, w in zip(found.velocity, one.velocity, strict=False))
    return worst, relative_error(found.actions - one.x[0], one.actions - one.x[0])


@pytest.mark.parametrize(("name", "mutant"), CASES)
def test_mutant_fails(name: str, mutant: str) -> None:
    one = subject(name, "f32")
    right = canonicalize(one.module)
    wrong = MUTANTS[name.partition(".")[0]][mutant](right)
    assert wrong != right, "the mutation found nothing to change"
    velocity, loop = errors(one, wrong)
    if mutant in BY_LOOP:
        assert loop > CLEARLY * LOOP_BAR
    else:
        assert velocity > CLEARLY * STEP_BAR


@pytest.mark.parametrize("name", SUBJECTS)
def test_canonical_module_keeps_the_bars(name: str) -> None:
    one = subject(name, "f32")
    velocity, loop = errors(one, canonicalize(one.module))
    assert velocity <= STEP_BAR and loop <= LOOP_BAR
