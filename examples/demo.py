"""The whole path on a laptop: a small checkpoint, Plans for two GPUs, actions from the CPU's emulator.

    python examples/demo.py -o out/demo            # make demo

The checkpoint has random weights and the structure of Pi0.5, so the actions mean nothing; every step is the real one.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import frtc
from frtc.cli import main as cli
from frtc.models.synthetic import write_checkpoint

FRAMES = Path(__file__).resolve().parent / "frames"
CAMERAS = {"base": "top.png", "left_wrist": "left_wrist.png", "right_wrist": "right_wrist.png"}
PROMPT = "transfer the cube"
TARGETS = ("thor", "hopper")


def step(*words: str | Path) -> None:
    """One command, shown as it would be typed; the demo ends where one fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ frtc {shlex.join(arguments)}", flush=True)
    if code := cli(arguments):
        sys.exit(code)


def observation() -> list[str | Path]:
    """Options of `frtc run` and `frtc verify`: a bimanual robot's frames, joint state and instruction."""
    images = [word for role, name in CAMERAS.items() for word in ("--image", f"{role}={FRAMES / name}")]
    return [*images, "--state", FRAMES / "state.npy", "--prompt", PROMPT]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("out/demo"), metavar="DIR")
    out: Path = parser.parse_args(argv).output
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.monotonic()
    checkpoint = out / "pi05"
    print(f"a small Pi0.5 with random weights, in openpi's layout: {checkpoint}")
    write_checkpoint(checkpoint, "openpi", "tiny", seed=0)
    step("check", checkpoint)
    for target in TARGETS:
        step("compile", checkpoint, "--arch", target, "-o", out / f"pi05-{target}.plan")
    thor = out / "pi05-thor.plan"
    step("verify", thor, "--self-test", "--device", "cpu")
    step("verify", thor, checkpoint, "--device", "cpu", *observation())
    step("run", thor, "--device", "cpu", *observation(), "--actions", out / "actions.npy")
    actions = np.load(out / "actions.npy")
    print(f"\nfrtc {frtc.__version__}: {len(actions)} actions of {actions.shape[1]} joints in {out / 'actions.npy'}, "
          f"{time.monotonic() - started:.0f} s in all")  # fmt: skip


if __name__ == "__main__":
    main()
