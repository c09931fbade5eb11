"""meta/ of a LeRobot dataset, versions 2.0, 2.1 and 3.0: what there is, and in which files.

  v2  info.json, episodes.jsonl, tasks.jsonl; one table and one video per episode and camera
  v3  info.json, episodes/chunk-*/file-*.parquet, tasks.parquet; tables and videos of many episodes

2.0 and 2.1 differ in statistics only, which are not read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from frtc.dataset_format import too_large
from frtc.dataset_parquet import LARGE, Table
from frtc.errors import FrtcError

VERSIONS = ("v2.0", "v2.1", "v3.0")
META = 1 << 26  # bytes of one side file, or of all task texts
EPISODES = 1 << 22  # most episodes
FIELDS = ("episode_chunk", "episode_index", "chunk_index", "file_index", "video_key")
FIELD = re.compile(r"\{(\w+)(?::0(\d)d)?\}")  # str.format would also read attributes, and pad to any width
TEXT_COLUMNS = ("task", "__index_level_0__")  # how pandas names the index of the table of tasks


@dataclass(frozen=True, slots=True)
class Span:
    """Where an episode lies in a v3 video: its file, and from when to when, in seconds."""

    chunk: int
    file: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Episode:
    index: int
    length: int  # frames
    chunk: int
    file: int = 0  # v3: of its table
    videos: Mapping[str, Span] = field(default_factory=dict)  # v3: by camera


@dataclass(frozen=True, slots=True)
class Info:
    """info.json.

    pictures   camera -> its declared shape
    videos     those of them that are videos
    chunks     v2: episodes per folder
    """

    root: Path
    version: str
    fps: float
    features: Mapping[str, Any]
    pictures: Mapping[str, tuple[int, ...]]
    videos: frozenset[str]
    data_path: str
    video_path: str
    chunks: int

    @staticmethod
    def read(root: Path) -> Info:
        found = _object(_text(root / "meta" / "info.json"), "info.json")
        version = found.get("codebase_version")
        if version not in VERSIONS:
            hint = "convert it with the scripts that lerobot has for this"
            rows = [("found", repr(version)[:80]), ("known", ", ".join(VERSIONS))]
            raise FrtcError("dataset.version", f"{root} is in a version that this frtc does not read", rows, hint)
        features, fps, chunks = found.get("features"), found.get("fps"), found.get("chunks_size", 1000)
        if not isinstance(features, dict) or not all(isinstance(entry, dict) for entry in features.values()):
            raise _bad("info.json: features", features)
        if not isinstance(fps, int | float) or not 0 < fps <= 100_000:
            raise _bad("info.json: fps", fps)
        if type(chunks) is not int or chunks < 1:
            raise _bad("info.json: chunks_size", chunks)
        pictures = {name: _shape(name, entry) for name, entry in features.items() if _is_picture(entry)}
        coloured = {name: shape for name, shape in pictures.items() if 3 in (shape[0], shape[-1])}
        videos = frozenset(name for name in coloured if features[name]["dtype"] == "video")
        data_path = check_template(found.get("data_path"), "data_path")
        video_path = check_template(found.get("video_path"), "video_path") if videos else ""
        return Info(root, version, float(fps), features, coloured, videos, data_path, video_path, chunks)

    def table(self, episode: Episode) -> Path:
        return fill(self.root, self.data_path, episode, episode.chunk, episode.file)

    def video(self, episode: Episode, camera: str) -> Path:
        span = episode.videos.get(camera)
        chunk, file = (span.chunk, span.file) if span else (episode.chunk, 0)
        return fill(self.root, self.video_path, episode, chunk, file, camera)

    def episodes(self) -> tuple[Episode, ...]:
        found = tuple(self._from_tables() if self.version == "v3.0" else self._from_lines())
        if not found:
            raise FrtcError("dataset.empty", f"{self.root} has no episodes", [("looked in", "meta/episodes")])
        for i, episode in enumerate(found):
            if episode.index != i:
                raise _bad(f"the list of episodes: number {i}", f"episode_index {episode.index}")
        return found

    def tasks(self) -> dict[int, str]:
        """task_index -> text."""
        tasks: dict[int, str] = {}
        for index, text in self._tasks_v3() if self.version == "v3.0" else self._tasks_v2():
            if type(index) is not int or not isinstance(text, str):
                raise _bad("the table of tasks", (index, text))
            tasks[index] = text
        return tasks

    def _from_lines(self) -> Iterator[Episode]:
        for row in _lines(self.root / "meta" / "episodes.jsonl"):
            index, length = (_count("episodes.jsonl", row, name) for name in ("episode_index", "length"))
            yield Episode(index, length, index // self.chunks)

    def _from_tables(self) -> Iterator[Episode]:
        numbers = ["episode_index", "length", "data/chunk_index", "data/file_index"]
        parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
        spans = {camera: [f"videos/{camera}/{part}" for part in parts] for camera in sorted(self.videos)}
        columns, count = [*numbers, *(name for names in spans.values() for name in names)], 0
        for path in sorted((self.root / "meta" / "episodes").glob("chunk-*/file-*.parquet")):
            with Table(path) as table:
                count += table.rows
                if count > EPISODES:
                    raise too_large(str(path), f"{count} episodes", str(EPISODES))
                for row in table.lines(columns):
                    yield _episode(path.name, row, numbers, spans)

    def _tasks_v2(self) -> Iterator[tuple[Any, Any]]:
        for row in _lines(self.root / "meta" / "tasks.jsonl"):
            yield row.get("task_index"), row.get("task")

    def _tasks_v3(self) -> Iterator[tuple[Any, Any]]:
        with Table(self.root / "meta" / "tasks.parquet") as table:
            texts = next((name for name in TEXT_COLUMNS if name in table.names), TEXT_COLUMNS[0])
            length = 0
            for row in table.lines(["task_index", texts], LARGE):
                text = row[texts]
                length += len(text) if isinstance(text, str) else 0
                if length > META:
                    raise too_large(str(table.path), f"{length} characters of task texts", str(META))
                yield row["task_index"], text


def fill(root: Path, template: str, episode: Episode, chunk: int, file: int, camera: str = "") -> Path:
    """The file that a checked template names. NOTE: links are followed: download caches are made of them."""
    numbers = {"episode_chunk": chunk, "chunk_index": chunk, "file_index": file, "episode_index": episode.index}

    def value(part: re.Match[str]) -> str:
        name, width = part.groups()
        return camera if name == "video_key" else f"{numbers[name]:0{width or 1}d}"

    path = FIELD.sub(value, template)
    _require_inside(path, f"{template} for {camera!r}" if camera else template)
    return root / path


def check_template(template: object, name: str) -> str:
    if not isinstance(template, str) or not template:
        raise _bad(f"info.json: {name}", template)
    unknown = [found for found, _ in FIELD.findall(template) if found not in FIELDS]
    if unknown or set("{}") & set(FIELD.sub("", template)):
        raise _bad(f"info.json: {name}", template)
    _require_inside(FIELD.sub("0", template), template)
    return template


def _require_inside(path: str, shown: str) -> None:
    parts = PurePosixPath(path).parts
    if ".." in parts or path.startswith("/") or set("\\\0") & set(path):
        hint = "do not use this dataset: no tool writes such a path"
        raise FrtcError("dataset.path", f"a path of info.json leaves the dataset: {shown!r}"[:200], hint=hint)


def _episode(file: str, row: Mapping[str, Any], numbers: list[str], spans: Mapping[str, list[str]]) -> Episode:
    index, length, chunk, data = (_count(file, row, name) for name in numbers)
    videos = {}
    for camera, (*places, start, stop) in spans.items():
        times = [row[name] for name in (start, stop)]
        if not all(isinstance(t, float | int) and math.isfinite(t) for t in times) or not 0 <= times[0] <= times[1]:
            raise _bad(f"{file}: episode {index}, {start} to {stop}", times)
        videos[camera] = Span(*(_count(file, row, name) for name in places), *times)
    return Episode(index, length, chunk, data, videos)


def _count(file: str, row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise _bad(f"{file}: {name}", value)
    return value


def _is_picture(entry: Mapping[str, Any]) -> bool:
    return entry.get("dtype") in ("video", "image")


def _shape(name: str, entry: Mapping[str, Any]) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and n > 0 for n in shape):
        raise _bad(f"info.json: features.{name}.shape", shape)
    return tuple(shape)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > META:
            raise too_large(str(path), f"{path.stat().st_size} bytes", str(META))
        return path.read_text("utf-8")
    except OSError as fault:
        code = "dataset.not_found" if path.name == "info.json" else "dataset.metadata"
        hint = "pass the dataset's folder, the one that holds meta/; a copy that is not complete is not read"
        raise FrtcError(code, f"{path} cannot be read: {fault.strerror}", hint=hint) from None
    except ValueError:
        raise FrtcError("dataset.metadata", f"{path} is no text in UTF-8") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            yield _object(line, f"{path.name}, line {number}")


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise FrtcError("dataset.metadata", f"{where} is not JSON: {fault}", hint="copy it again") from None
    if not isinstance(found, dict):
        raise _bad(where, found)
    return found


def _bad(where: str, found: object) -> FrtcError:
    hint = "the dataset is damaged, or was edited: copy it again"
    return FrtcError("dataset.metadata", f"{where} is not what it must be", [("found", repr(found)[:120])], hint)
