"""LoRA adapters: merged as peft merges them, on the right tensors, or refused with the reason."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from frtc.errors import FrtcError
from frtc.models import lora
from frtc.models.checkpoint import NUMPY, SINGLE, Checkpoint, open_checkpoint, read_header
from frtc.models.lora import TENSORS, adapted, adapter_in, merge
from frtc.models.lora_config import CONFIG, read_config

FIXTURE = Path(__file__).parent.parent / "fixtures" / "peft_adapter"
RNG = np.random.default_rng(5)
OUT, IN, R = 24, 16, 3
Q, BACK, NORM = "layers.0.q_proj", "layers.0.o_proj", "norm"
BASE = {f"{Q}.weight": (OUT, IN), f"{BACK}.weight": (IN, OUT), f"{NORM}.weight": (IN,), f"{NORM}.bias": (IN,)}
CONFIGURED = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "target_modules": ["q_proj"]}


def file(path: Path, name: str = "") -> Checkpoint:
    path = path / name if name else path
    return Checkpoint(path, (path,), read_header(path))


def draw(shape: tuple[int, ...]) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def base(folder: Path) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: draw(shape) for name, shape in BASE.items()}, folder / SINGLE)
    return file(folder, SINGLE)


def factors(spelled: str = "base_model.model.", name: str = "") -> dict[str, np.ndarray]:
    dot = f".{name}" if name else ""
    pair = {"lora_A": draw((R, IN)), "lora_B": draw((OUT, R))}
    return {f"{spelled}{Q}.{part}{dot}.weight": value for part, value in pair.items()}


def adapter(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors() if tensors is None else tensors, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps(CONFIGURED | config))
    return folder


def product(tensors: dict[str, np.ndarray]) -> np.ndarray:
    a, b = (value.astype(np.float64) for value in tensors.values())
    result: np.ndarray = b @ a
    return result


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "patterns"])
def test_merged_as_peft_merges(name: str) -> None:
    """Files that peft saved; its own merge into a float64 base. Every tensor, changed or not."""
    found = adapted(file(FIXTURE / "base.safetensors"), FIXTURE / name, str)
    truth = file(FIXTURE / f"{name}.merged.safetensors")
    assert found.tensors.keys() == truth.tensors.keys()
    merged = {n for n, info in found.tensors.items() if info.dtype == "f64"}
    assert len(merged) == {"plain": 4, "patterns": 8}[name]
    for tensor, info in found.tensors.items():
        ours, theirs = found.read(tensor), truth.read(tensor)
        assert ours.dtype == NUMPY[info.dtype] and ours.shape == info.shape
        np.testing.assert_allclose(ours.astype(np.float64), theirs, rtol=1e-13, atol=1e-14, err_msg=tensor)
    changed = {n for n in merged if not np.array_equal(found.read(n), found.base.read(n).astype(np.float64))}
    assert changed == merged


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / 3),
        ({"use_rslora": True}, 6 / math.sqrt(3)),
        ({"alpha_pattern": {"q_proj": 9}}, 9 / 3),
        ({"alpha_pattern": {"proj": 9}}, 6 / 3),  # ends the name, but not behind a dot
        ({"r": 8, "rank_pattern": {r"layers\.\d+\.q_proj": 3}}, 6 / 3),
        ({"lora_alpha": 0.5, "init_lora_weights": "gaussian"}, 0.5 / 3),
    ],
)
def test_the_scale(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    plain, tensors = base(tmp_path / "base"), factors()
    found = adapted(plain, adapter(tmp_path / "adapter", tensors, **config), str)
    expected = plain.read(f"{Q}.weight").astype(np.float64) + scale * product(tensors)
    np.testing.assert_allclose(found.read(f"{Q}.weight"), expected, rtol=1e-13)
    assert found.read(f"{BACK}.weight") is not None and found.tensors[f"{BACK}.weight"].dtype == "f32"


def test_transposed_weights(tmp_path: Path) -> None:
    """fan_in_fan_out: the base stores [in, out]."""
    tensors = {
        f"base_model.model.{BACK}.lora_A.weight": draw((R, IN)),
        f"base_model.model.{BACK}.lora_B.weight": draw((OUT, R)),
    }
    folder = adapter(tmp_path / "a", tensors, target_modules=["o_proj"], fan_in_fan_out=True)
    plain = base(tmp_path / "base")
    expected = plain.read(f"{BACK}.weight") + 2 * product(tensors).T
    np.testing.assert_allclose(adapted(plain, folder, str).read(f"{BACK}.weight"), expected, rtol=1e-13)


def test_pieces_of_rows_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    w, a, b = draw((OUT, IN)).astype(ml_dtypes.bfloat16), draw((R, IN)), draw((OUT, R))
    whole = merge(w, a, b, 1.25)
    monkeypatch.setattr(lora, "SUMS", IN * 5)
    np.testing.assert_array_equal(merge(w, a, b, 1.25), whole)


def test_only_so_much_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently read goes first; one merged tensor always stays."""
    both = factors() | {k.replace("q_proj", "o_proj"): v for k, v in factors().items()}
    for name in (n for n in both if "o_proj" in n):
        both[name] = draw((R, OUT)) if "lora_A" in name else draw((IN, R))
    found = adapted(base(tmp_path), adapter(tmp_path / "a", both, target_modules=["q_proj", "o_proj"]), str)
    q = found.read(f"{Q}.weight")
    assert found.read(f"{Q}.weight") is q and not q.flags.writeable
    found.read(f"{BACK}.weight")
    assert found.read(f"{Q}.weight") is q
    monkeypatch.setattr(lora, "KEPT", q.nbytes)
    o = found.read(f"{BACK}.weight")
    again = adapted(found.base, tmp_path / "a", str)
    first = again.read(f"{Q}.weight")
    assert again.read(f"{BACK}.weight") is not first
    assert again.read(f"{Q}.weight") is not first
    np.testing.assert_array_equal(again.read(f"{BACK}.weight"), o)


# --- names and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", ["base_model.model.", "base_model.model.model.", "", "model."])
@pytest.mark.parametrize("name", ["", "default", "mine"])
def test_names(spelled: str, name: str, tmp_path: Path) -> None:
    """With peft's prefix and the writer's, or without; with the adapter's name in them, or without."""
    tensors = factors(spelled, name)
    found = adapted(base(tmp_path / "base"), adapter(tmp_path / "a", tensors), lambda n: n.removeprefix("model."))
    assert [n for n, info in found.tensors.items() if info.dtype == "f64"] == [f"{Q}.weight"]


@pytest.mark.parametrize("middle", ["", "modules_to_save.", "modules_to_save.default."])
def test_modules_that_are_saved_whole(middle: str, tmp_path: Path) -> None:
    whole = {f"base_model.model.{NORM}.{middle}{end}": draw((IN,)) for end in ("weight", "bias")}
    found = adapted(base(tmp_path), adapter(tmp_path / "a", factors() | whole, modules_to_save=["norm"]), str)
    for end, value in zip(("weight", "bias"), whole.values(), strict=True):
        np.testing.assert_array_equal(found.read(f"{NORM}.{end}"), value)
        assert found.tensors[f"{NORM}.{end}"].name == f"{NORM}.{end}"


def test_side_files_are_those_of_the_fine_tune(tmp_path: Path) -> None:
    """Statistics belong to the data that the adapter was trained on; where it has no files, the base's stay."""
    plain, bare, full = base(tmp_path / "base"), adapter(tmp_path / "bare"), adapter(tmp_path / "full")
    (full / "config.json").write_text('{"chunk_size": 7}')
    found = adapted(plain, bare, str)
    assert (found.folder, found.config) == (plain.folder, {})
    own = adapted(plain, full, str)
    assert (own.folder, own.config) == (full, {"chunk_size": 7})
    assert own.path == plain.path and own.files == (*plain.files, full / TENSORS)
    assert len({own.header(f) for f in own.files}) == 2
    assert [f.name for f in found.facts] == ["adapter", "adapter_base"]
    assert [f.name for f in own.facts] == ["adapter", "adapter_base", "side_files"]


def test_facts(tmp_path: Path) -> None:
    found = adapted(base(tmp_path), adapter(tmp_path / "a", base_model_name_or_path="somebody/base"), str)
    assert [f.value for f in found.facts] == ["1 tensors merged, rank 3, 0 replaced", "somebody/base"]


# --- refusals ---------------------------------------------------------------------------------------------------------

EMBEDDING = {
    "base_model.model.embed.lora_embedding_A": draw((R, 8)),
    "base_model.model.embed.lora_embedding_B": draw((8, R)),
}
MAGNITUDE = {f"base_model.model.{Q}.lora_magnitude_vector.weight": draw((OUT,))}
LONE = {f"base_model.model.{Q}.lora_A.weight": draw((R, IN))}
BIAS = {f"base_model.model.{Q}.lora_B.bias": draw((OUT,))}
CONV = {
    f"base_model.model.{Q}.lora_A.weight": draw((R, IN, 1, 1)),
    f"base_model.model.{Q}.lora_B.weight": draw((OUT, R, 1, 1)),
}
OTHER = {k.replace("layers.0", "layers.9"): v for k, v in factors().items()}
WIDE = {f"base_model.model.{Q}.lora_A.weight": draw((R, IN + 1)), f"base_model.model.{Q}.lora_B.weight": draw((OUT, R))}
STRAY = factors() | {f"base_model.model.{NORM}.weight": draw((IN,))}
SHORT = factors() | {f"base_model.model.{NORM}.weight": draw((IN - 1,))}

REFUSED: dict[str, tuple[dict[str, np.ndarray] | None, dict[str, Any], str, str]] = {
    "another kind": (None, {"peft_type": "IA3"}, "adapter.config", "peft_type"),
    "rank": (None, {"r": 4}, "adapter.rank", "has rank 3, the adapter's configuration says 4"),
    "rank by pattern": (None, {"rank_pattern": {"q_proj": 8}}, "adapter.rank", "says 8"),
    "no rank": (None, {"r": 0}, "adapter.config", "r of the adapter"),
    "rank as text": (None, {"r": "3"}, "adapter.config", "r of the adapter"),
    "alpha": (None, {"lora_alpha": None}, "adapter.config", "lora_alpha"),
    "negative alpha": (None, {"lora_alpha": -6}, "adapter.config", "lora_alpha"),
    "infinite alpha": (None, {"lora_alpha": math.inf}, "adapter.config", "lora_alpha"),
    "alpha beyond floats": (None, {"lora_alpha": 10**400}, "adapter.config", "lora_alpha"),
    "negative alpha by pattern": (None, {"alpha_pattern": {"q_proj": -1}}, "adapter.config", "alpha_pattern"),
    "pattern": (None, {"alpha_pattern": {"(": 1}}, "adapter.config", "alpha_pattern"),
    "DoRA by configuration": (None, {"use_dora": True}, "adapter.unsupported", "DoRA"),
    "DoRA by tensors": (factors() | MAGNITUDE, {}, "adapter.unsupported", "DoRA"),
    "biases": (None, {"bias": "lora_only"}, "adapter.unsupported", "biases"),
    "biases of factors": (factors() | BIAS, {}, "adapter.unsupported", "biases of LoRA factors"),
    "embeddings": (factors() | EMBEDDING, {}, "adapter.unsupported", "embedding"),
    "convolutions": (CONV, {}, "adapter.unsupported", "only matrices"),
    "a changed base": (None, {"init_lora_weights": "pissa_niter_4"}, "adapter.unsupported", "pissa"),
    "a later feature": (None, {"use_warp": {"speed": 9}}, "adapter.unsupported", "use_warp"),
    "replicated layers": (None, {"layer_replication": [[0, 2]]}, "adapter.unsupported", "layer_replication"),
    "another base by name": (OTHER, {}, "adapter.base", "layers.9.q_proj.weight, which the base does not have"),
    "another base by shape": (WIDE, {}, "adapter.base", "another shape"),
    "no target": (None, {"target_modules": ["k_proj"]}, "adapter.target", "is no target"),
    "no target by expression": (None, {"target_modules": r".*\.k_proj"}, "adapter.target", "is no target"),
    "half of a pair": (LONE, {}, "adapter.missing", "has no lora_B"),
    "cut off": (None, {"target_modules": ["q_proj", "o_proj"]}, "adapter.missing", "1 of 2 modules"),
    "two names": (factors() | factors(name="x"), {}, "adapter.two", "are lora_A"),
    "two adapters": (
        factors(name="x") | factors("base_model.model.z.", "y"), {}, "adapter.two", "holds 2 adapters"),
    "two spellings": (factors() | factors("base_model.model.model."), {}, "adapter.two", "two modules"),
    "a tensor without a place": (STRAY, {}, "adapter.tensor", "neither a LoRA factor nor a module to save"),
    "a saved module of another shape": (SHORT, {"modules_to_save": ["norm"]}, "adapter.base", "another shape"),
    "nothing": ({}, {}, "adapter.empty", "holds no factors"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    tensors, config, code, said = REFUSED[name]
    folder = adapter(tmp_path / "a", tensors, **config)
    with pytest.raises(FrtcError) as refused:
        adapted(base(tmp_path / "base"), folder, lambda n: n.removeprefix("model."))
    assert refused.value.code == code and said in str(refused.value)


def test_a_quantised_base(tmp_path: Path) -> None:
    save_file({f"{Q}.weight": np.zeros((OUT, IN), np.int8)}, tmp_path / SINGLE)
    with pytest.raises(FrtcError, match="whose weights are i8") as refused:
        adapted(file(tmp_path, SINGLE), adapter(tmp_path / "a"), str)
    assert refused.value.code == "adapter.base"


def test_nan_in_a_factor(tmp_path: Path) -> None:
    tensors = factors()
    next(iter(tensors.values()))[1, 2] = np.nan
    found = adapted(base(tmp_path), adapter(tmp_path / "a", tensors), str)
    with pytest.raises(FrtcError, match="holds NaN") as refused:
        found.read(f"{Q}.weight")
    assert refused.value.code == "checkpoint.nonfinite"


ENDLESS = (
    r"(.*)*",
    r"(.*)*x",
    r"(\w+\.?)+x",
    r"(?:a|aa){30}x",
    ".*" * 20 + "x",
    "a?" * 30 + "a" * 30,
    "(a|a)" * 25 + "x",
    "(a(b)c|ab(c))" * 25 + "x",
    r"(?x)(a*) *x",
    "a" * 2000,
    "a{99999999999999999999}",
)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_expressions_that_may_never_end(pattern: str, tmp_path: Path) -> None:
    for field, value in (("target_modules", pattern), ("rank_pattern", {pattern: 3}), ("alpha_pattern", {pattern: 3})):
        with pytest.raises(FrtcError) as refused:
            read_config(adapter(tmp_path / field, **{field: value}))
        assert refused.value.code == "adapter.config" and field in refused.value.what


@pytest.mark.parametrize(
    "pattern",
    [
        r"(model\.vlm_with_expert\.lm_expert\..*\.(q|v)_proj|model\.(state_proj|action_in_proj|action_time_mlp_out))",
        r"(.*\.gemma_expert\..*\.self_attn\.(q|v)_proj|model\.(state_proj|action_in_proj))",
        r"^(?!.*vision).*layers\.[0-9]+\.(?:self_attn|mlp)\.(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj)$",
    ],
)
def test_expressions_of_real_adapters(pattern: str, tmp_path: Path) -> None:
    assert read_config(adapter(tmp_path, target_modules=pattern)).targets == pattern


def test_the_slowest_expressions_end(tmp_path: Path) -> None:
    """A name that is longer than any model's is no target, so that its length cannot multiply the tries."""
    found = read_config(adapter(tmp_path, target_modules=".*a.*a.*ax"))
    assert not found.selects("a" * 128) and not found.selects("a" * 100_000)
    assert found.selects("aaax") and not found.selects("a" * 126 + "aax")


@pytest.mark.parametrize(("size", "alpha"), [(1.0, 1e300), (1e30, 6), (1e37, 1e300)])
def test_a_merge_beyond_what_weights_hold(size: float, alpha: float, tmp_path: Path) -> None:
    tensors = {name: np.abs(value) * np.float32(size) for name, value in factors().items()}
    found = adapted(base(tmp_path), adapter(tmp_path / "a", tensors, lora_alpha=alpha), str)
    with pytest.raises(FrtcError, match="not finite once the LoRA is merged") as refused:
        found.read(f"{Q}.weight")
    rows = dict(refused.value.rows)
    assert refused.value.code == "checkpoint.nonfinite"
    assert rows["adapter"] == str(tmp_path / "a") and rows["tensor"].startswith(f"{Q}.weight")
    assert rows["first at"].startswith("[0,0] = ")


def _only_config(folder: Path) -> None:
    (folder / TENSORS).unlink()


def _only_tensors(folder: Path) -> None:
    (folder / CONFIG).unlink()


def _pickle(folder: Path) -> None:
    (folder / TENSORS).rename(folder / "adapter_model.bin")


def _text(folder: Path) -> None:
    (folder / CONFIG).write_text("r: 3")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_only_config, "adapter.missing"),
        (_only_tensors, "adapter.missing"),
        (_pickle, "adapter.missing"),
        (_text, "checkpoint.json"),
    ],
)
def test_half_an_adapter(damage: Callable[[Path], None], code: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    damage(folder)
    assert adapter_in(folder)
    with pytest.raises(FrtcError) as refused:
        adapted(base(tmp_path / "base"), folder, str)
    assert refused.value.code == code


@pytest.mark.parametrize("name", ["", TENSORS])
def test_an_adapter_alone(name: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", base_model_name_or_path="somebody/base")
    with pytest.raises(FrtcError) as refused:
        open_checkpoint(folder / name if name else folder)
    assert refused.value.code == "adapter.alone"
    assert "somebody/base" in str(refused.value) and f"frtc compile BASE --adapter {folder}" in str(refused.value)


def test_two_adapters(tmp_path: Path) -> None:
    """One beside the base and one by option; the same folder given twice is one."""
    folder = adapter(tmp_path / "a")
    base(folder)
    assert lora.require_one(folder, None) == folder == lora.require_one(folder, folder)
    with pytest.raises(FrtcError) as refused:
        open_checkpoint(folder, adapter(tmp_path / "b"))
    assert (refused.value.code, refused.value.exit_code) == ("adapter.two", 2)
    with pytest.raises(FrtcError, match="is no folder"):
        open_checkpoint(folder, tmp_path / "absent")
    shutil.rmtree(tmp_path / "b")


def test_a_configuration_of_peft_is_read_whole() -> None:
    found = read_config(FIXTURE / "patterns")
    assert (found.rank("layers.1.mlp.up_proj"), found.scale("layers.1.mlp.up_proj")) == (5, 7 / math.sqrt(5))
    assert (found.rank("layers.0.attn.v_proj"), found.scale("layers.0.attn.v_proj")) == (2, 5 / math.sqrt(2))
