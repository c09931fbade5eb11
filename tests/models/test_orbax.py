"""JAX checkpoints: what Orbax saved reads as the torch layout, bit for bit; every way in which a tree can be wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from safetensors.numpy import save_file

from frtc.cli import main
from frtc.compiler import CompileOptions, compile, open_model, source_of
from frtc.errors import EnvironmentFault, FrtcError
from frtc.models import detect, load_models, orbax, scratch, synthetic_jax
from frtc.models.checkpoint import open_checkpoint
from frtc.models.jax_names import ADAPTIVE, LORAS, PLAIN, ROWS
from frtc.models.orbax import MANIFEST, METADATA, OrbaxCheckpoint, read_leaves
from frtc.models.synthetic import write_checkpoint

HERE = Path(__file__).parent
FIXTURE = HERE.parent / "fixtures" / "orbax"
STACK = "paligemma_with_expert.paligemma.model.language_model"
KINDS = {"pi0": PLAIN, "pi05": ADAPTIVE}
SAVED = [("released", "pi0", ""), ("trainer/7", "pi05", ".value")]
Array = np.ndarray[Any, Any]


# The table -------------------------------------------------------------------------------------------------------


def keys(kind: str) -> list[dict[str, Any]]:
    """Leaf, tensor and declared transforms, from the key file."""
    found: list[dict[str, Any]] = json.loads((HERE / f"{kind}.jax.keys.json").read_text())["keys"]
    return found


def sizes() -> dict[int, int]:
    """Extents of the published models -> those of the small trees; products stay products."""
    return {int(k): v for k, v in json.loads((FIXTURE / "fixture.json").read_text())["sizes"].items()}


def transformed(array: Array, ops: Iterable[list[Any]], layer: int) -> Array:
    """What the key file says, at the small sizes."""
    for op, *rest in ops:
        if op == "index":
            array = array.take(layer if rest[1] == "i" else rest[1], axis=rest[0])
        else:
            array = array.transpose(rest[0]) if op == "transpose" else array.reshape([sizes()[n] for n in rest[0]])
    return array


def values(path: str, shape: tuple[int, ...]) -> Array:
    """As tools/make_orbax_fixture.py made them."""
    count = np.arange(math.prod(shape), dtype=np.int64)
    return ((count * 37 + zlib.crc32(path.encode())) % 251 - 125).astype(np.float32).reshape(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_the_keys_of_the_real_tree(kind: str) -> None:
    rows = [row for row in ROWS if row.norms in ("", KINDS[kind])]
    wanted = {(key["jax"].replace("/", "."), key["torch"].replace("{i}", "#")) for key in keys(kind)}
    assert {(row.leaf, row.name) for row in rows} == wanted
    assert len(rows) == len(keys(kind))


@pytest.mark.parametrize(("place", "kind", "ending"), SAVED)
def test_what_orbax_saved_is_the_torch_layout(place: str, kind: str, ending: str) -> None:
    """Each tensor by the key file's own list of index, transpose and reshape; types as they are stored."""
    checkpoint = open_checkpoint(FIXTURE / place)
    assert isinstance(checkpoint, OrbaxCheckpoint)
    assert any(leaf.chunk != leaf.shape for leaf in read_leaves(FIXTURE / place / "params").values()) == bool(ending)
    seen = 0
    for key in keys(kind):
        shape = tuple(sizes()[n] for n in key["jax_shape"])
        frozen = key["jax"].startswith("PaliGemma/img")
        for layer in range(shape[0] if "{i}" in key["torch"] else 1):
            name = key["torch"].replace("{i}", str(layer))
            wanted = transformed(values(key["jax"], shape), key["ops"], layer)
            array, info = checkpoint.read(name), checkpoint.tensors[name]
            assert (info.shape, info.dtype) == (wanted.shape, "f32" if ending and not frozen else "bf16"), name
            assert array.tobytes() == wanted.astype(array.dtype).tobytes(), name
            assert array.flags.c_contiguous and not array.flags.writeable
            seen += 1
    assert seen == len(checkpoint.tensors)


def test_the_fixture_is_small_and_names_no_machine() -> None:
    files = [f for f in FIXTURE.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 300_000
    assert not any(word in f.read_bytes() for f in files for word in (b"/home/", b"/tmp/", b"fixtures/orbax"))


@pytest.mark.parametrize(("place", "kind", "ending"), SAVED)
def test_the_kind_is_read_from_the_keys(place: str, kind: str, ending: str, tmp_path: Path) -> None:
    """A Pi0.5 tree in a folder called pi0, and the other way round."""
    folder = tmp_path / {"pi0": "pi05", "pi05": "pi0"}[kind]
    shutil.copytree(FIXTURE / place, folder)
    assert detect(open_checkpoint(folder)).name == kind


# Synthetic trees -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pi05 and pi0 in the torch layout, in the released one, and in the trainer's with a chunk for each layer."""
    folder = tmp_path_factory.mktemp("trees")
    for kind in KINDS:
        write_checkpoint(folder / kind / "torch", "openpi", kind=kind)
        write_checkpoint(folder / kind / "jax", "jax", kind=kind)
        shutil.copytree(folder / kind / "jax", folder / kind / "trainer", ignore=shutil.ignore_patterns("params"))
        tree(folder / kind / "trainer", kind, trainer=True, together=1)
    return folder


def tree(folder: Path, kind: str = "pi05", **how: Any) -> Path:
    synthetic_jax.write(folder, kind, load_models()[kind].tiny(), 0, "bf16", 2, **how)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_all_layouts_hold_the_same_bits(tiny: Path, kind: str, tmp_path: Path) -> None:
    torch = open_checkpoint(tiny / kind / "torch")
    by_two = tree(tmp_path / "two", kind, together=2)  # three layers: the last chunk is not full
    for folder in (tiny / kind / "jax", tiny / kind / "jax" / "params", tiny / kind / "trainer", by_two):
        jax = open_checkpoint(folder)
        only = torch.tensors.keys() ^ jax.tensors.keys()  # the table under one of its two names; what nothing reads
        assert {name.rsplit(".", 2)[1] for name in only} == {"embed_tokens", "lm_head"}
        for name in torch.tensors.keys() & jax.tensors.keys():
            assert str(torch.tensors[name]) == str(jax.tensors[name])
            assert torch.read(name).tobytes() == jax.read(name).tobytes(), name


def test_side_files_lie_beside_the_tree(tiny: Path) -> None:
    assert open_checkpoint(tiny / "pi05" / "jax" / "params").folder == tiny / "pi05" / "jax"
    opened = open_model(tiny / "pi05" / "jax" / "params", CompileOptions())
    assert next(f.value for f in opened.facts if f.name == "asset") == "synthetic"


def test_the_evidence_names_the_tree(tiny: Path) -> None:
    """Hashes of the tree's two small files: its description, and the manifest that names the data."""
    files = [tiny / "pi05" / "jax" / "params" / name for name in (METADATA, MANIFEST)]
    found = source_of(open_model(tiny / "pi05" / "jax", CompileOptions()))["headers"]
    assert found == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_plans_from_all_layouts_are_one_program(tiny: Path, tmp_path: Path) -> None:
    options = CompileOptions(horizon=4, steps=2, self_test=False)
    for kind, layouts in (("pi05", ("torch", "jax", "trainer")), ("pi0", ("torch", "trainer"))):
        plans = [compile(tiny / kind / layout, "hopper", tmp_path / layout, options).plan_id for layout in layouts]
        assert len(set(plans)) == 1, kind


def test_commands_take_a_tree(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check, explain; compile from a trainer's step, verify against the published tree of the same weights."""
    jax, plan = tiny / "pi05" / "jax", tmp_path / "a.plan"
    sizes = ("--views", "1", "--horizon", "4", "--steps", "2")

    def said(*command: object) -> Any:
        assert main([*map(str, command), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    checked = said("check", jax / "params", "--weights")
    assert (checked["model"], checked["tensors"]) == ("pi05", len(open_checkpoint(jax).tensors))
    assert said("explain", jax, "--arch", "hopper", *sizes)["nodes"]
    said("compile", tiny / "pi05" / "trainer", "--arch", "hopper", "-o", plan, *sizes)
    assert said("verify", plan, jax / "params", "--device", "cpu")["failed"] == []


def test_a_chunk_is_decoded_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    copy = orbax._copy
    monkeypatch.setattr(orbax, "_copy", lambda ts, leaf, *rest: (decoded.append(leaf.path), copy(ts, leaf, *rest))[1])
    for layout, each in (("jax", 1), ("trainer", 3)):
        checkpoint = open_checkpoint(tiny / "pi05" / layout)
        decoded.clear()
        for _ in range(2):
            for layer in range(3):
                for name in ("k", "v"):
                    checkpoint.read(f"{STACK}.layers.{layer}.self_attn.{name}_proj.weight")
        assert len(decoded) == each, "all layers at once, or each for itself; keys and values together"


# LoRA ------------------------------------------------------------------------------------------------------------

# openpi's einsums: (leaf, operands, its equation, those of the two factors)
EINSUMS = [
    ("attn.q_einsum", "td,ndh->tnh", "td,ndl->tnl", "tnl,nlh->tnh"),
    ("attn.kv_einsum", "td,ckdh->ctkh", "td,ckdl->ctkl", "ctkl,cklh->ctkh"),
    ("attn.attn_vec_einsum", "tnh,nhd->td", "tnh,nhl->tl", "tl,nld->td"),
    ("mlp.gating_einsum", "td,cdf->ctf", "td,cdl->ctl", "ctl,clf->ctf"),
    ("mlp.linear", "tf,fd->td", "tf,fl->tl", "tl,ld->td"),
]
MODULES = {"attn": "self_attn", "mlp": "mlp"}
LINEARS = {
    "attn.q_einsum": ["q"], "attn.kv_einsum": ["k", "v"], "attn.attn_vec_einsum": ["o"],
    "mlp.gating_einsum": ["gate", "up"], "mlp.linear": ["down"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pi0.5 with LoRA in both experts, beside the weights of `tiny`."""
    return tree(tmp_path_factory.mktemp("lora") / "tuned", trainer=True, loras=LORAS)


@pytest.mark.parametrize("suffix", ["", "_1"])
@pytest.mark.parametrize(("stem", "whole", "down", "up"), EINSUMS)
def test_lora_is_merged_as_openpi_computes(tuned: Path, suffix: str, stem: str, whole: str, down: str, up: str) -> None:
    checkpoint, leaves = open_checkpoint(tuned), read_leaves(tuned / "params")
    part, _, name = stem.partition(".")
    leaf = (
        f"PaliGemma.llm.layers.{part}.{name}{suffix}.w"
        if part == "attn"
        else f"PaliGemma.llm.layers.mlp{suffix}.{name}"
    )
    lora = next(lora for lora in LORAS if lora.leaf == leaf)
    w, a, b = (leaves[path].array.read().result().astype(np.float64)[2] for path in (leaf, lora.a_leaf, lora.b_leaf))
    extents = dict(zip(whole.split(",")[1].split("->")[0], w.shape, strict=True))
    x = np.random.default_rng(0).standard_normal([extents.get(letter, 5) for letter in whole.split(",")[0]])
    wanted = np.einsum(whole, x, w) + np.einsum(up, np.einsum(down, x, a), b)
    wanted = wanted.reshape(2, 5, -1) if "c" in whole else wanted.reshape(1, 5, -1)
    stack = "paligemma_with_expert.gemma_expert.model" if suffix else STACK
    for linear, there in zip(LINEARS[stem], wanted, strict=True):
        tensor = f"{stack}.layers.2.{MODULES[part]}.{linear}_proj.weight"
        assert checkpoint.tensors[tensor].dtype == "f64"
        merged = checkpoint.read(tensor)
        assert np.abs(merged - checkpoint.read(tensor)).max() == 0
        np.testing.assert_allclose(x.reshape(5, -1) @ merged.T, there, rtol=0, atol=1e-12 * np.abs(there).max())
        assert np.linalg.norm(np.einsum(up, np.einsum(down, x, a), b)) > 1e-4 * np.linalg.norm(there)


@pytest.mark.parametrize("value", [1e300, float("inf"), float("nan")])
def test_a_merge_beyond_what_weights_hold(tuned: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    checkpoint = open_checkpoint(tuned)
    name = f"{STACK}.layers.1.self_attn.o_proj.weight"
    monkeypatch.setattr("frtc.models.orbax.merge", lambda w, a, b, scale: np.full(w.shape, value))
    with pytest.raises(FrtcError, match="not finite once the LoRA is merged") as e:
        checkpoint.read(name)
    assert e.value.code == "checkpoint.nonfinite" and name in e.value.what
    assert dict(e.value.rows)["adapter"] == "PaliGemma.llm.layers.attn.attn_vec_einsum.lora_a"


def test_a_tuned_tree_compiles_as_its_kind(tuned: Path) -> None:
    checkpoint = open_checkpoint(tuned)
    model = detect(checkpoint)
    config, _ = model.config(checkpoint, {})
    weights = model.weights(checkpoint, config)
    assert model.name == "pi05"
    assert [(f.name, f.value) for f in checkpoint.facts] == [("lora", "10 arrays merged, rank 16, 32")]
    assert {checkpoint.tensors[key].dtype for key in weights.values()} == {"bf16", "f64"}


def test_an_adapter_of_peft_on_a_tree(tiny: Path, tmp_path: Path) -> None:
    """The same tensors as on the torch layout, merged to the same bits."""
    draw, module = np.random.default_rng(0).standard_normal, f"{STACK}.layers.1.self_attn.q_proj"
    (tmp_path / "adapter").mkdir()
    factors = {"lora_A": draw((3, 128)).astype(np.float32), "lora_B": draw((128, 3)).astype(np.float32)}
    tensors = {f"base_model.model.{module}.{part}.weight": value for part, value in factors.items()}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [module]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    torch, jax = (open_checkpoint(tiny / "pi05" / name, tmp_path / "adapter") for name in ("torch", "jax"))
    assert torch.read(f"{module}.weight").dtype == np.float64
    assert torch.read(f"{module}.weight").tobytes() == jax.read(f"{module}.weight").tobytes()


def without(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/params/"}).result()
        found = [key for key in store.list().result() if key.decode().startswith(f"params.{path}")]
        assert found
        for key in found:
            store.write(key, None).result()

    return change


def adding(path: str, shape: tuple[int, ...], dtype: str = "bfloat16", value: float = 0.0, root: str = "params.",
           chunk_written: bool = True) -> Callable[[Path], None]:  # fmt: skip
    def change(folder: Path) -> None:
        store = {"driver": "ocdbt", "base": f"file://{folder}/params/", "path": f"{root}{path}/"}
        metadata = {"shape": shape, "chunks": [max(1, extent) for extent in shape]}
        spec = {"driver": "zarr", "kvstore": store, "metadata": {**metadata, "dtype": dtype}}
        array = ts.open(spec, create=True, delete_existing=True).result()
        if chunk_written:
            array.write(np.full(shape, value).astype(array.dtype.numpy_dtype)).result()

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [change(folder) for change in changes] and None


LLM = "PaliGemma.llm.layers"
RANKS: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("one factor", without(f"{LLM}.attn.q_einsum.lora_b"), "orbax.lora", "q_einsum.lora_b"),
    ("only the queries", both(without(f"{LLM}.attn.kv_einsum.lora"), without(f"{LLM}.attn.attn_vec_einsum.lora")),
     "orbax.lora", "kv_einsum.lora_a"),
    ("ranks contradict", adding(f"{LLM}.attn.q_einsum.lora_b.value", (3, 4, 8, 32)), "orbax.shape", "q_einsum.lora_b"),
    ("ranks of two leaves contradict", both(adding(f"{LLM}.attn.q_einsum.lora_a.value", (3, 4, 128, 8)),
     adding(f"{LLM}.attn.q_einsum.lora_b.value", (3, 4, 8, 32))), "orbax.shape", "kv_einsum.lora_a"),
    ("another axis", adding(f"{LLM}.mlp.linear_lora_b.value", (3, 16, 64)), "orbax.shape", "linear_lora_b"),
    ("unknown rank", lambda folder: [adding(f"{LLM}.attn.{name}_einsum_1.lora_{side}.value", shape)(folder)
     for name, side, shape in (("q", "a", (3, 4, 64, 8)), ("q", "b", (3, 4, 8, 32)), ("kv", "a", (3, 2, 1, 64, 8)),
      ("kv", "b", (3, 2, 1, 8, 32)), ("attn_vec", "a", (3, 4, 32, 8)), ("attn_vec", "b", (3, 4, 8, 64)))] and None,
     "orbax.lora_rank", "has rank 8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "said"), [row[1:] for row in RANKS], ids=[row[0] for row in RANKS])
def test_lora_that_cannot_be_merged(
    tuned: Path, tmp_path: Path, change: Callable[[Path], None], code: str, said: str
) -> None:
    error = refusal(changed(tuned, tmp_path, change))
    assert error.code == code
    assert said in str(error)


def test_the_rank_of_the_mlp_scales_nothing(tuned: Path, tmp_path: Path) -> None:
    """There the product is added as it is, so any rank may be merged."""
    shapes = {"gating_einsum_lora_a": (3, 2, 64, 5), "gating_einsum_lora_b": (3, 2, 5, 128),
              "linear_lora_a": (3, 128, 5), "linear_lora_b": (3, 5, 64)}  # fmt: skip
    changes = [adding(f"{LLM}.mlp_1.{name}.value", shape) for name, shape in shapes.items()]
    folder = changed(tuned, tmp_path, both(*changes))
    name = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
    plain = tree(tmp_path / "plain")
    assert np.array_equal(open_checkpoint(folder).read(name), open_checkpoint(plain).read(name).astype(np.float64))


# What can be wrong -----------------------------------------------------------------------------------------------


def changed(source: Path, tmp_path: Path, change: Callable[[Path], None]) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    change(folder)
    return folder


def refusal(path: Path, act: Callable[[Path], object] = open_checkpoint) -> FrtcError:
    with pytest.raises(FrtcError) as e:
        act(path)
    assert "Traceback" not in str(e.value)
    return e.value


HEAD = "PaliGemma.img.head.bias"
OUT = "PaliGemma.img.Transformer.encoderblock.MultiHeadDotProductAttention_0.out"
TREES: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("missing leaf", without("action_out_proj.kernel"), "orbax.missing", "action_out_proj.kernel"),
    ("missing norm", without(f"{LLM}.pre_ffw_norm_1.Dense_0.bias"), "orbax.missing", "pre_ffw_norm_1.Dense_0.bias"),
    ("renamed leaf", both(without(f"{HEAD}/"), adding("PaliGemma.img.heads.bias", (128,))), "orbax.missing",
     "heads.bias"),
    ("extra leaf", adding("proprio_history_proj.kernel", (32, 128)), "orbax.unexpected", "proprio_history_proj.kernel"),
    ("the other kind's head", adding("state_proj.kernel", (32, 64)), "orbax.unexpected", "state_proj.kernel"),
    ("rank", adding(HEAD, (1, 128)), "orbax.shape", "axes"),
    ("nothing in it", adding(HEAD, (0,)), "orbax.shape", HEAD),
    ("width", adding(HEAD, (127,)), "orbax.shape", "127"),
    ("layers", adding(f"{LLM}.pre_ffw_norm.scale", (4, 128)), "orbax.shape", "contradicts 3"),
    ("heads", adding(f"{OUT}.kernel", (2, 3, 72, 144)), "orbax.shape", "out.kernel"),
    ("three of key and value", adding(f"{LLM}.attn.kv_einsum.w", (3, 3, 1, 128, 32)), "orbax.shape", "2 of the model"),
    ("a billion layers", lambda folder: [adding(f"{LLM}.{norm}.scale", (10**9, 128), chunk_written=False)(folder)
     for norm in ("pre_attention_norm", "pre_ffw_norm")] and None, "orbax.shape", "layers"),
    ("complex", adding(HEAD, (128,), "<c8"), "checkpoint.dtype", "complex64"),
    ("a trainer's path", adding(f"{HEAD}.value", (128,)), "orbax.mixed", f"{HEAD}.value"),
    ("another root", adding("bias", (4,), root="ema."), "orbax.format", "ema.bias"),
    ("state of the optimizer", adding("opt_state.0.mu.bias", (4,), root=""), "orbax.train_state", "opt_state.0.mu"),
    ("no manifest", lambda folder: (folder / "params" / MANIFEST).unlink(), "orbax.manifest", "use_ocdbt"),
    ("manifest", lambda folder: (folder / "params" / MANIFEST).write_bytes(b"\0" * 99) and None, "orbax.damaged",
     "reason"),
    ("no data", lambda folder: shutil.rmtree(folder / "params" / "d"), "orbax.damaged", "reason"),
    ("metadata", lambda folder: (folder / "params" / METADATA).write_text("{") and None, "checkpoint.json", METADATA),
    ("two layouts", lambda folder: (folder / "model.safetensors").touch(), "checkpoint.mixed", "params"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "said"), [row[1:] for row in TREES], ids=[row[0] for row in TREES])
def test_trees_that_are_refused(
    tiny: Path, tmp_path: Path, change: Callable[[Path], None], code: str, said: str
) -> None:
    error = refusal(changed(tiny / "pi05" / "jax", tmp_path, change))
    assert error.code == code
    assert said in str(error)


def test_only_the_trainers_state(tmp_path: Path) -> None:
    folder = changed(FIXTURE / "trainer" / "7", tmp_path, lambda folder: shutil.rmtree(folder / "params"))
    assert refusal(folder).code == "orbax.train_state"
    assert refusal(folder / "train_state").code == "orbax.train_state"


def test_another_models_tree(tiny: Path, tmp_path: Path) -> None:
    """Pi0-FAST has the prefix alone; a foreign tree nothing that the table knows."""

    def strip(folder: Path) -> None:
        for path in sorted(read_leaves(folder / "params")):
            if "_1." in path or not path.startswith("PaliGemma"):
                without(path)(folder)

    assert refusal(changed(tiny / "pi05" / "jax", tmp_path, strip), kind_of).code == "checkpoint.kind"
    adding("Dense_0.kernel", (4, 4))(tmp_path / "foreign")
    error = refusal(tmp_path / "foreign", kind_of)
    assert (error.code, "params.Dense_0.kernel" in str(error)) == ("checkpoint.kind", True)


def kind_of(path: Path) -> object:
    return detect(open_checkpoint(path))


def test_a_tree_without_arrays(tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/params/"}).result()
    store.write(b"params.x/zarr.json", b"{}").result()
    error = refusal(tmp_path)
    assert (error.code, "zarr v2" in error.what) == ("orbax.format", True)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_leaf_that_holds_nan(tiny: Path, tmp_path: Path, value: str) -> None:
    checkpoint = open_checkpoint(changed(tiny / "pi05" / "jax", tmp_path, adding(HEAD, (128,), value=float(value))))
    with pytest.raises(FrtcError) as e:
        checkpoint.read("paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias")
    assert (e.value.code, dict(e.value.rows)["first at"]) == ("checkpoint.nonfinite", f"[0] = {value}")


def largest(folder: Path) -> Path:
    return max((folder / "params" / "d").iterdir(), key=lambda f: f.stat().st_size)


def truncate(folder: Path) -> None:
    os.truncate(largest(folder), largest(folder).stat().st_size // 2)


def overwrite(folder: Path) -> None:
    with largest(folder).open("r+b") as f:
        f.write(bytes(largest(folder).stat().st_size // 2))


@pytest.mark.parametrize("change", [truncate, overwrite])
def test_damaged_chunk(tiny: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    """The largest file holds the gates of the prefix. Their leaf is named; others can be read."""
    checkpoint = open_checkpoint(changed(tiny / "pi05" / "jax", tmp_path, change))
    with pytest.raises(FrtcError) as e:
        checkpoint.read(f"{STACK}.layers.1.mlp.up_proj.weight")
    assert e.value.code == "orbax.damaged"
    assert "mlp.gating_einsum" in e.value.what
    assert checkpoint.read("time_mlp_in.bias").shape == (64,)


@pytest.mark.parametrize("promised", [True, False])
def test_a_chunk_that_is_not_there(tiny: Path, tmp_path: Path, promised: bool) -> None:
    """Older trees leave chunks of zeros out; where the tree says that all are stored, one is lost."""
    folder = changed(tiny / "pi05" / "jax", tmp_path, adding(HEAD, (128,), chunk_written=False))
    metadata = folder / "params" / METADATA
    described = json.loads(metadata.read_text()) | {"store_array_data_equal_to_fill_value": promised}
    metadata.write_text(json.dumps(described))
    name, checkpoint = (
        "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias",
        open_checkpoint(folder),
    )
    if promised:
        with pytest.raises(FrtcError) as e:
            checkpoint.read(name)
        assert (e.value.code, HEAD in e.value.what) == ("orbax.damaged", True)
    else:
        assert not checkpoint.read(name).any()


def test_without_the_extra(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(EnvironmentFault) as e:
        open_checkpoint(tiny / "pi05" / "jax")
    assert (e.value.code, e.value.hint) == ("env.package", "pip install 'frtc[jax]'")


# Scratch ---------------------------------------------------------------------------------------------------------


def test_scratch_leaves_nothing_and_says_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    array = scratch.allocate((1 << 19,), np.dtype(ml_dtypes.bfloat16))
    array[:] = 1
    assert not list(tmp_path.iterdir())

    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EnvironmentFault) as e:
        scratch.allocate((1 << 20,), np.dtype(np.float64))
    assert (e.value.code, "TMPDIR" in e.value.hint) == ("env.scratch", True)


def test_scratch_forgets_the_oldest_and_what_was_read_stays() -> None:
    store, made = scratch.Scratch(limit=3 * 8), []

    def get(key: str, keep: bool = False) -> Array:
        def fill(out: Array) -> None:
            made.append(key)
            out[...] = len(made)

        return store.get(key, (1,), np.dtype(np.float64), fill, keep)

    first = get("kept", keep=True)
    loose = get("a")
    for key in ("b", "c", "a", "d", "a"):  # d drives b out: a was used later
        get(key)
    assert made == ["kept", "a", "b", "c", "d"]
    get("b")
    assert made[-1] == "b"
    assert get("kept") is first
    assert loose == [2.0]
