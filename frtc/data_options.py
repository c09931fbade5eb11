"""The options that say which recorded observations a calibration runs: of `frtc calibrate` and `frtc compile`."""

from __future__ import annotations

import argparse
from functools import partial

from frtc.calibrate import Wishes
from frtc.errors import UsageError
from frtc.options import count, number, pathname
from frtc.scales import HEADROOM, METHODS


def add_data_options(parser: argparse.ArgumentParser) -> None:
    given = parser.add_argument_group("observations")
    given.add_argument("--data", type=pathname, metavar="DATA", help="LeRobot dataset's folder, or .npz")
    given.add_argument("--samples", type=count, default=8, metavar="N", help="observations, spread over the data")
    given.add_argument(
        "--seed", type=partial(count, least=0), default=0, metavar="N", help="other observations, other noise"
    )
    given.add_argument("--data-camera", action="append", default=[], metavar="ROLE=KEY",
                       help="which of the data's cameras is which; once per camera")  # fmt: skip
    given.add_argument("--allow-synthetic", action="store_true", help="accept constant or random observations; the "
                       "Plan says so")  # fmt: skip
    given.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs on "
                       "them; auto: a GPU if torch sees one")  # fmt: skip
    how = parser.add_argument_group("scales")
    how.add_argument("--method", choices=METHODS, default="absmax", help="what of the histogram is stored as 448")
    how.add_argument("--headroom", type=number(1, 16), default=HEADROOM, metavar="FACTOR", help="of absmax")


def wishes(args: argparse.Namespace) -> Wishes:
    cameras = tuple(map(_pair, args.data_camera))
    return Wishes(
        args.samples, args.seed, args.method, args.headroom, cameras, args.allow_synthetic, args.device
    )  # fmt: skip


def require_data(args: argparse.Namespace) -> None:
    """What describes observations would be ignored where there are none."""
    if args.data is None and wishes(args) != Wishes():
        what = "options describe observations or scales to be found in them, and no observations are given"
        hint = "--data DATA; or leave out --samples, --seed, --data-camera, --allow-synthetic, --device, --method, "
        raise UsageError("calibrate.options", what, hint=hint + "--headroom")


def _pair(text: str) -> tuple[str, str]:
    role, equals, key = text.partition("=")
    if not (role and equals and key):
        rows = [("for example", "base=observation.images.top")]
        raise UsageError("dataset.cameras", f"--data-camera {text} is not ROLE=KEY", rows)
    return role, key
