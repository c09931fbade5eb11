"""The fixtures can tell: each live tensor, and each rule that a port may get wrong, moves lerobot's own velocities."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lerobot", reason="lerobot is only in the environment of `make oracle-venv`")

import torch
from oracle_policy import TOP, WRIST, load_pipelines, load_policy, observe

from tests.oracle.mutants import MUTANTS

fixtures = importlib.import_module("make_fixtures")

FIXTURES = Path(__file__).parents[1] / "fixtures"
TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
BAR = 1e-4  # what a widened run may differ from the fixture, end to end
FAMILIES = {family.name: family for family in fixtures.FAMILIES}


class Pick:
    """The first case, sampled once; `change()` tells how far the velocities are from that now."""

    def __init__(self, name: str) -> None:
        self.family = FAMILIES[name]
        case, checkpoint = self.family.cases[0], FIXTURES / f"{name}_lerobot/checkpoint"
        with self.family.small(checkpoint / "tokenizer.json"):
            self.policy = load_policy(self.family, checkpoint)
            raw = observe(self.family, case)
            self.batch = fixtures.prepare(load_pipelines(self.family, checkpoint)[0], case, raw)
        self.recorder = fixtures.Recorder(self.policy)
        self.recorder.sample(self.batch, raw["noise"])
        self.steps = self.recorder.steps[::3]
        self.wanted = torch.cat([velocity for _, _, velocity in self.steps]).numpy()

    def change(self, **batch: object) -> float:
        found = self.recorder.replay(self.steps, self.batch | batch)
        return max(fixtures.relative_error(found, self.wanted))


PICKS: dict[str, Pick] = {}


def pick_of(name: str) -> Pick:
    torch.set_num_threads(1)
    return PICKS[name] if name in PICKS else PICKS.setdefault(name, Pick(name))


@pytest.fixture(params=FAMILIES)
def pick(request: pytest.FixtureRequest) -> Iterator[Pick]:
    yield pick_of(request.param)


def test_each_live_tensor_moves_the_velocity_and_no_dead_one_does(pick):
    for name, parameter in pick.policy.named_parameters():
        kept = parameter.data.clone()
        parameter.data.zero_()
        change = pick.change()
        parameter.data.copy_(kept)
        if any(part in name for part in pick.family.dead):
            assert change == 0, name
        elif name.endswith("k_proj.bias"):
            assert change < 1e-5, name  # softmax does not see what all keys share
        else:
            assert change > 10 * BAR, name
    assert pick.change() == 0


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in MUTANTS for name in MUTANTS[family]])
def test_mutant_moves_the_velocity(family, name):
    pick = pick_of(family)
    with MUTANTS[family][name](pick.policy):
        assert pick.change() > 3 * BAR
    assert pick.change() == 0


@pytest.mark.parametrize("shift", (-1, 1))
def test_prompt_off_by_one_token_moves_the_velocity(pick, shift):
    """One less is also the prompt without its newline."""
    tokens, valid = pick.batch[TOKENS], int(pick.batch[MASK].sum())
    padded = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
    assert pick.change(**{TOKENS: padded, MASK: torch.arange(padded.shape[1])[None] < valid + shift}) > 3 * BAR


def test_side_and_number_of_masked_tokens_do_not_move_the_velocity(pick):
    tokens = pick.batch[TOKENS][pick.batch[MASK]]
    for left, right in ((0, 0), (3, 0), (0, 5)):
        padded = torch.cat([tokens.new_zeros(left), tokens, tokens.new_zeros(right)])[None]
        position = torch.arange(padded.shape[1])[None]
        mask = (position >= left) & (position < left + len(tokens))
        assert pick.change(**{TOKENS: padded, MASK: mask}) < 1e-5


def test_swapped_cameras_move_the_velocity(pick):
    assert pick.change(**{TOP: pick.batch[WRIST], WRIST: pick.batch[TOP]}) > 3 * BAR


def test_state_moves_the_velocity(pick):
    """As numbers; where the state is written into the prompt, the model takes none."""
    change = pick.change(**{"observation.state": pick.batch["observation.state"] + 0.01})
    assert change == 0 if pick.family.name == "pi05" else change > 3 * BAR
