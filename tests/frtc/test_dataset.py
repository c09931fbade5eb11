"""Recorded observations: both layouts of LeRobot datasets and .npz give the same frames, and what is wrong is named."""

from __future__ import annotations

import json
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frtc.dataset import Data, Wanted, match, open_data, spread
from frtc.dataset_footer import read_footer, unpacked
from frtc.dataset_format import Place
from frtc.dataset_info import Info
from frtc.dataset_video import still, video_frame
from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.runtime.policy import Camera, Images, Noise, Norm, Policy, Prompt, State, Tokens
from tests.frtc.made_datasets import (
    DIM,
    FPS,
    LENGTHS,
    SIZES,
    TASKS,
    npz_arrays,
    png,
    recording,
    table,
    video,
    write_npz,
    write_v2,
    write_v3,
)

FRONT, WRIST = SIZES
FIXTURES = Path(__file__).parents[1] / "fixtures" / "datasets"
CAMERAS = (Camera("front", FRONT), Camera("wrist", WRIST))
WANTED = Wanted(CAMERAS, DIM, True)
MADE = recording()
FRAMES = sum(LENGTHS)
TABLE_2 = "data/chunk-000/episode_000000.parquet"
WRITERS: dict[str, Callable[[Path], Path]] = {
    "v2.0": lambda root: write_v2(root, MADE, version="v2.0"),
    "v2.1": lambda root: write_v2(root, MADE),
    "v2.1 pictures": lambda root: write_v2(root, MADE, embed=True),
    "v3.0": lambda root: write_v3(root, MADE),
    "v3.0 pictures": lambda root: write_v3(root, MADE, embed=True),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Read-only datasets, by the name of their writer; and the .npz."""
    folder = tmp_path_factory.mktemp("datasets")
    found = {name: write(folder / name.replace(" ", "_")) for name, write in WRITERS.items()}
    return found | {"npz": write_npz(folder / "observations.npz", MADE)}


def of_all(data: Data) -> list[dict[str, Any]]:
    return list(data.samples(data.frames))


def refused(code: str, path: Path, wanted: Wanted = WANTED, n: int = 3) -> str:
    """The message of opening and sampling."""
    with pytest.raises(FrtcError) as fault:
        list(open_data(path, wanted).samples(n))
    assert fault.value.code == code, str(fault.value)
    return str(fault.value)


def edited(root: Path, **fields: Any) -> Path:
    """Other fields in info.json."""
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return root


def with_column(path: Path, name: str, values: Any) -> None:
    found = pq.read_table(path)
    at = found.schema.get_field_index(name)
    pq.write_table(found.remove_column(at) if values is None else found.set_column(at, name, values), path)


# What is read


@pytest.mark.parametrize("name", [*WRITERS, "npz"])
def test_every_frame_is_what_was_recorded(written: dict[str, Path], name: str) -> None:
    data = open_data(written[name], WANTED)
    assert data.kind == ("npz" if name == "npz" else f"LeRobot {name.split()[0]}") and data.frames == FRAMES
    frames = [MADE.starts()[place.episode] + place.frame for place in data.places(FRAMES)]
    assert frames == list(range(FRAMES))
    for seen, i in zip(of_all(data), frames, strict=True):
        episode = next(e for e, start in reversed(list(enumerate(MADE.starts()))) if start <= i)
        assert list(seen) == ["front", "wrist", "state", "prompt"]
        np.testing.assert_array_equal(seen["front"], MADE.pictures[FRONT][i])
        np.testing.assert_array_equal(seen["wrist"], MADE.pictures[WRIST][i])
        np.testing.assert_array_equal(seen["state"], MADE.state[i])
        assert seen["state"].dtype == np.float32 and seen["prompt"] == MADE.prompt(episode)


def test_a_dataset_of_lerobot_s_own_gives_the_frames_that_lerobot_reads() -> None:
    read = np.load(FIXTURES / "lerobot_v3_read.npz", allow_pickle=False)
    data = open_data(FIXTURES / "lerobot_v3", WANTED)
    assert data.kind == "LeRobot v3.0" and list(data.format.lengths) == [4, 6, 5]
    for i, seen in enumerate(of_all(data)):
        np.testing.assert_array_equal(seen["state"], read["state"][i])
        np.testing.assert_array_equal(seen["wrist"], read[WRIST][i])
        assert np.abs(seen["front"].astype(int) - read[FRONT][i]).max() <= 1  # FFmpeg's conversion from yuv may round
        assert seen["prompt"] == read["prompt"][i]


def test_what_a_policy_wants() -> None:
    state, tokens = State(DIM, Norm("identity"), 32), Tokens(48, 2, 0, 100, "0" * 64)
    steps = (Images(CAMERAS, 28, "pil_bilinear", 0), state, Prompt("none", "{prompt}"), tokens, Noise(4, 32))
    assert Wanted.of(Policy(steps, ())) == WANTED
    assert Wanted.of(Policy((Noise(4, 32),), ())) == Wanted((), None, False)


@pytest.mark.parametrize("name", ["v2.1", "v3.0 pictures", "npz"])
def test_only_what_is_wanted_is_read(written: dict[str, Path], name: str) -> None:
    (seen,) = open_data(written[name], Wanted(CAMERAS[1:], None, False)).samples(1)
    assert list(seen) == ["wrist"]


def test_frames_come_as_the_policy_declares_them(written: dict[str, Path]) -> None:
    wanted = Wanted((Camera("front", FRONT, "chw", "bgr8"), Camera("wrist", WRIST, "hwc", "rgb01")), None, False)
    first = next(iter(open_data(written["v2.1"], wanted).samples(FRAMES)))
    np.testing.assert_array_equal(first["front"], MADE.pictures[FRONT][0][..., ::-1].transpose(2, 0, 1))
    np.testing.assert_array_equal(first["wrist"], MADE.pictures[WRIST][0].astype(np.float32) / np.float32(255))


def test_pictures_may_be_jpeg(tmp_path: Path) -> None:
    root, frame = write_v2(tmp_path / "d", MADE, embed=True), MADE.pictures[FRONT][3][:, :20]
    smooth = np.repeat(frame[:, :1], SIZES[FRONT][1], axis=1)
    encoded = {"bytes": png(smooth, "mjpeg", "yuvj444p"), "path": "a.jpg"}
    with_column(root / TABLE_2, FRONT, pa.array([encoded] * LENGTHS[0]))
    seen = next(iter(open_data(root, WANTED).samples(FRAMES)))["front"]
    assert np.abs(seen.astype(int) - smooth).mean() < 6


def test_names_of_openpi_s_conversions_and_vectors_of_length_one(tmp_path: Path) -> None:
    """`state` for observation.state; lerobot stores a vector of length 1 as a number."""
    root = write_v2(tmp_path / "d", MADE, embed=True)
    found = json.loads((root / "meta/info.json").read_text())["features"]
    edited(root, features={**found, "state": {"dtype": "float32", "shape": [1], "names": None}})
    features = json.loads((root / "meta/info.json").read_text())["features"]
    del features["observation.state"]
    edited(root, features=features)
    for path in root.glob("data/*/*.parquet"):
        lines = pq.read_table(path)
        pq.write_table(lines.append_column("state", pa.array([0.5] * len(lines), pa.float32())), path)
    (seen,) = open_data(root, Wanted((), 1, False)).samples(1)
    np.testing.assert_array_equal(seen["state"], np.array([0.5], np.float32))


# Which frames


def test_samples_are_the_same_each_time_and_differ_by_seed(written: dict[str, Path]) -> None:
    data = open_data(written["npz"], WANTED)
    assert data.places(5) == data.places(5) and data.places(5) != data.places(5, seed=1)
    for a, b in zip(data.samples(5), data.samples(5), strict=True):
        np.testing.assert_array_equal(a["front"], b["front"])


@pytest.mark.parametrize("seed", [0, 1, 2, 99, -3])
@pytest.mark.parametrize("lengths", [(100,) * 8, (3, 500, 1, 0, 77), (1,) * 50, (1000,), (7, 5)])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 12])
def test_samples_are_spread_evenly(lengths: tuple[int, ...], n: int, seed: int) -> None:
    places = spread(lengths, n, seed)
    assert len(set(places)) == n and places == sorted(places, key=lambda p: (p.episode, p.frame))
    assert all(0 <= p.frame < lengths[p.episode] for p in places)
    counts = [sum(p.episode == e for p in places) for e in range(len(lengths))]
    free = [c for c, length in zip(counts, lengths, strict=True) if c < length]
    assert not free or max(counts) - min(free) <= 1  # those that are not used up have equal shares
    for e, length in enumerate(lengths):
        own = [p.frame for p in places if p.episode == e]
        assert all(abs((b - a) - length / len(own)) < 1 for a, b in pairwise(own))  # equal distances


def test_one_frame_of_each_episode_covers_all_of_the_time() -> None:
    shares = sorted(p.frame / 1000 for p in spread((1000,) * 16, 16, 0))
    assert max(b - a for a, b in pairwise([0.0, *shares, 1.0])) < 0.17  # 1/16 were perfect, 0.3 is usual by chance
    assert spread((4, 4), 8, 5) == [Place(e, f) for e in (0, 1) for f in range(4)]


def test_more_samples_than_frames(written: dict[str, Path]) -> None:
    with pytest.raises(UsageError) as fault:
        open_data(written["v3.0"], WANTED).places(FRAMES + 1)
    assert fault.value.code == "dataset.samples" and f"{FRAMES} frames in 3 episodes" in str(fault.value)


# Which camera is which


KEYS = ("observation.images.front", "observation.images.wrist", "top")


@pytest.mark.parametrize(
    "cameras, given, found",
    [
        ([("front", "x"), ("wrist", "y")], (), [KEYS[0], KEYS[1]]),  # a role is the key's last part
        ([("top", "x")], (), ["top"]),
        ([("base", KEYS[1])], (), [KEYS[1]]),  # the checkpoint's own name
        ([("observation.images.wrist", "y")], (), [KEYS[1]]),
        ([("base", "base_0_rgb")], (("base", "top"),), ["top"]),
        ([("front", KEYS[1])], (("front", KEYS[0]),), [KEYS[0]]),
    ],
)
def test_cameras_are_matched_by_name(cameras: Any, given: Any, found: list[str]) -> None:
    assert list(match([Camera(*camera) for camera in cameras], KEYS, given).values()) == found


@pytest.mark.parametrize(
    "cameras, given, said",
    [
        ([("fron", "base_0_rgb")], (), "the data have no camera fron"),
        # a checkpoint that renames cameras: by role this is one picture, by the checkpoint's key another
        ([("front", KEYS[1])], (), f"camera front could be {KEYS[0]} or {KEYS[1]}"),
        ([("front", "x"), ("base", KEYS[0])], (), f"cameras front, base would be one, {KEYS[0]}"),
        ([("base", "x")], (("base", "side"),), "base=side fits nothing"),
        ([("base", "x")], (("case", "top"),), "case=top fits nothing"),
        ([("base", "x")], (("base", "top"), ("base", KEYS[0])), "a role twice"),
    ],
)
def test_cameras_are_never_guessed(cameras: Any, given: Any, said: str) -> None:
    with pytest.raises(UsageError) as fault:
        match([Camera(*camera) for camera in cameras], KEYS, given)
    text = str(fault.value)
    assert fault.value.code == "dataset.cameras" and said in text and "--data-camera ROLE=KEY" in text
    assert all(key in text for key in KEYS) and cameras[0][0] in text


def test_unknown_cameras_show_both_lists_and_the_nearest(written: dict[str, Path]) -> None:
    said = refused("dataset.cameras", written["npz"], Wanted((Camera("images.fron", "base_0_rgb"),), None, False))
    assert "images.fron (base_0_rgb)" in said and "images.front, images.wrist" in said and "nearest" in said


# Streams


def test_of_a_video_only_the_frames_before_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (200, 64, 64, 3), np.uint8)
    path = tmp_path / "a.mp4"
    video(path, frames)
    read, real = [], Path.open

    def counting(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = real(self, *args, **kwargs)

        class File:
            def read(self, size: int = -1) -> bytes:
                read.append(len(data := file.read(size)))
                return data

            def __enter__(self) -> File:
                return self

            def __exit__(self, *fault: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return File()

    monkeypatch.setattr(Path, "open", counting)
    np.testing.assert_array_equal(video_frame(path, 15.0, FPS), frames[150])
    assert path.stat().st_size > 2_000_000 and 0 < sum(read) < path.stat().st_size / 4


def test_of_an_npz_one_row_is_in_memory(tmp_path: Path) -> None:
    frames = np.zeros((400, 128, 128, 3), np.uint8) + np.arange(128, dtype=np.uint8)[:, None, None]  # 20 MB
    np.savez_compressed(tmp_path / "a.npz", front=frames)
    data = open_data(tmp_path / "a.npz", Wanted((Camera("front", "x"),), None, False))
    tracemalloc.start()
    for seen in data.samples(8):
        assert seen["front"].shape == (128, 128, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < frames.nbytes / 5


def test_of_a_table_a_few_rows_are_in_memory(tmp_path: Path) -> None:
    """One row group of 40 MB, as lerobot writes them: Arrow would load it whole."""
    made = recording((40,))
    root = write_v2(tmp_path / "d", made, embed=True)
    lines = pq.read_table(root / TABLE_2)
    noise = np.random.default_rng(0)
    padded = [{"bytes": png(made.pictures[FRONT][i]) + noise.bytes(1_000_000), "path": ""} for i in range(40)]
    lines = lines.set_column(lines.schema.get_field_index(FRONT), FRONT, pa.array(padded))
    pq.write_table(lines, root / TABLE_2, write_batch_size=1, data_page_size=1, use_dictionary=False)
    del lines, padded
    pool = pa.system_memory_pool()
    before, default = pool.max_memory(), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        (seen,) = open_data(root, Wanted(CAMERAS[:1], None, False)).samples(1)
    finally:
        pa.set_memory_pool(default)
    assert seen["front"].shape == (*SIZES[FRONT], 3) and pool.max_memory() - before < 20_000_000


# What is refused: both layouts


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_no_episodes_and_no_frames(tmp_path: Path, write: Any) -> None:
    refused("dataset.empty", write(tmp_path / "none", recording((0, 0))))
    root = write(tmp_path / "d", MADE)
    if write is write_v2:
        (root / "meta/episodes.jsonl").write_text("")
    else:
        (root / "meta/episodes/chunk-000/file-000.parquet").unlink()
    assert "no episodes" in refused("dataset.empty", root)


@pytest.mark.parametrize("write, path", [(write_v2, TABLE_2), (write_v3, "data/chunk-000/file-000.parquet")])
def test_damaged_tables(tmp_path: Path, write: Any, path: str) -> None:
    root = write(tmp_path / "d", MADE)
    whole = (root / path).read_bytes()
    for broken in (b"", b"PAR1", whole[: len(whole) // 2], whole[:-4] + b"JUNK", b"\x80\x04pickle" * 9):
        (root / path).write_bytes(broken)
        assert str(root / path) in refused("dataset.parquet", root)
    (root / path).unlink()
    assert f"there is no {root / path}" in refused("dataset.parquet", root)


def video_of(root: Path) -> Path:
    return min(p for p in root.rglob("*.mp4") if FRONT in str(p))


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_videos_that_cannot_be_decoded(tmp_path: Path, write: Any) -> None:
    root = write(tmp_path / "d", MADE)
    path = video_of(root)
    whole = path.read_bytes()
    for broken in (b"", b"junk" * 99, whole[: len(whole) // 2], b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"):
        path.write_bytes(broken)
        assert f"{path} at 0.000 s" in refused("dataset.video", root, n=FRAMES)
    path.unlink()
    assert "No such file" in refused("dataset.video", root, n=FRAMES)


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_damage_inside_a_video_is_not_painted_over(tmp_path: Path, write: Any) -> None:
    root = write(tmp_path / "d", MADE)
    path = video_of(root)
    with av.open(str(path)) as container:
        at = [packet.pos for packet in container.demux(video=0) if packet.size][2]
    data = bytearray(path.read_bytes())
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    np.testing.assert_array_equal(video_frame(path, 0.0, FPS), MADE.pictures[FRONT][0])
    assert f"{path} at 0." in refused("dataset.video", root, n=FRAMES)


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_a_video_that_is_shorter_than_its_episode(tmp_path: Path, write: Any) -> None:
    root = write(tmp_path / "d", MADE)
    video(video_of(root), MADE.pictures[FRONT][:2])
    assert "has no frame: the nearest is at 0.100 s" in refused("dataset.video", root, n=FRAMES)


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_a_timestamp_of_another_episode(tmp_path: Path, write: Any) -> None:
    """In a v3 video the next episode follows: its pictures would be taken silently."""
    root = write(tmp_path / "d", MADE)
    path = next(iter(sorted(root.glob("data/**/*.parquet"))))
    found = pq.read_table(path)
    with_column(path, "timestamp", pa.array([9.0] * len(found), pa.float32()))
    assert "outside its episode" in refused("dataset.video", root)
    with_column(path, "timestamp", pa.array([float("nan")] * len(found), pa.float32()))
    refused("dataset.video", root)


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_pictures_of_another_size(tmp_path: Path, write: Any) -> None:
    root = write(tmp_path / "d", MADE)
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features[FRONT]["shape"] = [32, 64, 3]
    assert "[32, 48, 3]" in refused("dataset.shape", edited(root, features=features))


@pytest.mark.parametrize("write", [write_v2, write_v3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
def test_a_state_that_is_no_number(tmp_path: Path, write: Any, bad: float) -> None:
    root = write(tmp_path / "d", MADE)
    path = next(iter(sorted(root.glob("data/**/*.parquet"))))
    states = pq.read_table(path)["observation.state"].to_pylist()
    states[1][2] = bad
    with_column(path, "observation.state", pa.array(states, pa.list_(pa.float64())))
    said = refused("dataset.value", root, n=FRAMES)
    assert "episode 0, frame 1" in said and "at    2" in said


@pytest.mark.parametrize(
    "column", [["text"] * 5, [[1.0, None, 2.0, 3.0]] * 5, [[[1.0] * 4]] * 5, [None] * 5, [[1.0]] * 5, [[]] * 5]
)
def test_a_state_of_another_form(tmp_path: Path, column: Any) -> None:
    root = write_v2(tmp_path / "d", MADE)
    with_column(root / TABLE_2, "observation.state", pa.array(column))
    assert "episode 0" in refused("dataset.shape", root)


def test_a_robot_with_another_number_of_joints(written: dict[str, Path]) -> None:
    for name in ("v2.1", "v3.0", "npz"):
        said = refused("dataset.shape", written[name], Wanted((), DIM + 1, False))
        assert f"[{DIM}]" in said and f"{DIM + 1} numbers" in said


@pytest.mark.parametrize("write", [write_v2, write_v3])
def test_missing_task_texts(tmp_path: Path, write: Any) -> None:
    root = write(tmp_path / "d", MADE)
    path = next(iter(sorted(root.glob("data/**/*.parquet"))))
    count = len(pq.read_table(path))
    for wrong in (pa.array([7] * count), pa.array([None] * count, pa.int64()), pa.array([[0]] * count)):
        with_column(path, "task_index", wrong)
        assert "episode 0" in refused("dataset.task", root)
    with_column(path, "task_index", None)
    assert "no column task_index" in refused("dataset.parquet", root)


def test_blank_task_texts(tmp_path: Path) -> None:
    root = write_v2(tmp_path / "v2", MADE)
    (root / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": " "}\n')
    refused("dataset.task", root)
    root = write_v3(tmp_path / "v3", MADE)
    table(root / "meta/tasks.parquet", {"task_index": [0, 1], "task": ["", TASKS[1]]})
    refused("dataset.task", root)
    table(root / "meta/tasks.parquet", {"task_index": ["0", "1"], "task": list(TASKS)})
    refused("dataset.metadata", root)


@pytest.mark.parametrize("version", ["v1.6", "v4.0", "3.0", "", 3, None])
def test_unknown_versions(tmp_path: Path, version: Any) -> None:
    said = refused("dataset.version", edited(write_v2(tmp_path / "d", MADE), codebase_version=version))
    assert repr(version) in said and "v2.0, v2.1, v3.0" in said


@pytest.mark.parametrize(
    "template",
    [
        "../../etc/{episode_index}.parquet",
        "/etc/passwd",
        "data/../../{episode_index}",
        "..",
        "data\\..\\x",
        "data/\0",
    ],
)
@pytest.mark.parametrize("field", ["data_path", "video_path"])
def test_paths_that_leave_the_dataset(tmp_path: Path, field: str, template: str) -> None:
    assert "leaves the dataset" in refused("dataset.path", edited(write_v2(tmp_path / "d", MADE), **{field: template}))


@pytest.mark.parametrize(
    "template",
    [
        "data/{episode_index.__class__}",
        "data/{episode_index:999999999d}",
        "data/{0}",
        "data/{secret}",
        "data/{{x}",
        "",
        None,
        7,
    ],
)
def test_templates_are_only_filled_with_numbers_and_names(tmp_path: Path, template: Any) -> None:
    refused("dataset.metadata", edited(write_v2(tmp_path / "d", MADE), data_path=template))


def test_a_camera_s_name_cannot_leave_the_dataset(tmp_path: Path) -> None:
    root, name = write_v2(tmp_path / "d", MADE), "../../../secret"
    feature = {"dtype": "video", "shape": [32, 48, 3], "names": None}
    refused("dataset.path", edited(root, features={name: feature}), Wanted((Camera(name, "x"),), None, False))


@pytest.mark.parametrize(
    "fields",
    [
        {"fps": 0},
        {"fps": "10"},
        {"fps": float("nan")},
        {"fps": None},
        {"features": [1]},
        {"features": {"a": 1}},
        {"features": {"a": {"dtype": "video", "shape": [1, 2]}}},
        {"features": {"a": {"dtype": "image", "shape": "big"}}},
        {"chunks_size": 0},
        {"video_path": None},
    ],
)
def test_fields_of_info_without_a_sensible_value(tmp_path: Path, fields: Any) -> None:
    refused("dataset.metadata", edited(write_v2(tmp_path / "d", MADE), **fields))


def test_side_files_that_are_no_json(tmp_path: Path) -> None:
    root = write_v2(tmp_path / "d", MADE)
    good = {name: (root / "meta" / name).read_text() for name in ("info.json", "episodes.jsonl", "tasks.jsonl")}
    for name, text in good.items():
        path = root / "meta" / name
        for broken in (b"{", b"[1]", b"\xff\xfe{}", b"[" * 100_000, b'{"episode_index": 3, "length": 2}')[
            : 5 if name != "info.json" else 4
        ]:
            path.write_bytes(broken)
            refused("dataset.metadata", root)
        path.unlink()
        refused("dataset.not_found" if name == "info.json" else "dataset.metadata", root)
        path.write_text(text)
    assert open_data(root, WANTED).frames == FRAMES


@pytest.mark.parametrize("length", [-1, 1.5, "5", True, None, 1 << 40])
def test_lengths_of_episodes(tmp_path: Path, length: Any) -> None:
    root = write_v2(tmp_path / "d", MADE)
    (root / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "length": length}) + "\n")
    refused("dataset.metadata", root)


def test_an_episode_that_is_longer_in_meta_than_in_its_table(tmp_path: Path) -> None:
    root = write_v2(tmp_path / "d", MADE)
    (root / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "length": 50}) + "\n")
    assert "has no episode 0, frame" in refused("dataset.parquet", root)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 1e300, None])
def test_where_a_v3_video_s_episodes_begin(tmp_path: Path, value: Any) -> None:
    root = write_v3(tmp_path / "d", MADE)
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    with_column(path, f"videos/{FRONT}/from_timestamp", pa.array([value] * 3, pa.float64()))
    refused("dataset.metadata", root)


def test_columns_that_a_v3_dataset_lacks(tmp_path: Path) -> None:
    root = write_v3(tmp_path / "d", MADE)
    with_column(root / "meta/episodes/chunk-000/file-000.parquet", "data/file_index", None)
    assert "no column data/file_index" in refused("dataset.parquet", root)


# What is refused: pictures in tables, and what exhausts the machine


def huge_png() -> bytes:
    """30000 x 30000 pixels in a few bytes: the header alone."""
    whole = bytearray(png(MADE.pictures[FRONT][0]))
    whole[16:24] = (30000).to_bytes(4, "big") * 2
    import zlib

    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4, "big")
    return bytes(whole)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF89a",
        b"\x80\x04\x95",
        b"#EXTM3U\nfile:///etc/passwd",
        png(MADE.pictures[FRONT][0])[:60],
        png(MADE.pictures[FRONT][0])[:-40],
        png(MADE.pictures[FRONT][0], "mjpeg", "yuvj444p")[:-60],
        huge_png(),
    ],
)
def test_pictures_that_cannot_be_decoded(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FrtcError) as fault:
        still(data, "here")
    assert fault.value.code == "dataset.image" and str(fault.value).startswith("error[dataset.image]: here")


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": "images/a.png"}, "text", 5])
def test_tables_without_pictures(tmp_path: Path, cell: Any) -> None:
    root = write_v2(tmp_path / "d", MADE, embed=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if not isinstance(cell, str | int) else None
    with_column(root / TABLE_2, FRONT, pa.array([cell] * LENGTHS[0], kind))
    refused("dataset.image", root)


def test_a_side_file_of_gigabytes(tmp_path: Path) -> None:
    root = write_v2(tmp_path / "d", MADE)
    with (root / "meta/tasks.jsonl").open("wb") as file:
        file.truncate(1 << 33)  # sparse
    refused("dataset.size", root)


def test_a_column_that_unpacks_to_more_than_a_recording_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of 50000 numbers in a hundred bytes, and a footer that denies it."""
    root, path, count = write_v2(tmp_path / "d", MADE), tmp_path / "d" / TABLE_2, 50_000
    lines = {name: [0] for name in ("frame_index", "episode_index", "task_index")}
    pq.write_table(pa.table({"observation.state": [[0.0] * count], "timestamp": [0.0], **lines}), path)
    refused("dataset.parquet", root)  # it is read, and lacks frames
    monkeypatch.setattr("frtc.dataset_parquet.VALUES", count - 1)
    honest, claim = path.read_bytes(), varint(2 * count)
    start = len(honest) - int.from_bytes(honest[-8:-4], "little")
    small = b"\x8a" + b"\x80" * (len(claim) - 2) + b"\x00"
    lie = honest[:start] + honest[start:].replace(claim, small)
    for data in (honest, lie):
        path.write_bytes(data)
        assert "observation.state.list.element claims 500" in refused("dataset.size", root)
    with path.open("rb") as file:
        assert honest != lie and unpacked(file, read_footer(path)[0].columns[0])[1] < 200


def varint(value: int) -> bytes:
    """As Thrift's compact protocol writes it."""
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_what_pages_unpack_to(tmp_path: Path, version: Any, compression: str) -> None:
    lines = pa.table({"a.b": [[1.5, 2.5]] * 1000, "c": [{"bytes": b"x" * 50, "path": "p"}] * 1000})
    path = tmp_path / "a.parquet"
    pq.write_table(lines, path, row_group_size=600, data_page_size=400, write_batch_size=10, compression=compression,
                   data_page_version=version)  # fmt: skip
    groups = read_footer(path)
    assert [group.rows for group in groups] == [600, 400]
    assert [column.path for column in groups[0].columns] == ["a.b.list.element", "c.bytes", "c.path"]
    for group, rows in zip(groups, (600, 400), strict=True):
        with path.open("rb") as file:
            found = [unpacked(file, column) for column in group.columns]
        assert [values for values, _ in found] == [2 * rows + 2, rows + 1, rows + 1]  # the dictionary's entries, too
        told = pq.read_metadata(path).row_group(groups.index(group))
        for i, (_, size) in enumerate(found):
            assert 0 < size < told.column(i).total_uncompressed_size  # which counts the pages' headers, too


@pytest.mark.parametrize("where", ["v2.1", "v3.0", "v3.0 pictures", "npz"])
def test_flipped_bytes_give_frames_or_an_error_with_a_code(
    written: dict[str, Path], tmp_path: Path, where: str
) -> None:
    root = write_npz(tmp_path / "d.npz", MADE) if where == "npz" else WRITERS[where](tmp_path / "d")
    files = [root] if root.is_file() else [p for p in sorted(root.rglob("*")) if p.is_file()]
    bits, codes = np.random.default_rng(5), set()
    for i in range(60):
        path = files[i % len(files)]
        whole = path.read_bytes()
        broken = bytearray(whole)
        for at in bits.integers(0, len(whole), 3):
            broken[at] = bits.integers(256)
        path.write_bytes(broken)
        try:
            for seen in open_data(root, WANTED).samples(4):
                assert seen["front"].shape == (*SIZES[FRONT], 3)
        except FrtcError as fault:
            assert fault.code.startswith("dataset.")
            codes.add(fault.code)
        path.write_bytes(whole)
    assert len(codes) >= (1 if where == "npz" else 2), codes


# What is refused: .npz


def arrays(**other: Any) -> dict[str, Any]:
    return {name: value for name, value in (npz_arrays(MADE) | other).items() if value is not None}


@pytest.mark.parametrize(
    "code, changed, said",
    [
        ("dataset.npz", {"state": np.array([{}] * FRAMES, object)}, "Python objects"),
        ("dataset.npz", {"images.front": np.asfortranarray(MADE.pictures[FRONT])}, "Fortran order"),
        ("dataset.shape", {"images.front": MADE.pictures[FRONT].astype(np.float32)}, "float32[32, 48, 3]"),
        ("dataset.shape", {"images.front": MADE.pictures[FRONT].transpose(0, 3, 1, 2)}, "uint8[3, 32, 48]"),
        ("dataset.shape", {"images.front": MADE.pictures[FRONT][:5]}, "different numbers of rows"),
        ("dataset.shape", {"state": MADE.state[:, 0]}, "not numbers [N, D]"),
        ("dataset.shape", {"state": MADE.state > 0}, "not numbers [N, D]"),
        ("dataset.shape", {"state": None}, "no array state"),
        ("dataset.shape", {"prompt": np.zeros(FRAMES)}, "not text [N]"),
        ("dataset.task", {"prompt": None}, "no array prompt"),
        ("dataset.task", {"prompt": np.array([""] * FRAMES)}, "no task text"),
        ("dataset.value", {"state": np.full_like(MADE.state, np.nan)}, "0, 1, 2, 3"),
        ("dataset.empty", {n: v[:0] for n, v in npz_arrays(MADE).items()}, "no frames"),
    ],
)
def test_npz_files_that_are_no_observations(tmp_path: Path, code: str, changed: Any, said: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays(**changed))
    assert said in refused(code, tmp_path / "a.npz")


def test_damaged_npz_files(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", MADE)
    whole = path.read_bytes()
    for broken in (b"", b"PK\x03\x04", whole[: len(whole) // 2], b"\x80\x04pickle" * 9):
        path.write_bytes(broken)
        refused("dataset.npz", path)
    np.save(tmp_path / "a.npy", MADE.state)
    (tmp_path / "a.npy").rename(path)
    refused("dataset.npz", path)


def test_an_npz_whose_header_lies(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        head = {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 4096, 4096, 3)}
        with archive.open("front.npy", "w") as file:
            np.lib.format.write_array_header_1_0(file, head)
    refused("dataset.npz", tmp_path / "a.npz", Wanted((Camera("front", "x"),), None, False))


def test_pictures_that_are_no_camera_s(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", front=np.zeros((1, 8200, 8200, 3), np.uint8))
    said = refused("dataset.size", tmp_path / "a.npz", Wanted((Camera("front", "x"),), None, False))
    assert "8200 x 8200" in said


# What is refused: paths and packages


def test_pages_with_long_statistics(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.parquet", [chr(97 + i) * 3000 for i in range(4)]
    pq.write_table(pa.table({"a": texts}), path, use_dictionary=False)
    with path.open("rb") as file:
        values, size = unpacked(file, read_footer(path)[0].columns[0])
    assert values == 4 and size >= 12_000


def test_what_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04")
    for name in ("nothing", "a.pkl"):
        refused("dataset.not_found", tmp_path / name)
    refused("dataset.not_found", tmp_path)


@pytest.mark.parametrize("package", ["pyarrow", "av"])
def test_without_the_extra(written: dict[str, Path], monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [n for n in sys.modules if n.startswith("frtc.dataset_") and not n.endswith("format")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentFault) as fault:
        open_data(written["v2.1"], WANTED)
    assert fault.value.code == "env.package" and "pip install 'frtc[data]'" in str(fault.value)
    assert open_data(written["npz"], WANTED).frames == FRAMES  # needs neither


def test_links_are_followed(tmp_path: Path) -> None:
    """As a download cache is made: every file is a link to a blob beside it."""
    root, blobs = write_v2(tmp_path / "d", MADE), tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(p for p in sorted(root.rglob("*")) if p.is_file()):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    assert len(of_all(open_data(root, WANTED))) == FRAMES


def test_files_of_an_episode(written: dict[str, Path]) -> None:
    info = Info.read(written["v2.1"])
    episode = info.episodes()[2]
    assert info.table(episode) == written["v2.1"] / "data/chunk-001/episode_000002.parquet"
    assert info.video(episode, WRIST) == written["v2.1"] / f"videos/chunk-001/{WRIST}/episode_000002.mp4"
    info = Info.read(written["v3.0"])
    episode = info.episodes()[2]
    assert info.table(episode) == written["v3.0"] / "data/chunk-000/file-001.parquet"
    assert info.video(episode, WRIST) == written["v3.0"] / f"videos/{WRIST}/chunk-000/file-001.mp4"
