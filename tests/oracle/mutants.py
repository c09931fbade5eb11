"""Rules that a port may get wrong, as changes to lerobot's own code: context managers, given the sampled policy."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from unittest import mock

import torch
from torch.nn import functional as F

pi_gemma = importlib.import_module("lerobot.policies.pi_gemma")
gemma = importlib.import_module("transformers.models.gemma.modeling_gemma")
llama = importlib.import_module("transformers.models.llama.modeling_llama")
smolvlm = importlib.import_module("transformers.models.smolvlm.modeling_smolvlm")
with_expert = importlib.import_module("lerobot.policies.smolvla.smolvlm_with_expert")

Mutant = Callable[[torch.nn.Module], AbstractContextManager[object]]


def module_of(policy: torch.nn.Module) -> ModuleType:
    return importlib.import_module(type(policy).__module__)


def eps(kind: type, value: float, part: str) -> Mutant:
    @contextlib.contextmanager
    def change(policy: torch.nn.Module) -> Iterator[None]:
        field = "variance_epsilon" if kind is llama.LlamaRMSNorm else "eps"
        modules = [module for name, module in policy.named_modules() if isinstance(module, kind) and part in name]
        assert modules
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(mock.patch.object(module, field, value))
            yield

    return change


def one_silu(policy: torch.nn.Module) -> AbstractContextManager[object]:
    calls, silu = iter(range(10**6)), F.silu
    return mock.patch.object(F, "silu", lambda x: x if next(calls) % 2 else silu(x))


def cosine_first(policy: torch.nn.Module) -> AbstractContextManager[object]:
    module = module_of(policy)
    embed = module.create_sinusoidal_pos_embedding

    def swapped(*args: object, **options: object) -> torch.Tensor:
        sine, cosine = embed(*args, **options).chunk(2, dim=-1)
        return torch.cat([cosine, sine], dim=-1)

    return mock.patch.object(module, "create_sinusoidal_pos_embedding", swapped)


def interleaved_rope(policy: torch.nn.Module) -> AbstractContextManager[object]:
    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = (table[:, None, :, : x.shape[-1] // 2] for table in (cos, sin))
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: object):
        return turn(q, cos, sin), turn(k, cos, sin)

    return mock.patch.object(gemma, "apply_rotary_pos_emb", apply)


def rope_over_neighbours(policy: torch.nn.Module) -> AbstractContextManager[object]:
    rope = with_expert.apply_rope

    def apply(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return torch.stack(rope(halves, positions).chunk(2, dim=-1), dim=-1).flatten(-2)

    return mock.patch.object(with_expert, "apply_rope", apply)


def rope_of_the_text_model(policy: torch.nn.Module) -> AbstractContextManager[object]:
    rope = with_expert.apply_rope
    return mock.patch.object(with_expert, "apply_rope", lambda x, positions: rope(x, positions, 100_000))


def norm_without_one(policy: torch.nn.Module) -> AbstractContextManager[object]:
    forward = pi_gemma.PiGemmaRMSNorm.forward

    def forward_without(self: torch.nn.Module, x: torch.Tensor, cond: torch.Tensor | None = None):
        if cond is not None:
            return forward(self, x, cond)
        return self._norm(x) * self.weight, None

    return mock.patch.object(pi_gemma.PiGemmaRMSNorm, "forward", forward_without)


def norm_with_one(policy: torch.nn.Module) -> AbstractContextManager[object]:
    forward = llama.LlamaRMSNorm.forward
    return mock.patch.object(llama.LlamaRMSNorm, "forward", lambda self, x: forward(self, x) * (1 + 1 / self.weight))


def no_gate(policy: torch.nn.Module) -> AbstractContextManager[object]:
    return mock.patch.object(pi_gemma, "_gated_residual", lambda x, y, gate: x + y)


def antialiased_resize(policy: torch.nn.Module) -> AbstractContextManager[object]:
    resize = F.interpolate
    return mock.patch.object(F, "interpolate", lambda x, **options: resize(x, antialias=True, **options))


def other_padding(policy: torch.nn.Module) -> AbstractContextManager[object]:
    """Borders on the other sides: right and bottom for left and top, or all on one side for half on each."""
    pad = F.pad

    def swapped(x: torch.Tensor, sides: tuple[int, ...], **options: object) -> torch.Tensor:
        if x.ndim == 4:
            left, right, top, bottom = sides
            halved = min(left, right) > 0 or min(top, bottom) > 0
            sides = (0, left + right, 0, top + bottom) if halved else (right, left, bottom, top)
        return pad(x, sides, **options)

    return mock.patch.object(F, "pad", swapped)


def suffix_opens(opens: Callable[[int], list[int]]) -> Mutant:
    """Which rows of the suffix open a block of attention: rows see all blocks up to their own."""

    def change(policy: torch.nn.Module) -> AbstractContextManager[object]:
        embed = policy.model.embed_suffix

        def embed_suffix(*args: object, **named: object) -> tuple[torch.Tensor, ...]:
            tokens, valid, blocks, *rest = embed(*args, **named)
            wanted = torch.tensor([opens(blocks.shape[1])], dtype=blocks.dtype)
            return tokens, valid, wanted, *rest

        return mock.patch.object(policy.model, "embed_suffix", embed_suffix)

    return change


def causal_shifted(by: int) -> Mutant:
    def change(policy: torch.nn.Module) -> AbstractContextManager[object]:
        module = module_of(policy)
        make = module.make_att_2d_masks

        def masks(valid: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
            seen = make(valid, blocks)
            if bool((blocks == 1).all()):  # the suffix: each row a block of its own
                rows = torch.arange(blocks.shape[1])
                seen = (rows[None, :] <= rows[:, None] + by)[None]
            return seen

        return mock.patch.object(module, "make_att_2d_masks", masks)

    return change


def halves(change_weight: Callable[[torch.Tensor], torch.Tensor]) -> Mutant:
    """Another weight for the MLP over [action half | time half]."""

    @contextlib.contextmanager
    def change(policy: torch.nn.Module) -> Iterator[None]:
        weight = policy.model.action_time_mlp_in.weight
        kept = weight.data.clone()
        weight.data.copy_(change_weight(kept))
        yield
        weight.data.copy_(kept)

    return change


def time_dropped(weight: torch.Tensor) -> torch.Tensor:
    actions, time = weight.chunk(2, dim=1)
    return torch.cat([actions, torch.zeros_like(time)], dim=1)


def time_first(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def shuffled_by_columns(policy: torch.nn.Module) -> AbstractContextManager[object]:
    """Pixel shuffle that walks columns where it should walk rows, inside each square."""
    shuffle = smolvlm.SmolVLMConnector.pixel_shuffle

    def other(self: torch.nn.Module, x: torch.Tensor, scale: int) -> torch.Tensor:
        y = shuffle(self, x, scale)
        squares = y.view(*y.shape[:-1], scale, scale, -1)
        return squares.transpose(-3, -2).reshape(y.shape)

    return mock.patch.object(smolvlm.SmolVLMConnector, "pixel_shuffle", other)


def rewritten(function: Callable[..., object], owner: type, line: str, instead: str) -> Mutant:
    """The same function with one expression exchanged."""

    def change(policy: torch.nn.Module) -> AbstractContextManager[object]:
        source = inspect.cleandoc("\n" + inspect.getsource(function))
        assert source.count(line) == 1, line
        names = dict(vars(importlib.import_module(owner.__module__)))
        exec(compile("from __future__ import annotations\n" + source.replace(line, instead), "mutant", "exec"), names)
        return mock.patch.object(owner, function.__name__, names[function.__name__])

    return change


CROSS = with_expert.SmolVLMWithExpertModel
FLOW = importlib.import_module("lerobot.policies.smolvla.modeling_smolvla").VLAFlowMatching
GEMMA_NORMS: dict[str, Mutant] = {
    "eps of the prefix norms": eps(pi_gemma.PiGemmaRMSNorm, 1e-5, "language_model"),
    "eps of the expert norms": eps(pi_gemma.PiGemmaRMSNorm, 1e-5, "gemma_expert"),
    "eps of the layer norms": eps(torch.nn.LayerNorm, 1e-5, "vision_tower"),
    "norm weight without its one": norm_without_one,
    "rope over neighbours": interleaved_rope,
    "cosine before sine": cosine_first,
    "resize with antialias": antialiased_resize,
    "borders on one side": other_padding,
}
ACTION_TIME: dict[str, Mutant] = {
    "time half dropped": halves(time_dropped),
    "time half first": halves(time_first),
}
MUTANTS: dict[str, dict[str, Mutant]] = {
    "pi05": GEMMA_NORMS | {"second silu left out": one_silu, "gate left out": no_gate},
    "pi0": GEMMA_NORMS
    | ACTION_TIME
    | {
        "state sees the actions": suffix_opens(lambda rows: [1] + [0] * (rows - 1)),
        "actions are causal": suffix_opens(lambda rows: [1] * rows),
    },
    "smolvla": ACTION_TIME
    | {
        "eps of the text norms": eps(llama.LlamaRMSNorm, 1e-6, "text_model"),
        "eps of the expert norms": eps(llama.LlamaRMSNorm, 1e-6, "lm_expert"),
        "eps of the layer norms": eps(torch.nn.LayerNorm, 1e-5, "vision_model"),
        "norm weight with a one": norm_with_one,
        "rope over neighbours": rope_over_neighbours,
        "rope of the text model": rope_of_the_text_model,
        "cosine before sine": cosine_first,
        "resize with antialias": antialiased_resize,
        "borders right and below": other_padding,
        "shuffle by columns": shuffled_by_columns,
        "actions see each other": suffix_opens(lambda rows: [1] + [0] * (rows - 1)),
        "causal mask off by one, early": causal_shifted(-1),
        "causal mask off by one, late": causal_shifted(1),
        "positions go on in cross attention": rewritten(
            CROSS.forward_cross_attn_layer, CROSS,
            "expert_position_id - torch.min(expert_position_id, dim=1, keepdim=True).values", "expert_position_id",
        ),
        "image tokens not scaled": rewritten(FLOW.embed_prefix, FLOW, "img_emb_dim**0.5", "1.0"),
        "text tokens not scaled": rewritten(FLOW.embed_prefix, FLOW, "lang_emb * math.sqrt(lang_emb_dim)", "lang_emb"),
        "prefix sees the state": rewritten(FLOW.embed_prefix, FLOW, "[1] * (states_seq_len)", "[0] * states_seq_len"),
    },
}  # fmt: skip
