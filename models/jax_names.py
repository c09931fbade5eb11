"""Where each tensor of openpi's torch files lies in openpi's JAX tree, and how its axes are arranged there.

One row is one tensor (per layer). `axes` has a letter per axis of the leaf. A digit is the entry that the tensor takes
of that axis; a letter that `result` lacks counts the layers, `#` in the tensor's name. `result` lists the tensor's
axes, each a group of letters: "nh d" is [heads * head_dim, width]. A letter means one extent in the whole tree. Index,
transpose and reshape follow from the letters. Pi0 and Pi0.5 share the table; their trees differ in norms and heads.

Source: openpi's JAX model (Gemma, SigLIP and LoRA modules) and its torch model, June 2026.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TOWER = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
PREFIX = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
LLM = "PaliGemma.llm.layers"
PLAIN, ADAPTIVE = "plain", "adaptive"  # the expert's norms: Pi0, Pi0.5


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor and its leaf. `norms` names the kind of model that has it, "" where both do."""

    leaf: str
    axes: str
    name: str
    result: str
    norms: str = ""

    @property
    def layers(self) -> bool:
        """Is the first axis the layers?"""
        return not self.axes[0].isdigit() and self.axes[0] not in self.result

    @property
    def picks(self) -> dict[int, int]:
        """Axis of the leaf -> entry that is taken of it."""
        return {axis: int(letter) for axis, letter in enumerate(self.axes) if letter.isdigit()}

    @property
    def order(self) -> tuple[int, ...]:
        """Permutation from the axes that `entry` leaves to the letters of `result`."""
        left = [letter for letter in self.axes if letter in self.result]
        return tuple(left.index(letter) for letter in self.result if letter != " ")

    def entry(self, layer: int) -> tuple[int | slice, ...]:
        """Index of the tensor of one layer into the leaf, or into a factor beside it."""
        whole = slice(None)
        index = [self.picks.get(axis, whole) for axis in range(len(self.axes))]
        return (layer, *index[1:]) if self.layers else tuple(index)

    def shape(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape, from what each letter counts."""
        return tuple(math.prod(extents[letter] for letter in group) for group in self.result.split())


@dataclass(frozen=True, slots=True)
class Lora:
    """The two factors beside a leaf, whose product is added to it.

    weight, a, b   letters of the axes of the leaf and of both factors; the sum runs over the last axis of a
    alone          letters of b that are summed before a meets it
    rank           of openpi's published configurations
    scaled         the product is scaled by alpha / rank, which is 1 at that rank; else added as it is
    """

    leaf: str
    a_leaf: str
    b_leaf: str
    weight: str
    a: str
    b: str
    alone: str
    rank: int
    scaled: bool


def _vision() -> Iterable[Row]:
    """SigLIP: v layers, w width, a heads of e, m in the MLP; patches of y by x pixels of c channels, p positions."""
    img, block, out = "PaliGemma.img", "PaliGemma.img.Transformer.encoderblock", f"{TOWER}.encoder.layers.#"
    yield Row(f"{img}.embedding.kernel", "yxcw", f"{TOWER}.embeddings.patch_embedding.weight", "w c y x")
    yield Row(f"{img}.embedding.bias", "w", f"{TOWER}.embeddings.patch_embedding.bias", "w")
    yield Row(f"{img}.pos_embedding", "0pw", f"{TOWER}.embeddings.position_embedding.weight", "p w")
    for i in (0, 1):
        yield Row(f"{block}.LayerNorm_{i}.scale", "vw", f"{out}.layer_norm{i + 1}.weight", "w")
        yield Row(f"{block}.LayerNorm_{i}.bias", "vw", f"{out}.layer_norm{i + 1}.bias", "w")
    yield Row(f"{block}.MlpBlock_0.Dense_0.kernel", "vwm", f"{out}.mlp.fc1.weight", "m w")
    yield Row(f"{block}.MlpBlock_0.Dense_0.bias", "vm", f"{out}.mlp.fc1.bias", "m")
    yield Row(f"{block}.MlpBlock_0.Dense_1.kernel", "vmw", f"{out}.mlp.fc2.weight", "w m")
    yield Row(f"{block}.MlpBlock_0.Dense_1.bias", "vw", f"{out}.mlp.fc2.bias", "w")
    attention = f"{block}.MultiHeadDotProductAttention_0"
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        yield Row(f"{attention}.{ours}.kernel", "vwae", f"{out}.self_attn.{theirs}_proj.weight", "ae w")
        yield Row(f"{attention}.{ours}.bias", "vae", f"{out}.self_attn.{theirs}_proj.bias", "ae")
    yield Row(f"{attention}.out.kernel", "vaew", f"{out}.self_attn.out_proj.weight", "w ae")
    yield Row(f"{attention}.out.bias", "vw", f"{out}.self_attn.out_proj.bias", "w")
    yield Row(f"{img}.Transformer.encoder_norm.scale", "w", f"{TOWER}.post_layernorm.weight", "w")
    yield Row(f"{img}.Transformer.encoder_norm.bias", "w", f"{TOWER}.post_layernorm.bias", "w")
    yield Row(f"{img}.head.kernel", "wd", f"{PROJECTOR}.weight", "d w")
    yield Row(f"{img}.head.bias", "d", f"{PROJECTOR}.bias", "d")


def _layers(suffix: str, model: str, d: str, f: str) -> Iterable[Row]:
    """Gemma: l layers, n query heads and k key heads of h, width d, f in the MLP. The expert's leaves end in _1."""
    attn, mlp, out = f"{LLM}.attn", f"{LLM}.mlp{suffix}", f"{model}.layers.#"
    yield Row(f"{attn}.q_einsum{suffix}.w", f"ln{d}h", f"{out}.self_attn.q_proj.weight", f"nh {d}")
    yield Row(f"{attn}.kv_einsum{suffix}.w", f"l0k{d}h", f"{out}.self_attn.k_proj.weight", f"kh {d}")
    yield Row(f"{attn}.kv_einsum{suffix}.w", f"l1k{d}h", f"{out}.self_attn.v_proj.weight", f"kh {d}")
    yield Row(f"{attn}.attn_vec_einsum{suffix}.w", f"lnh{d}", f"{out}.self_attn.o_proj.weight", f"{d} nh")
    yield Row(f"{mlp}.gating_einsum", f"l0{d}{f}", f"{out}.mlp.gate_proj.weight", f"{f} {d}")
    yield Row(f"{mlp}.gating_einsum", f"l1{d}{f}", f"{out}.mlp.up_proj.weight", f"{f} {d}")
    yield Row(f"{mlp}.linear", f"l{f}{d}", f"{out}.mlp.down_proj.weight", f"{d} {f}")


def _norms() -> Iterable[Row]:
    """RMS norms with a weight; in Pi0.5's expert a dense layer from the condition to z = scale, shift and gate."""
    names = (("pre_attention_norm", "input_layernorm"), ("pre_ffw_norm", "post_attention_layernorm"))
    for ours, theirs in names:
        yield Row(f"{LLM}.{ours}.scale", "ld", f"{PREFIX}.layers.#.{theirs}.weight", "d")
        yield Row(f"{LLM}.{ours}_1.scale", "lD", f"{EXPERT}.layers.#.{theirs}.weight", "D", PLAIN)
        dense = f"{EXPERT}.layers.#.{theirs}.dense"
        yield Row(f"{LLM}.{ours}_1.Dense_0.kernel", "lDz", f"{dense}.weight", "z D", ADAPTIVE)
        yield Row(f"{LLM}.{ours}_1.Dense_0.bias", "lz", f"{dense}.bias", "z", ADAPTIVE)
    final = "PaliGemma.llm.final_norm"
    yield Row(f"{final}.scale", "d", f"{PREFIX}.norm.weight", "d")
    yield Row(f"{final}_1.scale", "D", f"{EXPERT}.norm.weight", "D", PLAIN)
    yield Row(f"{final}_1.Dense_0.kernel", "Dz", f"{EXPERT}.norm.dense.weight", "z D", ADAPTIVE)
    yield Row(f"{final}_1.Dense_0.bias", "z", f"{EXPERT}.norm.dense.bias", "z", ADAPTIVE)


def _heads() -> Iterable[Row]:
    """Dense layers beside the transformers: A is the width of an action, s that of a state, i action and time."""
    dense = (
        ("state_proj", "s", "D", PLAIN),
        ("action_time_mlp_in", "i", "D", PLAIN),
        ("action_time_mlp_out", "D", "D", PLAIN),
        ("time_mlp_in", "D", "D", ADAPTIVE),
        ("time_mlp_out", "D", "D", ADAPTIVE),
        ("action_in_proj", "A", "D", ""),
        ("action_out_proj", "D", "A", ""),
    )
    for name, source, result, norms in dense:
        source = source if source != result else "o"  # a square one: two letters of one extent
        yield Row(f"{name}.kernel", source + result, f"{name}.weight", f"{result} {source}", norms)
        yield Row(f"{name}.bias", result, f"{name}.bias", result, norms)


def _loras(suffix: str, d: str, f: str, ranks: str, rank: int) -> Iterable[Lora]:
    """`ranks` are the letters of the attention's rank and the MLP's; t counts both halves of a leaf.

    openpi's einsum of attn_vec_einsum sums a over the heads and b over the heads, each on its own.
    """
    r, g = ranks[0], ranks[1]
    for name, weight, a, b, alone in (
        ("q_einsum", f"ln{d}h", f"ln{d}{r}", f"ln{r}h", ""),
        ("kv_einsum", f"ltk{d}h", f"ltk{d}{r}", f"ltk{r}h", ""),
        ("attn_vec_einsum", f"lnh{d}", f"lnh{r}", f"ln{r}{d}", "n"),
    ):
        stem = f"{LLM}.attn.{name}{suffix}"
        yield Lora(f"{stem}.w", f"{stem}.lora_a", f"{stem}.lora_b", weight, a, b, alone, rank, True)
    for name, weight, a, b in (
        ("gating_einsum", f"lt{d}{f}", f"lt{d}{g}", f"lt{g}{f}"),
        ("linear", f"l{f}{d}", f"l{f}{g}", f"l{g}{d}"),
    ):
        leaf = f"{LLM}.mlp{suffix}.{name}"
        yield Lora(leaf, f"{leaf}_lora_a", f"{leaf}_lora_b", weight, a, b, "", rank, False)


ROWS: tuple[Row, ...] = (
    *_vision(),
    Row("PaliGemma.llm.embedder.input_embedding", "qd", f"{PREFIX}.embed_tokens.weight", "q d"),
    *_layers("", PREFIX, "d", "f"),
    *_layers("_1", EXPERT, "D", "F"),
    *_norms(),
    *_heads(),
)
LORAS: tuple[Lora, ...] = (*_loras("", "d", "f", "rg", 16), *_loras("_1", "D", "F", "RG", 32))


def norms_of(leaves: Iterable[str]) -> str:
    """Which kind of norms the expert of a tree has."""
    return ADAPTIVE if any(leaf.endswith(".Dense_0.kernel") and "norm_1." in leaf for leaf in leaves) else PLAIN
