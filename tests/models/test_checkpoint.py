"""Reading checkpoints: what is on disk, what config.json may say, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

from frtc.errors import FrtcError, UsageError
from frtc.models import detect
from frtc.models.checkpoint import INDEX, SINGLE, open_checkpoint, read_json
from frtc.models.evidence import Fact
from frtc.models.synthetic import write_checkpoint

TENSORS = {
    "a.f32": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b.bf16": torch.linspace(-3, 3, 7).to(torch.bfloat16),
    "c.f16": torch.linspace(-1, 1, 4).to(torch.float16).view(2, 2, 1),
    "d.i64": torch.tensor(-5),
    "e.u8": torch.zeros(0, 4, dtype=torch.uint8),
    "f.e4m3": torch.ones(3).to(torch.float8_e4m3fn),
}


def save(path: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    safetensors.torch.save_file(tensors, str(path), {"format": "pt"})
    return path


def refusal(path: Path, act: Callable[[Path], object] = open_checkpoint) -> FrtcError:
    with pytest.raises(FrtcError) as e:
        act(path)
    assert "Traceback" not in str(e.value)
    return e.value


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path / "x.safetensors"))
    assert {name: str(info) for name, info in checkpoint.tensors.items()} == {
        "a.f32": "f32[2,3]",
        "b.bf16": "bf16[7]",
        "c.f16": "f16[2,2,1]",
        "d.i64": "i64[]",
        "e.u8": "u8[0,4]",
        "f.e4m3": "e4m3[3]",
    }
    for name, tensor in TENSORS.items():
        array = checkpoint.read(name)
        assert array.shape == tuple(tensor.shape)
        assert array.astype(np.float64).tolist() == tensor.to(torch.float64).tolist()
    assert checkpoint.read("b.bf16").dtype == ml_dtypes.bfloat16


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    array = open_checkpoint(save(tmp_path / "x.safetensors")).read("a.f32")
    assert not array.flags.writeable
    assert not array.flags.owndata


def sharded(folder: Path, wrong: dict[str, str] | None = None) -> Path:
    """Two shards with their index; `wrong` changes what the index says."""
    save(folder / "model-1.safetensors", {"a.f32": TENSORS["a.f32"]})
    save(folder / "model-2.safetensors", {"b.bf16": TENSORS["b.bf16"]})
    placed = {"a.f32": "model-1.safetensors", "b.bf16": "model-2.safetensors"} | (wrong or {})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def test_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path))
    assert sorted(checkpoint.tensors) == ["a.f32", "b.bf16"]
    assert checkpoint.read("a.f32").tolist() == TENSORS["a.f32"].tolist()
    assert [f.name for f in checkpoint.files] == ["model-1.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize("shard", ["model-3.safetensors", "../elsewhere.safetensors", "/etc/passwd"])
def test_index_names_an_absent_shard(tmp_path: Path, shard: str) -> None:
    save(tmp_path.parent / "elsewhere.safetensors")
    error = refusal(sharded(tmp_path, {"b.bf16": shard}))
    assert (error.code, shard in error.what) == ("checkpoint.shard", True)
    assert dict(error.rows)["index"].endswith(INDEX)


@pytest.mark.parametrize("wrong", [{"c": "model-1.safetensors"}, {"b.bf16": "model-1.safetensors"}])
def test_index_disagrees_with_shards(tmp_path: Path, wrong: dict[str, str]) -> None:
    assert refusal(sharded(tmp_path, wrong)).code == "checkpoint.index"


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_map(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert refusal(tmp_path).code == "checkpoint.index"


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE).symlink_to(tmp_path / SINGLE)  # a loop
    assert refusal(tmp_path / SINGLE).code in ("checkpoint.read", "checkpoint.not_found")
    assert refusal(sharded(tmp_path, {"b.bf16": "x" * 300})).code == "checkpoint.read"


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_index_is_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode("latin1"))
    assert refusal(tmp_path).code == "checkpoint.json"


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path / "model-2.safetensors", {"a.f32": TENSORS["a.f32"], "b.bf16": TENSORS["b.bf16"]})
    error = refusal(tmp_path)
    assert (error.code, error.what) == ("checkpoint.duplicate", "two shards hold a.f32")


def forge(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FORGED: dict[str, tuple[Any, bytes, str]] = {
    "not_json": (b"{nonsense", b"", "checkpoint.format"),
    "not_utf8": (b'{"\xff": 1}', b"", "checkpoint.format"),
    "deep_json": (b"[" * 100_000, b"", "checkpoint.format"),
    "a_list": ([1], b"", "checkpoint.format"),
    "no_offsets": ({"x": {"dtype": "F32", "shape": [2]}}, bytes(8), "checkpoint.format"),
    "entry_is_text": ({"x": "F32"}, b"", "checkpoint.format"),
    "negative_extent": ({"x": entry(shape=(-2,))}, bytes(8), "checkpoint.format"),
    "fractional_extent": ({"x": entry(shape=(2.0,))}, bytes(8), "checkpoint.format"),
    "wrong_length": ({"x": entry(offsets=(0, 4))}, bytes(4), "checkpoint.format"),
    "reversed_offsets": ({"x": entry(offsets=(8, 0))}, bytes(8), "checkpoint.format"),
    "beyond_the_end": ({"x": entry()}, bytes(7), "checkpoint.truncated"),
    "gap": ({"x": entry(offsets=(4, 12))}, bytes(12), "checkpoint.format"),
    "overlap": ({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12), "checkpoint.format"),
    "bytes_left_over": ({"x": entry()}, bytes(9), "checkpoint.format"),
    "unknown_type": ({"x": entry(dtype="Q4_K")}, bytes(8), "checkpoint.dtype"),
    "twice": (json.dumps({"x": entry()})[:-1].encode() + b',"x":1}', bytes(8), "checkpoint.duplicate"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_header(tmp_path: Path, name: str) -> None:
    header, data, code = FORGED[name]
    error = refusal(forge(tmp_path / "x.safetensors", header, data))
    assert error.code == code
    assert "x" in error.what


@pytest.mark.parametrize("length", [0x80, 0x8002, 0x4B50])
def test_header_length_that_looks_like_a_pickle(tmp_path: Path, length: int) -> None:
    """The first byte of a file may well be 0x80: it is the low byte of a length."""
    text = json.dumps({"x": entry()}).encode()
    path = forge(tmp_path / "x.safetensors", text + b" " * (length - len(text)), bytes(8))
    assert list(open_checkpoint(path).tensors) == ["x"]


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path / "x.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    error = refusal(path)
    assert error.code == ("checkpoint.format" if keep in (0, 5) else "checkpoint.truncated")
    assert error.what.startswith("x.safetensors is")


@pytest.mark.parametrize(
    "content", [pickle.dumps({"w": 1}) + bytes(99), b"PK\x03\x04" + bytes(99), b"GGUF\x03\0\0\0" * 9]
)
def test_other_formats(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(content)
    assert refusal(tmp_path).code == "checkpoint.format"


def test_pickle_is_named_and_left_alone(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    error = refusal(tmp_path)
    assert (error.code, "pytorch_model.bin" in error.what) == ("checkpoint.pickle", True)
    assert not (tmp_path / "ran").exists()


def test_nothing_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent").code == "checkpoint.not_found"
    (tmp_path / "notes.txt").write_text("x")
    error = refusal(tmp_path)
    assert (error.code, dict(error.rows)["folder"]) == ("checkpoint.not_found", "notes.txt")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_tensor_that_holds_nan(tmp_path: Path, dtype: torch.dtype, value: str) -> None:
    bad = torch.full((1025, 1025), torch.finfo(dtype).max, dtype=dtype)  # more than one piece
    bad[1024, 3] = float(value)
    checkpoint = open_checkpoint(save(tmp_path / "x.safetensors", {"ok": bad[:1024].clone(), "bad": bad}))
    assert checkpoint.read("ok").shape == (1024, 1025)
    with pytest.raises(FrtcError) as e:
        checkpoint.read("bad")
    assert e.value.code == "checkpoint.nonfinite"
    assert dict(e.value.rows)["first at"] == f"[1024,3] = {value}"


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(FrtcError) as e:
        detect(open_checkpoint(save(tmp_path / "pi05.safetensors")))  # the name proves nothing
    assert e.value.code == "checkpoint.kind"
    assert "pi05 (Pi0.5)" in dict(e.value.rows)["known"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout in ("openpi", "lerobot"):
        write_checkpoint(folder / layout, layout)
    return {layout: folder / layout for layout in ("openpi", "lerobot")}


def facts(path: Path, **choices: Any) -> dict[str, Fact]:
    checkpoint = open_checkpoint(path)
    _, found = detect(checkpoint).config(checkpoint, choices)
    return {fact.name: fact for fact in found}


def test_facts_of_openpi(written: dict[str, Path]) -> None:
    known = facts(written["openpi"])
    assert known["origin"].value == "openpi"
    assert known["horizon"] == Fact("horizon", 10, "config.json: action_horizon")
    assert known["steps"] == Fact("steps", 10, "published default", assumed=True)
    assert known["views"] == Fact("views", 3, "published default", assumed=True)
    assert known["prompt"] == Fact("prompt", 200, "published default")


def test_facts_of_lerobot(written: dict[str, Path]) -> None:
    known = facts(written["lerobot"])
    assert known["origin"] == Fact("origin", "lerobot", "config.json: type")
    assert known["views"] == Fact("views", 3, "config.json: input_features")
    assert known["horizon"] == Fact("horizon", 10, "config.json: chunk_size")
    assert known["steps"] == Fact("steps", 10, "config.json: num_inference_steps")
    assert known["prompt"] == Fact("prompt", 96, "config.json: tokenizer_max_length")
    assert not any(fact.assumed for fact in known.values())


def test_options_win(written: dict[str, Path]) -> None:
    for layout in ("openpi", "lerobot"):
        known = facts(written[layout], views=1, prompt=64, horizon=5, steps=4, origin="lerobot-0.4")
        for name, value in {"views": 1, "prompt": 64, "horizon": 5, "steps": 4, "origin": "lerobot-0.4"}.items():
            assert known[name] == Fact(name, value, "option")


@pytest.mark.parametrize("value", [0, -3, 2.5, "ten", True, 1001])
def test_option_that_is_no_count(written: dict[str, Path], value: Any) -> None:
    with pytest.raises(UsageError) as e:
        facts(written["openpi"], steps=value)
    assert (e.value.code, "steps" in e.value.what) == ("option.value", True)


def test_empty_cameras_are_no_views(written: dict[str, Path], tmp_path: Path) -> None:
    camera = {"type": "VISUAL", "shape": [3, 224, 224]}
    cameras = {"observation.images.top": camera, "observation.images.empty_camera_0": camera}
    assert facts(edited(written["lerobot"], tmp_path, {"input_features": cameras}))["views"].value == 1


def edited(source: Path, tmp_path: Path, change: dict[str, Any]) -> Path:
    """A copy of the folder with other fields in config.json."""
    folder = tmp_path / "edited"
    folder.mkdir()
    (folder / SINGLE).symlink_to(source / SINGLE)
    shutil.copy(source / "config.json", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    return folder


WRONG: list[tuple[str, str, Any]] = [
    ("openpi", "action_dim", 24),
    ("openpi", "action_horizon", 0),
    ("openpi", "action_horizon", "50"),
    ("openpi", "pi05", False),
    ("lerobot", "type", "pi0"),
    ("lerobot", "max_action_dim", 24),
    ("lerobot", "chunk_size", None),
    ("lerobot", "num_inference_steps", -1),
    ("lerobot", "tokenizer_max_length", 9.5),
    ("lerobot", "image_resolution", [112, 112]),
    ("lerobot", "n_obs_steps", 2),
    ("lerobot", "min_period", 0),
    ("lerobot", "max_period", "4"),
    ("lerobot", "max_period", 10**400),
    ("lerobot", "max_period", 0.004),
    ("openpi", "min_period", 4),
    ("openpi", "action_horizon", 4097),
    ("lerobot", "chunk_size", 10**9),
    ("lerobot", "num_inference_steps", 1001),
    ("lerobot", "tokenizer_max_length", 10**8),
    ("lerobot", "input_features", {}),
    ("lerobot", "input_features", ["observation.images.top"]),
]


@pytest.mark.parametrize(("layout", "field", "value"), WRONG)
def test_wrong_config_field(written: dict[str, Path], tmp_path: Path, layout: str, field: str, value: Any) -> None:
    with pytest.raises(FrtcError) as e:
        facts(edited(written[layout], tmp_path, {field: value}))
    assert e.value.code == "checkpoint.config"
    assert field in e.value.what
    assert dict(e.value.rows)["found"] == repr(value)
    assert dict(e.value.rows)["file"].endswith("config.json")


def test_largest_counts(written: dict[str, Path], tmp_path: Path) -> None:
    known = facts(edited(written["lerobot"], tmp_path, {"chunk_size": 4096, "num_inference_steps": 1000}))
    assert (known["horizon"].value, known["steps"].value) == (4096, 1000)


@pytest.mark.parametrize("value", ["pi0", "act", 7])
def test_an_origin_by_option_does_not_hide_another_type(written: dict[str, Path], tmp_path: Path, value: Any) -> None:
    with pytest.raises(FrtcError) as e:
        facts(edited(written["lerobot"], tmp_path, {"type": value}), origin="lerobot-0.6")
    assert (e.value.code, e.value.exit_code) == ("checkpoint.config", 4)
    assert dict(e.value.rows)["found"] == repr(value)


def _folder(path: Path) -> None:
    path.mkdir()


def _link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "absent")


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("put", [_folder, _link_to_nowhere, _link_to_itself])
def test_config_that_is_no_file(tmp_path: Path, put: Callable[[Path], None]) -> None:
    save(tmp_path / SINGLE)
    put(tmp_path / "config.json")
    refused = refusal(tmp_path)
    assert (refused.code, dict(refused.rows)["file"]) == ("checkpoint.read", str(tmp_path / "config.json"))


def test_config_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / SINGLE)
    (tmp_path / "config.json").write_text("{}")

    def fails(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(FrtcError, match="Permission denied") as e:
        read_json(tmp_path / "config.json")
    assert e.value.code == "checkpoint.read"
    assert refusal(tmp_path).code == "checkpoint.read"


def test_config_that_is_not_json(written: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(written["openpi"], tmp_path, {})
    (folder / "config.json").write_text("{")
    assert refusal(folder).code == "checkpoint.json"
