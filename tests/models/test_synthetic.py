"""Synthetic checkpoints: the same bytes from any number of threads, the same model in both layouts, all or nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import tokenizers
import torch

from frtc.errors import FrtcError, UsageError
from frtc.models import detect, pi05, synthetic
from frtc.models.checkpoint import open_checkpoint
from frtc.models.synthetic import Drawn, pieces, write_checkpoint
from frtc.models.weights import load

PI05 = synthetic.known("pi05")[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters in float32, as the strict map fills them."""
    checkpoint = open_checkpoint(folder)
    model = detect(checkpoint)
    config, _ = model.config(checkpoint, {})
    module = model.build(config, torch.float32)
    load(module, checkpoint, model.weights(checkpoint, config))
    return module.state_dict()


@pytest.mark.parametrize("layout", synthetic.LAYOUTS)
def test_threads_do_not_change_bytes(tmp_path: Path, layout: str) -> None:
    write_checkpoint(tmp_path / "one", layout, threads=1)
    write_checkpoint(tmp_path / "many", layout, threads=7)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")
    write_checkpoint(tmp_path / "other", layout, seed=1)
    one, other = contents(tmp_path / "one"), contents(tmp_path / "other")
    assert one["model.safetensors"] != other["model.safetensors"]


def test_pieces_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first values of a stream are the same whatever the length of a piece, for whole words of random bits."""
    t = Drawn("x", "prefix.layers.0.mlp.down.weight", "f32", (64, 32))
    whole = np.concatenate([values for _, values in pieces(0, t, PI05)])
    monkeypatch.setattr(synthetic, "PIECE", 8 * 32)
    cut = list(pieces(0, t, PI05))
    assert [first for first, _ in cut] == list(range(0, 64, 8))
    assert np.array_equal(np.concatenate([values for _, values in cut]), whole)


@pytest.mark.parametrize("kind", ["pi05", "pi0"])
def test_layouts_and_types_hold_the_same_model(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path / "openpi", "openpi", dtype="f32", kind=kind)
    write_checkpoint(tmp_path / "lerobot", "lerobot", dtype="f32", kind=kind)
    write_checkpoint(tmp_path / "bf16", "openpi", kind=kind)
    openpi, lerobot, bf16 = (loaded(tmp_path / name) for name in ("openpi", "lerobot", "bf16"))
    assert openpi.keys() == lerobot.keys() == bf16.keys()
    for name in openpi:
        assert torch.equal(openpi[name], lerobot[name]), name
        assert torch.equal(openpi[name].to(torch.bfloat16), bf16[name].to(torch.bfloat16)), name


def test_equal_outputs_from_both_layouts(tmp_path: Path) -> None:
    outputs = []
    for layout in synthetic.LAYOUTS:
        write_checkpoint(tmp_path / layout, layout, dtype="f32")
        checkpoint = open_checkpoint(tmp_path / layout)
        config, _ = pi05.config(checkpoint, {"views": 1, "prompt": 16, "steps": 2, "horizon": 4, "origin": "openpi"})
        model = pi05.Pi05(config, torch.float32).eval()
        load(model, checkpoint, pi05.weights(checkpoint, config))
        frames = (torch.arange(224 * 224 * 3) % 251).to(torch.uint8).view(1, 224, 224, 3)
        n = torch.tensor(9, dtype=torch.int32)
        with torch.no_grad():
            kv = model.prefix(model.vision(frames), torch.arange(16, dtype=torch.int32), n)
            actions, velocities = model.sample(torch.ones(4, 32), n, kv)
        assert len(velocities) == 2
        assert torch.isfinite(actions).all()
        outputs.append(actions)
    assert torch.equal(*outputs)


def test_the_library_reads_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "x", "lerobot")
    ours = open_checkpoint(tmp_path / "x")
    with safetensors.safe_open(tmp_path / "x" / "model.safetensors", "pt") as theirs:
        assert sorted(theirs.keys()) == sorted(ours.tensors)
        name = "model.action_in_proj.weight"
        assert theirs.get_tensor(name).tolist() == ours.read(name).tolist()
    types = {info.dtype for info in ours.tensors.values()}
    assert types == {"bf16", "f32"}, "lerobot keeps its float32 islands"
    with safetensors.safe_open(
        tmp_path / "x" / "policy_preprocessor_step_3_normalizer_processor.safetensors", "np"
    ) as f:
        assert f.get_tensor("observation.state.q01").shape == (14,)


def test_scales_and_outliers() -> None:
    """Variance 1 / fan-in; 1 % of the channels that write to a residual stream are 30 times larger."""
    ((_, plain),) = pieces(0, Drawn("x", "prefix.layers.0.mlp.up.weight", "f32", (512, 256)), PI05)
    assert np.isclose(plain.std() * 16, 1.0, rtol=0.02)
    ((_, writer),) = pieces(0, Drawn("x", "prefix.layers.0.mlp.down.weight", "f32", (512, 256)), PI05)
    rows = writer.std(axis=1) * 16
    assert (rows > 20).sum() == 5
    assert np.isclose(np.median(rows), 1.0, rtol=0.05)
    ((_, table),) = pieces(0, Drawn("x", "prefix.embed.weight", "f32", (512, 256)), PI05)
    assert (table.std(axis=0) * 16 > 20).sum() == 3
    ((_, norm),) = pieces(0, Drawn("x", "vision.tower.layers.0.norm1.weight", "f32", (512,)), PI05)
    assert np.isclose(norm.mean(), 1.0, atol=0.05)
    assert np.isclose(norm.std(), 0.2, rtol=0.1)


def test_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "x")
    t = tokenizers.Tokenizer.from_file(str(tmp_path / "x" / "tokenizer.json"))
    assert t.get_vocab_size() <= 1000 < pi05.tiny().vocab
    assert [t.token_to_id(piece) for piece in ("<pad>", "<eos>", "<bos>", "<unk>")] == [0, 1, 2, 3]
    text = "Task: pick up the red cup, State: 0 17 255;\nAction: "
    encoded = t.encode(text)
    assert t.decode(encoded.ids) == text
    assert encoded.ids[0] == 2
    assert encoded.tokens[1:8] == ["Task", ":", "▁pick", "▁up", "▁the", "▁red", "▁c"]
    assert [token for token in encoded.tokens if token.isdigit()] == list("017255"), "digits stay single"
    assert t.encode("日").tokens[1:] == ["<0xE6>", "<0x97>", "<0xA5>"]


def test_statistics_bracket_the_example(tmp_path: Path) -> None:
    """The state beside the example frames lies inside the statistics, so its bins say something."""
    write_checkpoint(tmp_path / "x")
    stats = json.loads((tmp_path / "x" / "assets" / "synthetic" / "norm_stats.json").read_text())["norm_stats"]
    state = np.load(Path(__file__).parents[2] / "examples" / "frames" / "state.npy")
    assert set(stats) == {"state", "actions"}
    assert set(stats["state"]) == {"mean", "std", "q01", "q99"}
    assert (np.array(stats["state"]["q01"]) < state).all()
    assert (state < np.array(stats["state"]["q99"])).all()


def test_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError) as e:
        write_checkpoint(tmp_path)
    assert e.value.code == "output.exists"
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_unknown_kind_or_layout(tmp_path: Path) -> None:
    for wrong in ({"kind": "pi5"}, {"layout": "onnx"}):
        with pytest.raises(UsageError) as e:
            write_checkpoint(tmp_path / "x", **wrong)
        assert (e.value.code, e.value.rows[0][0]) == ("option.value", "known")
        assert not list(tmp_path.iterdir())


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(synthetic.SafetensorsWriter, "write", full)
    with pytest.raises(FrtcError) as e:
        write_checkpoint(tmp_path / "x")
    assert (e.value.code, "No space left" in e.value.what) == ("output.write", True)
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main(["pi05", "--layout", "lerobot", "--dtype", "float32", "-o", str(tmp_path / "x")]) == 0
    assert "lerobot layout" in capsys.readouterr().out
    assert {info.dtype for info in open_checkpoint(tmp_path / "x").tensors.values()} == {"f32"}
    assert synthetic.main(["pi05", "-o", str(tmp_path / "x")]) == 2
    assert "error[output.exists]" in capsys.readouterr().err
