"""The fixture can tell: each live tensor, and each rule that a port may get wrong, moves lerobot's own velocities."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("lerobot", reason="lerobot is only in the environment of `make oracle-venv`")

import torch
from torch.nn import functional as F

fixtures = importlib.import_module("make_fixtures")
policy_of = importlib.import_module("oracle_policy")
pi_gemma = importlib.import_module("lerobot.policies.pi_gemma")
gemma = importlib.import_module("transformers.models.gemma.modeling_gemma")

CHECKPOINT = Path(__file__).parents[1] / "fixtures/pi05_lerobot/checkpoint"
MASK = "observation.language.attention_mask"
LAST = "language_model.layers.2."  # only keys and values of the last prefix layer are read
DEAD = (
    LAST + "mlp",
    LAST + "post_attention",
    LAST + "self_attn.q",
    LAST + "self_attn.o",
    "language_model.norm",
    "lm_head",
)
BAR = 1e-4  # what a widened run may differ from the fixture, end to end


class Pick:
    """The first case, sampled once; `change()` tells how far the velocities are from that now."""

    def __init__(self) -> None:
        case = fixtures.CASES[0]
        with policy_of.small_sizes(self.pieces()), policy_of.local_tokenizer(CHECKPOINT / "tokenizer.json"):
            self.policy = policy_of.load_policy(CHECKPOINT)
            raw = fixtures.observe(case)
            self.batch = fixtures.prepare(policy_of.load_pipelines(CHECKPOINT)[0], case, raw)
        self.recorder = fixtures.Recorder(self.policy)
        self.recorder.sample(self.batch, raw["noise"])
        self.steps = self.recorder.steps[::3]
        self.wanted = torch.cat([velocity for _, _, velocity in self.steps]).numpy()

    @staticmethod
    def pieces() -> int:
        return (
            importlib.import_module("tokenizers")
            .Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
            .get_vocab_size()
        )

    def change(self, **batch: object) -> float:
        found = self.recorder.replay(self.steps, self.batch | batch)
        return max(fixtures.relative_error(found, self.wanted))


@pytest.fixture(scope="module")
def pick() -> Pick:
    torch.set_num_threads(1)
    return Pick()


def test_each_live_tensor_moves_the_velocity_and_no_dead_one_does(pick):
    for name, parameter in pick.policy.named_parameters():
        kept = parameter.data.clone()
        parameter.data.zero_()
        change = pick.change()
        parameter.data.copy_(kept)
        if any(part in name for part in DEAD):
            assert change == 0, name
        elif name.endswith("k_proj.bias"):
            assert change < 1e-5, name  # softmax does not see what all keys share
        else:
            assert change > 10 * BAR, name
    assert pick.change() == 0


@contextlib.contextmanager
def eps(kind: type, value: float, part: str, policy: torch.nn.Module) -> Iterator[None]:
    modules = [module for name, module in policy.named_modules() if isinstance(module, kind) and part in name]
    assert modules
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "eps", value))
        yield


def one_silu() -> mock._patch:
    calls, silu = iter(range(10**6)), F.silu
    return mock.patch.object(F, "silu", lambda x: x if next(calls) % 2 else silu(x))


def cosine_first() -> mock._patch:
    embed = policy_of.modeling.create_sinusoidal_pos_embedding

    def swapped(*args: object, **options: object) -> torch.Tensor:
        sine, cosine = embed(*args, **options).chunk(2, dim=-1)
        return torch.cat([cosine, sine], dim=-1)

    return mock.patch.object(policy_of.modeling, "create_sinusoidal_pos_embedding", swapped)


def interleaved_rope() -> mock._patch:
    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = (table[:, None, :, : x.shape[-1] // 2] for table in (cos, sin))
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: object):
        return turn(q, cos, sin), turn(k, cos, sin)

    return mock.patch.object(gemma, "apply_rotary_pos_emb", apply)


def norm_without_one() -> mock._patch:
    forward = pi_gemma.PiGemmaRMSNorm.forward

    def forward_without(self: torch.nn.Module, x: torch.Tensor, cond: torch.Tensor | None = None):
        if cond is not None:
            return forward(self, x, cond)
        return self._norm(x) * self.weight, None

    return mock.patch.object(pi_gemma.PiGemmaRMSNorm, "forward", forward_without)


def no_gate() -> mock._patch:
    return mock.patch.object(pi_gemma, "_gated_residual", lambda x, y, gate: x + y)


def antialiased_resize() -> mock._patch:
    resize = F.interpolate
    return mock.patch.object(F, "interpolate", lambda x, **options: resize(x, antialias=True, **options))


MUTANTS: dict[str, Callable[[torch.nn.Module], contextlib.AbstractContextManager]] = {
    "eps of the prefix norms": lambda policy: eps(pi_gemma.PiGemmaRMSNorm, 1e-5, "language_model", policy),
    "eps of the expert norms": lambda policy: eps(pi_gemma.PiGemmaRMSNorm, 1e-5, "gemma_expert", policy),
    "eps of the layer norms": lambda policy: eps(torch.nn.LayerNorm, 1e-5, "vision_tower", policy),
    "second silu left out": lambda policy: one_silu(),
    "cosine before sine": lambda policy: cosine_first(),
    "rope over neighbours": lambda policy: interleaved_rope(),
    "norm weight without its one": lambda policy: norm_without_one(),
    "gate left out": lambda policy: no_gate(),
    "resize with antialias": lambda policy: antialiased_resize(),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_moves_the_velocity(pick, name):
    with MUTANTS[name](pick.policy):
        assert pick.change() > 3 * BAR


@pytest.mark.parametrize("shift", (-1, 1))
def test_mask_off_by_one_moves_the_velocity(pick, shift):
    valid = int(pick.batch[MASK].sum())
    assert pick.change(**{MASK: torch.arange(pick.batch[MASK].shape[1])[None] < valid + shift}) > 3 * BAR


def test_swapped_cameras_move_the_velocity(pick):
    top, wrist = fixtures.TOP, fixtures.WRIST
    assert pick.change(**{top: pick.batch[wrist], wrist: pick.batch[top]}) > 3 * BAR
