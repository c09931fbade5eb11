"""The options that say what a checkpoint's files do not, shared by the commands that read a checkpoint; and numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from frtc.errors import UsageError
from frtc.policy_options import PolicyOptions
from frtc.runtime.policy import Layout, Pixel

MOST = 1_000_000  # of anything that is counted
SIZES = {  # flag -> (field of CompileOptions, help)
    "--prompt-tokens": ("prompt", "token budget of the prompt"),
    "--horizon": ("horizon", "actions of a chunk"),
    "--steps": ("steps", "denoise steps"),
}


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Flags of PolicyOptions, the adapter, and the sizes that no tensor decides."""
    policy = parser.add_argument_group("policy", "what the files prove is read and shown; these say the rest")
    policy.add_argument("--origin", metavar="NAME", help="who wrote the files: openpi, lerobot-0.4, lerobot-0.6")
    policy.add_argument(
        "--robot", metavar="NAME", help="openpi's declaration of a robot: aloha, aloha-sim, droid, libero"
    )
    policy.add_argument("--views", type=count, metavar="N", help="cameras, the first N of the model's order")
    policy.add_argument("--camera", action="append", default=[], metavar="ROLE=KEY",
                        help="the observation's name of a camera of the checkpoint; once per camera")  # fmt: skip
    policy.add_argument("--layout", choices=get_args(Layout), default="hwc", help="axes of camera frames")
    policy.add_argument("--pixel", choices=get_args(Pixel), default="rgb8", help="colour order and type of frames")
    policy.add_argument("--asset", metavar="NAME", help="which of several statistics")
    policy.add_argument("--tokenizer", type=pathname, metavar="FILE", help="tokenizer.json; goes into the Plan")
    policy.add_argument(
        "--actions", metavar="KIND", help="absolute, delta or delta:MASK (6,-1: six delta, one absolute)"
    )
    policy.add_argument("--state-in-prompt", choices=("yes", "no"), help="is the state written into the prompt?")
    policy.add_argument("--state-dim", type=count, metavar="N", help="real dimensions of the state")
    policy.add_argument("--action-dim", type=count, metavar="N", help="real dimensions of an action")
    policy.add_argument("--constant-statistics", action="store_true", help="accept dimensions that never moved")
    policy.add_argument("--strict", action="store_true", help="an assumption is an error")
    add_adapter_option(policy)
    for flag, (field, about) in SIZES.items():
        policy.add_argument(flag, type=count, metavar="N", dest=field, help=about)


def add_adapter_option(parser: argparse._ActionsContainer) -> None:
    about = "LoRA adapter that is merged into the checkpoint; one beside its weights is found"
    parser.add_argument("--adapter", type=pathname, metavar="DIR", help=about)


def policy_options(args: argparse.Namespace) -> PolicyOptions:
    return PolicyOptions(
        origin=args.origin,
        robot=args.robot,
        views=args.views,
        camera=tuple(map(_camera, args.camera)),
        layout=args.layout,
        pixel=args.pixel,
        asset=args.asset,
        tokenizer=args.tokenizer,
        actions=args.actions,
        state_in_prompt={"yes": True, "no": False}.get(args.state_in_prompt),
        state_dim=args.state_dim,
        action_dim=args.action_dim,
        constant_statistics=args.constant_statistics,
        strict=args.strict,
    )


def choices(args: argparse.Namespace) -> dict[str, Any]:
    """The chosen sizes and adapter, by field of CompileOptions."""
    return {field: getattr(args, field) for field in ("adapter", *(field for field, _ in SIZES.values()))}


def _camera(text: str) -> tuple[str, str]:
    role, equals, key = text.partition("=")
    if not (role and equals and key):
        raise UsageError("policy.cameras", f"--camera {text} is not ROLE=KEY", [("for example", "base=base_0_rgb")])
    return role, key


def count(text: str, least: int = 1) -> int:
    """The type of an option that counts: argparse names the option, this the range."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST)) and least <= int(text) <= MOST):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {MOST}")
    return int(text)


def pathname(text: str) -> Path:
    """The type of an option that names a file or folder: an empty one would be the folder that the process is in."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty, and names nothing")
    return Path(text)


def given(args: argparse.Namespace, options: Callable[[argparse.ArgumentParser], None]) -> dict[str, str]:
    """Those of a command's options that have not their default: name in `args` -> flag."""
    parser = argparse.ArgumentParser(add_help=False)
    options(parser)
    actions = [a for a in parser._actions if a.option_strings and getattr(args, a.dest) != a.default]
    return {a.dest: a.option_strings[-1 if getattr(args, a.dest) is False else 0] for a in actions}


def number(low: float, high: float) -> Callable[[str], float]:
    """The type of an option that measures, from low to high; NaN lies in no range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return value

    return read
