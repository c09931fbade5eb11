"""The weight map: exact, strict both ways, and helpful when a checkpoint is not what it should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from frtc.errors import FrtcError
from frtc.models import detect, pi, pi05
from frtc.models.checkpoint import Checkpoint, TensorInfo
from frtc.models.synthetic import LAYOUTS, tensors
from frtc.models.weights import _pattern

HERE = Path(__file__).parent
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
TABLE = f"{pi.PREFIX}.embed_tokens.weight"
QUERY = f"{pi.PREFIX}.layers.1.self_attn.q_proj.weight"


def headers(layout: str = "openpi") -> dict[str, TensorInfo]:
    """The tensors of a tiny checkpoint, without bytes."""
    drawn = tensors(pi05.tiny(), layout, "bf16")
    return {t.name: TensorInfo(t.name, t.dtype, t.shape, Path("model.safetensors"), 0, 0) for t in drawn}


def resolve(infos: dict[str, TensorInfo]) -> dict[str, str]:
    named = {name: replace(info, name=name) for name, info in infos.items()}
    checkpoint = Checkpoint(HERE, (), named)
    model = detect(checkpoint)
    config, _ = model.config(checkpoint, {})
    return model.weights(checkpoint, config)


def refusal(infos: dict[str, TensorInfo]) -> FrtcError:
    with pytest.raises(FrtcError) as e:
        resolve(infos)
    return e.value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_size_is_the_real_layout(layout: str) -> None:
    """Names and shapes of the generated full-size file are those read from the reference classes (*.keys.json)."""
    real: dict[str, tuple[int, ...]] = {}
    for entry in json.loads((HERE / f"pi05.{layout}.keys.json").read_text())["keys"]:
        if entry.get("in_file", True):
            for i in range(entry.get("n", 1)):
                real[entry["key"].replace("{i}", str(i))] = tuple(entry["shape"])
    ours = {t.name: t.shape for t in tensors(pi05.full(), layout, "bf16")}
    assert ours == real
    assert len(ours) == {"openpi": 812, "lerobot": 813}[layout]


def test_map_is_one_to_one() -> None:
    parameters = [t.stream for t in tensors(pi05.tiny(), "lerobot", "bf16")[:-3]]
    files = [pi05.WEIGHTS.file_name(p) for p in parameters]
    assert len(set(files)) == len(parameters)
    assert [pi05.WEIGHTS.parameter(f) for f in files] == parameters
    for file in files:
        assert sum(bool(_pattern(row).fullmatch(file)) for row, _ in pi05.WEIGHTS.names) == 1


def test_both_layouts_fill_the_same_parameters() -> None:
    openpi, lerobot = resolve(headers("openpi")), resolve(headers("lerobot"))
    assert list(openpi) == list(lerobot)
    assert openpi["prefix.embed.weight"] == HEAD
    assert lerobot["prefix.embed.weight"] == f"model.{TABLE}"
    different = {p for p in openpi if lerobot[p] != f"model.{openpi[p]}"}
    assert different == {"prefix.embed.weight"}


def test_prefix_is_optional() -> None:
    bare = {name.removeprefix("model."): info for name, info in headers("lerobot").items()}
    assert resolve(bare)["prefix.embed.weight"] == TABLE


def test_spellings_before_september_2025() -> None:
    old = {}
    for name, info in headers("openpi").items():
        for then, now in pi05.WEIGHTS.renames[:4]:
            if name.startswith(now):
                name = then + name[len(now) :]
        old[name] = info
    assert "paligemma_with_expert.paligemma.language_model.model.layers.1.self_attn.q_proj.weight" in old
    assert "paligemma_with_expert.paligemma.language_model.lm_head.weight" in old
    assert "paligemma_with_expert.paligemma.multi_modal_projector.linear.weight" in old
    assert "paligemma_with_expert.paligemma.vision_tower.vision_model.post_layernorm.bias" in old
    assert resolve(old).keys() == resolve(headers("openpi")).keys()


def test_either_name_of_the_table() -> None:
    infos = headers("openpi")
    only_table = {TABLE if name == HEAD else name: info for name, info in infos.items()}
    assert resolve(only_table)["prefix.embed.weight"] == TABLE
    assert resolve(infos | {TABLE: infos[HEAD]})["prefix.embed.weight"] == TABLE


def test_dead_tensors_may_be_absent() -> None:
    infos = headers("openpi")
    for name in pi05.WEIGHTS.unused:
        del infos[name]
    assert resolve(infos)


def test_missing_tensor() -> None:
    infos = headers()
    infos[QUERY + "_scale"] = infos.pop(QUERY)
    error = refusal(infos)
    assert error.code == "weights.missing"
    assert error.what == "1 of 110 tensors of pi05 are not in the checkpoint"
    rows = dict(error.rows)
    assert rows[QUERY] == "wants [128,128]"
    assert rows["nearest"] == QUERY + "_scale"
    assert "(112 tensors)" in rows["checkpoint"]


def test_missing_layer() -> None:
    """A whole layer of one stack: the other stack tells how many there must be."""
    error = refusal({name: info for name, info in headers().items() if f"{pi.EXPERT}.layers.2." not in name})
    assert error.code == "weights.missing"
    assert error.what.startswith("11 of 110 tensors")
    assert [label for label, _ in error.rows][6:] == ["…", "checkpoint", "nearest"]
    assert dict(error.rows)["…"] == "and 5 more"


@pytest.mark.parametrize("name", [TABLE, f"{pi.PREFIX}.layers.0.self_attn.k_proj.weight", "action_in_proj.weight"])
def test_missing_tensor_that_gives_sizes(name: str) -> None:
    infos = headers("lerobot")
    del infos[f"model.{name}"]
    infos.pop(f"model.{HEAD}")
    error = refusal(infos)
    assert error.code == "weights.missing"
    assert (HEAD if name == TABLE else name) in error.what


def test_missing_both_names_of_the_table() -> None:
    infos = headers("openpi")
    del infos[HEAD]
    error = refusal(infos)
    assert (error.code, HEAD in error.what) == ("weights.missing", True)


def test_unexpected_tensor() -> None:
    name = f"{pi.PREFIX}.layers.1.self_attn.q_norm.weight"
    infos = headers()
    error = refusal(infos | {name: infos[QUERY]})
    assert error.code == "weights.unexpected"
    assert dict(error.rows)[name] == "bf16[128,128]"
    assert dict(error.rows)["nearest"].startswith(f"{pi.PREFIX}.layers.1.")


@pytest.mark.parametrize("extra", ["state_proj.weight", f"{pi.EXPERT}.layers.0.input_layernorm.weight", "new.weight"])
def test_no_tensor_is_dropped_silently(extra: str) -> None:
    infos = headers()
    error = refusal(infos | {extra: infos[QUERY]})
    assert (error.code, error.rows[0][0]) == ("weights.unexpected", extra)


@pytest.mark.parametrize("name", ["model.proprio_history_proj", "proprio_history_proj.weight"])
def test_refused_feature(name: str) -> None:
    infos = headers("lerobot")
    error = refusal(infos | {name: infos[f"model.{QUERY}"]})
    assert error.code == "weights.refused"
    assert "memory variant" in error.what


def test_one_parameter_filled_twice() -> None:
    infos = headers("openpi")
    old = "paligemma_with_expert.paligemma.language_model.model.layers.1.self_attn.q_proj.weight"
    error = refusal(infos | {old: infos[QUERY]})
    assert error.code == "weights.duplicate"
    assert {text for _, text in error.rows} == {old, QUERY}


@pytest.mark.parametrize("name", [QUERY, f"{pi.VISION}.embeddings.position_embedding.weight", "time_mlp_in.bias"])
def test_wrong_shape(name: str) -> None:
    infos = headers()
    shape = (*infos[name].shape[:-1], infos[name].shape[-1] + 8)
    error = refusal(infos | {name: replace(infos[name], shape=shape)})
    assert error.code == "weights.shape"
    assert f"is [{','.join(map(str, shape))}]" in dict(error.rows)[name]


@pytest.mark.parametrize("shape", [(), (4,), (0, 128), (32, 128, 1)])
def test_shape_from_which_no_size_follows(shape: tuple[int, ...]) -> None:
    name = f"{pi.PREFIX}.layers.0.self_attn.k_proj.weight"
    infos = headers()
    error = refusal(infos | {name: replace(infos[name], shape=shape)})
    assert (error.code, name in error.what) == ("weights.shape", True)


def test_vision_width_is_a_multiple_of_the_head() -> None:
    name = f"{pi.VISION}.embeddings.patch_embedding.weight"
    infos = headers()
    error = refusal(infos | {name: replace(infos[name], shape=(140, 3, 14, 14))})
    assert (error.code, "140" in error.what) == ("weights.shape", True)


@pytest.mark.parametrize("dtype", ["e4m3", "i8", "i64"])
def test_quantised_tensor(dtype: str) -> None:
    infos = headers()
    error = refusal(infos | {QUERY: replace(infos[QUERY], dtype=dtype)})
    assert error.code == "weights.dtype"
    assert dict(error.rows)[QUERY] == f"is {dtype}[128,128]"


def test_sizes_follow_from_shapes() -> None:
    checkpoint = Checkpoint(HERE, (), headers())
    config, _ = pi05.config(checkpoint, {"views": 2, "prompt": 96, "horizon": 10})
    assert config == pi05.tiny()
