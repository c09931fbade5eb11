"""A LeRobot dataset: tables of numbers, and pictures in them or in videos. See dataset_info.py for its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from frtc.dataset_format import Array, Asked, Frame, Place
from frtc.dataset_info import Episode, Info
from frtc.dataset_parquet import NUMBERS, Table
from frtc.dataset_video import still, video_frame
from frtc.errors import FrtcError

STATES = ("observation.state", "state")  # lerobot's name, and that of openpi's own conversions
KEYS = ("episode_index", "frame_index")


@dataclass(frozen=True, slots=True)
class Row:
    """A frame's line in its table."""

    place: Place
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LeRobot:
    info: Info
    episodes: tuple[Episode, ...]

    @staticmethod
    def open(root: Path) -> LeRobot:
        info = Info.read(root)
        return LeRobot(info, info.episodes())

    @property
    def kind(self) -> str:
        return f"LeRobot {self.info.version}"

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(self.info.pictures)

    @property
    def lengths(self) -> Sequence[int]:
        return [episode.length for episode in self.episodes]

    def read(self, places: Sequence[Place], asked: Asked) -> Iterator[Frame]:
        tasks = self.info.tasks() if asked.prompt else {}
        state = self._state_name() if asked.state else None
        embedded = [name for name in asked.cameras if name not in self.info.videos]
        names = [*KEYS, "timestamp", *(["task_index"] if asked.prompt else []), *([state] if state else [])]
        for path, group in groupby(places, lambda place: self.info.table(self.episodes[place.episode])):
            with Table(path) as table:
                rows = self._rows(table, list(group), names)
                stills = table.pictures([row.number for row in rows], embedded) if embedded else iter([[]] * len(rows))
                for row, encoded in zip(rows, stills, strict=True):
                    pictures = dict(self._pictures(row, asked, dict(zip(embedded, encoded, strict=True)), path))
                    task = row.values.get("task_index")
                    prompt = tasks.get(task) if isinstance(task, int) else None
                    yield Frame(pictures, _numbers(row.values[state]) if state else None, prompt)

    def _state_name(self) -> str:
        found = next((name for name in STATES if name in self.info.features), None)
        if found is None:
            rows = [("looked for", ", ".join(STATES)), ("found", ", ".join(self.info.features))]
            raise FrtcError("dataset.shape", f"{self.info.root} records no state", rows)
        return found

    def _rows(self, table: Table, places: Sequence[Place], names: Sequence[str]) -> list[Row]:
        """Each place's line; lines lie in the order of episodes and frames."""
        table.require(names)
        found: list[Row] = []
        start = 0
        for batch in table.batches(names, NUMBERS):
            at = {key: _indices(batch.column(key), f"{table.path}: {key}") for key in KEYS}
            for place in places[len(found) :]:
                index = self.episodes[place.episode].index
                here = np.flatnonzero((at[KEYS[0]] == index) & (at[KEYS[1]] == place.frame))
                if not here.size:
                    break
                values = {name: table.cell(batch, name, int(here[0])) for name in names}
                found.append(Row(place, start + int(here[0]), values))
            if len(found) == len(places):
                break
            start += batch.num_rows
        numbers = [row.number for row in found]
        if len(found) < len(places) or numbers != sorted(set(numbers)):
            place = places[min(len(found), len(places) - 1)]
            hint = "the table and the list of episodes in meta/ do not belong together: copy the dataset again"
            raise FrtcError("dataset.parquet", f"{table.path} has no {place}, or not in order", hint=hint)
        return found

    def _pictures(self, row: Row, asked: Asked, encoded: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Array]]:
        episode = self.episodes[row.place.episode]
        for name in asked.cameras:
            where = f"{path}: {name}, {row.place}"
            if name in self.info.videos:
                picture = self._from_video(episode, name, row.values["timestamp"], where)
            elif isinstance(encoded[name], bytes):
                picture = still(encoded[name], where)
            else:
                hint = "datasets with pictures beside their tables are not read: let lerobot write it again"
                raise FrtcError("dataset.image", f"{where}: the table holds no picture", hint=hint)
            declared, shape = self.info.pictures[name], picture.shape
            if declared not in (shape, (shape[2], *shape[:2])):
                rows = [("declared", f"{list(declared)} in info.json"), ("found", f"{list(shape)}")]
                raise FrtcError("dataset.shape", f"{where} has another size", rows)
            yield name, picture

    def _from_video(self, episode: Episode, camera: str, timestamp: object, where: str) -> Array:
        """v3: many episodes follow each other in one video, so what lies beyond this one's end is another's."""
        span, half = episode.videos.get(camera), 0.5 / self.info.fps
        stop = span.stop - span.start if span else episode.length / self.info.fps
        if not isinstance(timestamp, float | int) or not -half <= timestamp <= stop + half:
            rows = [("timestamp", repr(timestamp)), ("the episode ends", f"{stop:.3f} s after its start")]
            raise FrtcError("dataset.video", f"{where} lies outside its episode", rows)
        start = span.start if span else 0.0
        return video_frame(self.info.video(episode, camera), start + timestamp, self.info.fps)


def _indices(column: Any, where: str) -> Array:
    if not pa.types.is_integer(column.type):
        raise FrtcError("dataset.parquet", f"{where} is {column.type}, not an index")
    found: Array = column.to_numpy(zero_copy_only=False)
    return found


def _numbers(value: object) -> Array | None:
    """A vector; lerobot stores one of length 1 as a number. None: it is something else."""
    numbers = value if isinstance(value, list) else [value]
    return np.array(numbers) if all(isinstance(n, float | int) for n in numbers) else None
