"""Tiny LeRobot datasets of both layouts, and the same content as .npz: written here by pyarrow and PyAV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.codec.context import CodecContext

FPS = 10
LENGTHS = (5, 3, 6)
SIZES = {"observation.images.front": (32, 48), "observation.images.wrist": (48, 32)}
TASKS = ("fold the towel", "open the drawer")
DIM = 4
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Recording:
    """pictures: camera -> u8 [frames, H, W, 3] of all episodes; state f32 [frames, DIM]; one task per episode."""

    pictures: Mapping[str, Array]
    state: Array
    lengths: tuple[int, ...] = LENGTHS

    def prompt(self, episode: int) -> str:
        return TASKS[episode % 2]

    def starts(self) -> list[int]:
        return [sum(self.lengths[:e]) for e in range(len(self.lengths))]


def recording(lengths: tuple[int, ...] = LENGTHS) -> Recording:
    """Smooth pictures, every one different."""
    n, pictures = sum(lengths), {}
    for k, (name, (height, width)) in enumerate(SIZES.items()):
        y, x = np.mgrid[:height, :width]
        frames = [np.stack([x * 4 + 7 * i, y * 3 + 60 * k, x + y + 11 * i], -1) % 256 for i in range(n)]
        pictures[name] = np.array(frames, np.uint8).reshape(n, height, width, 3)
    state = np.linspace(-1, 1, n * DIM, dtype=np.float32).reshape(n, DIM)
    return Recording(pictures, state, lengths)


def png(frame: Array, codec: str = "png", pixel: str = "rgb24") -> bytes:
    encoder = CodecContext.create(codec, "w")
    encoder.height, encoder.width = frame.shape[:2]
    encoder.pix_fmt, encoder.time_base = pixel, Fraction(1, 1)
    picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=pixel)
    return b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])


def video(path: Path, frames: Array, fps: int = FPS, codec: str = "libx264rgb", pixel: str = "rgb24") -> None:
    """Lossless, a key frame every second frame, as lerobot writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=fps, options={"g": "2", "crf": "0"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixel
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def table(path: Path, columns: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, row_group_size=4)


def columns(made: Recording, episodes: Sequence[int], embed: bool) -> dict[str, Any]:
    """The lines of these episodes."""
    places = [(e, f, made.starts()[e] + f) for e in episodes for f in range(made.lengths[e])]
    found: dict[str, Any] = {
        "observation.state": pa.array([made.state[i] for *_, i in places], pa.list_(pa.float32())),
        "timestamp": pa.array([f / FPS for _, f, _ in places], pa.float32()),
        "frame_index": [f for _, f, _ in places],
        "episode_index": [e for e, *_ in places],
        "index": [i for *_, i in places],
        "task_index": [e % 2 for e, *_ in places],
    }
    for name, pictures in made.pictures.items() if embed else ():
        found[name] = [{"bytes": png(pictures[i]), "path": f"frame_{f:06d}.png"} for _, f, i in places]
    return found


def info(version: str, embed: bool, data_path: str, video_path: str, **more: Any) -> dict[str, Any]:
    kind = {"dtype": "image" if embed else "video", "names": ["height", "width", "channels"]}
    pictures = {name: {**kind, "shape": [*size, 3]} for name, size in SIZES.items()}
    state = {"dtype": "float32", "shape": [DIM], "names": None}
    found = {"codebase_version": version, "fps": FPS, "data_path": data_path, "video_path": video_path}
    return found | {"features": {**pictures, "observation.state": state}} | more


def lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_v2(root: Path, made: Recording, embed: bool = False, version: str = "v2.1") -> Path:
    """A table and a video per episode; two episodes per folder."""
    (root / "meta").mkdir(parents=True)
    tables = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    videos = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    (root / "meta/info.json").write_text(json.dumps(info(version, embed, tables, videos, chunks_size=2)))
    lines(root / "meta/tasks.jsonl", [{"task_index": i, "task": text} for i, text in enumerate(TASKS)])
    rows = [{"episode_index": e, "tasks": [made.prompt(e)], "length": n} for e, n in enumerate(made.lengths)]
    lines(root / "meta/episodes.jsonl", rows)
    for e, (start, length) in enumerate(zip(made.starts(), made.lengths, strict=True)):
        table(root / f"data/chunk-{e // 2:03d}/episode_{e:06d}.parquet", columns(made, [e], embed))
        for name, pictures in made.pictures.items() if not embed else ():
            path = root / f"videos/chunk-{e // 2:03d}/{name}/episode_{e:06d}.mp4"
            video(path, pictures[start : start + length])
    return root


def write_v3(root: Path, made: Recording, embed: bool = False) -> Path:
    """Episodes 0 and 1 share a table and a video; the others share the next ones."""
    tables = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    videos = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    files = [[e for e in range(len(made.lengths)) if (e < 2) == first] for first in (True, False)]
    rows = []
    for number, episodes in enumerate(files):
        frame = 0
        for e in episodes:
            row = {"episode_index": e, "length": made.lengths[e], "data/chunk_index": 0, "data/file_index": number}
            for name in made.pictures if not embed else ():
                times = {"from_timestamp": frame / FPS, "to_timestamp": (frame + made.lengths[e]) / FPS}
                place = {"chunk_index": 0, "file_index": number, **times}
                row |= {f"videos/{name}/{part}": value for part, value in place.items()}
            rows.append({**row, "tasks": [made.prompt(e)]})
            frame += made.lengths[e]
        if episodes:
            table(root / f"data/chunk-000/file-{number:03d}.parquet", columns(made, episodes, embed))
        for name, pictures in made.pictures.items() if episodes and not embed else ():
            start = made.starts()[episodes[0]]
            video(root / f"videos/{name}/chunk-000/file-{number:03d}.mp4", pictures[start : start + frame])
    listed = {name: [row[name] for row in rows] for name in (rows[0] if rows else {"episode_index": 0})}
    table(root / "meta/episodes/chunk-000/file-000.parquet", listed)
    table(root / "meta/tasks.parquet", {"task_index": [0, 1], "__index_level_0__": list(TASKS)})
    (root / "meta/info.json").write_text(json.dumps(info("v3.0", embed, tables, videos)))
    return root


def npz_arrays(made: Recording) -> dict[str, Array]:
    pictures = {name.removeprefix("observation."): frames for name, frames in made.pictures.items()}
    prompts = [made.prompt(e) for e, length in enumerate(made.lengths) for _ in range(length)]
    return {**pictures, "state": made.state, "prompt": np.array(prompts)}


def write_npz(path: Path, made: Recording) -> Path:
    np.savez_compressed(path, **npz_arrays(made))
    return path
