"""Activation scales and their file: what is read back, what is refused, whose they are."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from frtc.errors import FrtcError
from frtc.histogram import Histogram
from frtc.lowering import ops
from frtc.lowering.ir import Graph, Module, Repeat, Run, Type, input_, tensor, weight
from frtc.models.lora import TENSORS
from frtc.models.lora_config import CONFIG
from frtc.passes.sites import unnormed
from frtc.scales import HEADROOM, Counted, Scales, Site
from frtc.scales_file import ENTRY, VERSION, read_scales, require_place, write_scales
from frtc.scales_key import CHUNK, Key, ir_digest, weight_files, weights_digest

Array = np.ndarray[Any, Any]
KEY = Key("w" * 64, "i" * 64, "o" * 64)
SITES = (Site("prefix.q|k", "prefix", None, (8, 16)), Site("denoise.out", "denoise", 3, (4, 16)))


def histogram(seed: int, size: float = 1.0) -> Histogram:
    return Histogram.of(np.random.default_rng(seed).standard_normal(4000) * size)


def made(first: int = 0, **changes: Any) -> Scales:
    rows = {"prefix.q|k": (histogram(first),), "denoise.out": tuple(histogram(first + k, k) for k in (1, 2, 3))}
    about = {"path": "robot", "kind": "npz", "frames": 9, "seed": 0}
    scales = Scales.made(KEY, SITES, Counted(rows), 4, about)
    return replace(scales, **changes)


def refused(code: str, call: Callable[..., Any], *args: Any) -> FrtcError:
    with pytest.raises(FrtcError) as found:
        call(*args)
    assert found.value.code == code, found.value
    return found.value


def test_a_site_has_one_scale_or_one_for_each_round() -> None:
    scales = made()
    assert scales.of("prefix.q|k").shape == () and scales.of("denoise.out").shape == (3,)
    wanted = np.float32(HEADROOM * scales.histograms["prefix.q|k"][0].absmax / 448)
    assert scales.of("prefix.q|k") == wanted and scales.of("prefix.q|k").dtype == np.float32
    assert (np.diff(scales.of("denoise.out")) > 0).all()
    assert 28 < scales.sqnr("denoise.out") < 33
    refused("scales.site", scales.of, "denoise.in")


def test_written_and_read_back(tmp_path: Path) -> None:
    scales, path = made(synthetic=("a picture of one colour",)), tmp_path / "f.scales"
    write_scales(path, scales)
    found = read_scales(path)
    assert (found.key, found.sites, found.about()) == (scales.key, scales.sites, scales.about())
    assert found.synthetic == ("a picture of one colour",)
    for name, rows in scales.histograms.items():
        assert (found.values[name] == scales.values[name]).all()
        for a, b in zip(rows, found.histograms[name], strict=True):
            assert (a.counts == b.counts).all()
            assert (np.float32(a.absmax), a.zeros) == (np.float32(b.absmax), b.zeros)
    before = path.read_bytes()
    write_scales(path, scales)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["f.scales"]


def test_four_and_four_samples_are_eight() -> None:
    both, whole = made(0) + made(10), {}
    for site in SITES:
        whole[site.name] = tuple(a + b for a, b in zip(*(made(n).histograms[site.name] for n in (0, 10)), strict=True))
    assert both.samples == 8
    expected = Scales.made(KEY, SITES, Counted(whole), 8, {})
    for site in SITES:
        assert (both.of(site.name) == expected.of(site.name)).all()
        percentiles = [[h.percentile(99.9) for h in s.histograms[site.name]] for s in (both, expected)]
        assert percentiles[0] == percentiles[1]
    refused("scales.key", lambda: made() + made(key=replace(KEY, ir="x")))


def test_sites_that_fp8_cannot_hold() -> None:
    spike = Histogram.of(np.concatenate([np.random.default_rng(0).standard_normal(100_000), [1e7] * 40]))
    rows = {"prefix.q|k": (histogram(0),), "denoise.out": (histogram(1), spike, histogram(2))}
    scales = Scales.made(KEY, SITES, Counted(rows), 4, {})
    assert list(scales.fallen()) == ["denoise.out"] and "dB, under 20" in scales.fallen()["denoise.out"]
    zeros = Scales.made(KEY, SITES, Counted(rows | {"prefix.q|k": (Histogram.of(np.zeros(9)),)}), 4, {})
    assert zeros.fallen()["prefix.q|k"] == "its samples are all zero" and zeros.of("prefix.q|k") > 0


def test_norms_that_have_to_stay() -> None:
    """Where a product loses more without its norm than 1 dB, or nothing says what it loses."""
    name, before = SITES[0].name, replace(SITES[0], name=unnormed(SITES[0].name))
    rows = {name: (histogram(0),), before.name: (histogram(1),)}

    def fallen(*noise: list[float]) -> dict[str, str]:
        counted = Counted(rows, {name: np.array(noise)})
        return Scales.made(KEY, (SITES[0], before), counted, 4, {}).fallen()

    assert not fallen([1.0, 1.0]) and not fallen([1.0, 1.2]) and not fallen([1.0, 2.0], [9.0, 9.0])
    assert fallen([1.0, 2.0]) == {before.name: "loses 3.0 dB without its norm, more than 1"}
    assert list(fallen([0.0, 0.0])) == [before.name]


# --- whose they are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["weights", "ir", "options"])
def test_the_part_of_the_key_that_differs_is_named(part: str) -> None:
    other = replace(KEY, **{part: "x" * 64})
    fault = refused("scales.key", made().require_key, other)
    assert fault.what.endswith(f": {part}") and len(fault.rows) == 1
    assert other.digest != KEY.digest
    made().require_key(other, {"weights", "ir", "options"} - {part})


def module(rounds: int = 3, name: str = "denoise.out") -> Module:
    """A site alone, and one in a loop."""
    x, w, v = input_("x", Type("bf16", (4, 16))), weight("prefix.q|k", Type("bf16", (8, 16))), Type("bf16", (8, 16))
    graphs = (
        Graph("prefix", (x,), (("a", ops.linear(x, w)),)),
        Graph("denoise", (x,), (("b", ops.linear(x, weight(name, v))),)),
    )
    return Module("m", graphs, schedule=(Run("prefix"), Repeat(rounds, "k", (Run("denoise"),))))


def test_every_site_and_round_of_the_model_is_wanted() -> None:
    from frtc.passes.sites import sites_of

    made().require_sites(sites_of(module()))
    for rounds in (2, 4):
        refused("scales.rounds", made().require_sites, sites_of(module(rounds)))
    refused("scales.site", made().require_sites, sites_of(module(name="denoise.in")))
    leaf = tensor("scale:denoise.out", Type("f32", (3,)))
    made().require_leaves([ops.mul(leaf, 2.0)])
    refused("scales.rounds", made().require_leaves, [tensor("scale:denoise.out", Type("f32", (4,)))])
    refused("scales.rounds", made().require_leaves, [tensor("scale:prefix.q|k", Type("f32", (1,)))])
    refused("scales.site", made().require_leaves, [tensor("scale:other", Type("f32", ()))])


def test_ir_counts_without_locations() -> None:
    assert ir_digest(module()) == ir_digest(module())
    assert ir_digest(module()) != ir_digest(module(4)), "steps"
    assert ir_digest(module()) != ir_digest(module(name="other"))


def opened(*files: Path) -> Any:
    return SimpleNamespace(checkpoint=SimpleNamespace(files=files))


def test_every_byte_of_the_weights_counts(tmp_path: Path) -> None:
    """One bit at the end of the second chunk, another size, another order; not the name."""
    one, two = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    data = bytearray(np.random.default_rng(0).bytes(CHUNK + 5))
    one.write_bytes(data)
    two.write_bytes(b"x")
    whole = weights_digest(weight_files(opened(one, two)))
    data[-1] ^= 1
    one.write_bytes(data)
    assert (changed := weights_digest([one, two])) != whole
    one.write_bytes(data + b"\0")
    assert weights_digest([one, two]) not in (whole, changed)
    one.write_bytes(data)
    one.rename(tmp_path / "renamed.safetensors")
    assert weights_digest([tmp_path / "renamed.safetensors", two]) == changed
    refused("checkpoint.read", weights_digest, [tmp_path / "missing"])


def test_files_that_weights_come_from(tmp_path: Path) -> None:
    """All data of a JAX tree, not the small files that name it; an adapter's configuration, which has its alpha."""
    tree, adapter = tmp_path / "params", tmp_path / "adapter"
    (tree / "d").mkdir(parents=True)
    adapter.mkdir()
    for path in (tree / "manifest.ocdbt", tree / "_METADATA", tree / "d" / "0", adapter / TENSORS, adapter / CONFIG):
        path.write_bytes(b"x")
    found = weight_files(opened(tree / "_METADATA", tree / "manifest.ocdbt"))
    assert [p.name for p in found] == ["_METADATA", "0", "manifest.ocdbt"]
    assert weight_files(opened(adapter / TENSORS)) == [adapter / TENSORS, adapter / CONFIG]


# --- hostile files -----------------------------------------------------------------------------------------------


def edited(path: Path, tensors: Callable[[dict[str, Array]], Any], about: Callable[[dict[str, Any]], Any]) -> None:
    """The file with other tensors and another description."""
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    said = json.loads(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"][ENTRY])
    held = load_file(path)
    tensors(held)
    about(said)
    save_file(held, path, {ENTRY: json.dumps(said)})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -1.0])
def test_a_scale_that_is_no_positive_number(tmp_path: Path, value: float) -> None:
    path = tmp_path / "f.scales"
    scales = made()
    scales.values["denoise.out"][2] = value
    write_scales(path, scales)
    fault = refused("scales.value", read_scales, path)
    assert ("site", "denoise.out, round 2") in fault.rows


EDITS: dict[str, tuple[str, Callable[[dict[str, Array]], Any], Callable[[dict[str, Any]], Any]]] = {
    "version": ("scales.version", lambda t: None, lambda a: a.update(version=VERSION + 1)),
    "no version": ("scales.version", lambda t: None, lambda a: a.pop("version")),
    "a scale": ("scales.format", lambda t: t["scale"].__setitem__(0, 9.0), lambda a: None),
    "two sites exchanged": ("scales.format", lambda t: t.update(scale=np.roll(t["scale"], 1)), lambda a: None),
    "fewer rows": ("scales.format", lambda t: t.update(scale=t["scale"][:-1]), lambda a: None),
    "no counts": ("scales.format", lambda t: t.pop("counts"), lambda a: None),
    "negative counts": ("scales.format", lambda t: t["counts"].__imul__(-1), lambda a: None),
    "other types": ("scales.format", lambda t: t.update(scale=t["scale"].astype(np.float64)), lambda a: None),
    "noise of NaN": ("scales.format", lambda t: t["noise"].__setitem__((0, 0), np.nan), lambda a: None),
    "no noise": ("scales.format", lambda t: t.pop("noise"), lambda a: None),
    "bins beyond": ("scales.format", lambda t: None, lambda a: a.update(first_bin=4000)),
    "more rounds": ("scales.format", lambda t: None, lambda a: a["sites"][1].update(rounds=4)),
    "no rounds": ("scales.format", lambda t: None, lambda a: a["sites"][1].update(rounds=-3)),
    "endless rounds": ("scales.format", lambda t: None, lambda a: a["sites"][1].update(rounds=10**18)),
    "a site twice": ("scales.format", lambda t: None, lambda a: a["sites"][1].update(name="prefix.q|k")),
    "another name": ("scales.format", lambda t: None, lambda a: a["sites"][1].update(name="denoise.in")),
    "a name of no text": ("scales.format", lambda t: None, lambda a: a["sites"][1].update(name=3)),
    "synthetic hidden": ("scales.format", lambda t: None, lambda a: a.update(synthetic=[])),
    "no key": ("scales.format", lambda t: None, lambda a: a.pop("key")),
    "sites of no list": ("scales.format", lambda t: None, lambda a: a.update(sites=7)),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_file(tmp_path: Path, what: str) -> None:
    path = tmp_path / "f.scales"
    write_scales(path, made(synthetic=("noise",)))
    code, tensors, about = EDITS[what]
    edited(path, tensors, about)
    refused(code, read_scales, path)


def test_a_file_that_is_cut_off_or_another(tmp_path: Path) -> None:
    path = tmp_path / "f.scales"
    write_scales(path, made())
    whole = path.read_bytes()
    for length in (0, 4, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused("scales.format", read_scales, path)
    save_file({"w": np.zeros(3, np.float32)}, path)
    refused("scales.format", read_scales, path)
    save_file({"w": np.zeros(3, np.float32)}, path, {ENTRY: "[" * 100_000})
    refused("scales.format", read_scales, path)
    refused("scales.read", read_scales, tmp_path / "missing")
    refused("scales.read", read_scales, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    refused("scales.read", read_scales, tmp_path / "pipe")


def test_where_a_file_may_go(tmp_path: Path) -> None:
    path = tmp_path / "f.scales"
    require_place(path)
    write_scales(path, made())
    require_place(path)
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    refused("output.exists", require_place, tmp_path / "model.safetensors")
    refused("output.folder", require_place, tmp_path)
    refused("output.folder", require_place, tmp_path / "none" / "f.scales")
    refused("output.write", write_scales, tmp_path / "none" / "f.scales", made())
