"""Write tests/fixtures/datasets: a dataset that lerobot 0.6.1 itself recorded, and the frames that it reads from it.

    python tools/make_dataset_fixture.py -o tests/fixtures/datasets

Runs in the environment of tools/oracle-requirements.txt with what lerobot reads and writes datasets by: datasets 4.1.0,
pyarrow 21.0.0, dill 0.4.0, multiprocess 0.70.18, av 15.1.0, pandas 3.1.1.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before lerobot is imported: nothing may come from a hub

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

FPS, DIM, LENGTHS = 10, 4, (4, 6, 5)
HEIGHT, WIDTH = 48, 64
TASKS = ("fold the towel", "open the drawer")
FRONT, WRIST = "observation.images.front", "observation.images.wrist"


def features() -> dict[str, Any]:
    """One camera is kept as video, the other as pictures in the table."""
    picture = {"shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]}
    vector = {"dtype": "float32", "shape": (DIM,), "names": [f"joint_{i}" for i in range(DIM)]}
    cameras = {FRONT: {"dtype": "video", **picture}, WRIST: {"dtype": "image", **picture}}
    return {**cameras, "observation.state": vector, "action": vector}


def record(root: Path) -> None:
    made = LeRobotDataset.create("frtc/fixture", fps=FPS, features=features(), root=root)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    frame = 0
    for episode, length in enumerate(LENGTHS):
        for _ in range(length):
            front = np.stack([3 * x + 9 * frame, 4 * y, x + y], -1) % 256
            wrist = np.stack([2 * y, 3 * x + 7 * frame, 255 - x - y], -1) % 256
            state = np.linspace(0, 1, DIM, dtype=np.float32) * (frame + 1)
            pictures = {FRONT: front.astype(np.uint8), WRIST: wrist.astype(np.uint8)}
            made.add_frame({**pictures, "observation.state": state, "action": state, "task": TASKS[episode % 2]})
            frame += 1
        made.save_episode()
    made.finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    folder = parser.parse_args().output
    root = folder / "lerobot_v3"
    shutil.rmtree(root, ignore_errors=True)
    record(root)
    read = LeRobotDataset("frtc/fixture", root=root, video_backend="pyav")
    rows = [read[i] for i in range(sum(LENGTHS))]
    found = {"state": np.stack([row["observation.state"].numpy() for row in rows])}
    found["prompt"] = np.array([row["task"] for row in rows])
    for camera in (FRONT, WRIST):  # float32 [3, H, W] of bytes / 255
        frames = np.stack([row[camera].numpy() for row in rows]).transpose(0, 2, 3, 1)
        found[camera] = np.round(frames * 255).astype(np.uint8)
    np.savez_compressed(folder / "lerobot_v3_read.npz", **found)


if __name__ == "__main__":
    main()
