"""The file of activation scales, F.scales: a safetensors file, written whole or not at all, believed only after a look.

Its tensors have one row for each site, or for each round of a site in a repeat:

    counts    i64 [R, bins]   histogram of |x|, the bins from `first_bin` to the last that any row occupies
    absmax    f32 [R]         largest |x|
    zeros     i64 [R]         values that are zero; they are among the counts
    scale     f32 [R]         what stored elements are multiplied by
    noise     f64 [R, 2]      of sites behind a norm (frtc/norm_noise.py); zeros elsewhere

and its metadata, under "frtc.scales", JSON: version, key, sites, where the samples came from, how the scales were
found, and a hash of all this.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from frtc.errors import FrtcError, UsageError
from frtc.histogram import FINITE, Histogram
from frtc.passes.sites import UNNORMED
from frtc.runtime.own_file import partial
from frtc.runtime.paths import require_file
from frtc.scales import AGAIN, Array, Scales, Site
from frtc.scales_key import Key

VERSION = 2
ENTRY = "frtc.scales"  # of the metadata
MOST = 1 << 30  # bytes of a file that is looked at
MOST_ROWS = 1 << 15  # a histogram of each in memory is 1 GB


def write_scales(path: Path, scales: Scales) -> None:
    """By atomic rename: an older file stays until all of the new one is there."""
    from safetensors.numpy import save

    tensors, about = _tensors(scales)
    about["sha256"] = _hash(about, tensors)
    data = save(tensors, {ENTRY: json.dumps(about, allow_nan=False)})
    temporary = partial(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as fault:
        raise FrtcError("output.write", f"cannot write {path}: {fault.strerror}", hint="write elsewhere") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def require_place(path: Path) -> None:
    """There is a folder for it, and nothing else stands there than an older file of scales."""
    if not path.parent.is_dir():
        hint = "create it, or choose another with -o"
        raise UsageError("output.folder", f"there is no folder {path.parent}", hint=hint)
    if path.is_dir():
        raise UsageError("output.folder", f"{path} is a folder", hint=f"name a file: -o {path / 'policy.scales'}")
    if os.path.lexists(path):
        try:
            read_scales(path)
        except FrtcError as fault:
            if fault.code not in ("scales.version", "scales.value"):
                what = f"{path} is there and is no file of scales; it is left as it is"
                raise UsageError("output.exists", what, hint="choose another name with -o, or remove it") from None


def _tensors(scales: Scales) -> tuple[dict[str, Array], dict[str, Any]]:
    rows = [h for name in scales.sites for h in scales.histograms[name]]
    counts = np.stack([h.counts for h in rows]).astype(np.int64)
    occupied = np.flatnonzero(counts.any(axis=0))
    first, last = (int(occupied[0]), int(occupied[-1]) + 1) if occupied.size else (0, 1)
    tensors: dict[str, Array] = {
        "counts": np.ascontiguousarray(counts[:, first:last]),
        "absmax": np.array([h.absmax for h in rows], np.float32),
        "zeros": np.array([h.zeros for h in rows], np.int64),
        "scale": np.concatenate([scales.values[name] for name in scales.sites]),
        "noise": np.concatenate([scales.noise.get(s.name, np.zeros((s.rows, 2))) for s in scales.sites.values()]),
    }
    about = scales.about() | {
        "version": VERSION,
        "key": asdict(scales.key),
        "first_bin": first,
        "sites": [asdict(site) for site in scales.sites.values()],
    }
    return tensors, json.loads(json.dumps(about))


def _hash(about: Mapping[str, Any], tensors: Mapping[str, Array]) -> str:
    said = {name: value for name, value in about.items() if name != "sha256"}
    whole = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        whole.update(f"{name}{tensors[name].dtype}{tensors[name].shape}".encode())
        whole.update(np.ascontiguousarray(tensors[name]).tobytes())
    return whole.hexdigest()


def read_scales(path: Path) -> Scales:
    """What a file holds, after a look at all of it."""
    tensors, about = _opened(path)
    if about.get("version") != VERSION:
        rows = [("file", str(path)), ("found", str(about.get("version"))), ("known", str(VERSION))]
        raise FrtcError("scales.version", "the scales are of a version that this frtc does not read", rows, AGAIN)
    try:
        scales = _scales(tensors, about)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
        raise _damaged(path, f"its description is incomplete ({type(fault).__name__}: {fault})") from None
    _require_values(path, scales)
    if about.get("sha256") != _hash(about, tensors):
        raise _damaged(path, "its contents are not those that were written")
    return scales


def _opened(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        require_file(path)
        if path.stat().st_size > MOST:
            raise _damaged(path, f"it has more than {MOST} bytes")
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get(ENTRY)
            if text is None:
                raise _damaged(path, "another file under this name")
            return {name: file.get_tensor(name) for name in file.keys()}, dict(json.loads(text))  # noqa: SIM118
    except OSError as fault:
        what = f"cannot read {path}: {fault.strerror or fault}"
        raise FrtcError("scales.read", what, hint="`frtc calibrate` writes such a file") from None
    except (SafetensorError, ValueError, TypeError, RecursionError) as fault:
        raise _damaged(path, f"cut off or damaged ({fault})") from None


def _damaged(path: Path, why: str) -> FrtcError:
    return FrtcError("scales.format", f"{path.name} is no whole file of scales: {why}", [("file", str(path))], AGAIN)


def _scales(tensors: Mapping[str, Array], about: Mapping[str, Any]) -> Scales:
    """Raises whatever Python raises on a description that is not one."""
    key, first = Key(**{part: str(digest) for part, digest in about["key"].items()}), int(about["first_bin"])
    sites = [_site(**entry) for entry in about["sites"]]
    rows = sum(site.rows for site in sites)
    found = [tensors[name] for name in ("counts", "absmax", "zeros", "scale", "noise")]
    counts, absmax, zeros, scale, noise = found
    shapes, bins = [t.shape for t in found], counts.shape[-1]
    fits = shapes == [(rows, bins), (rows,), (rows,), (rows,), (rows, 2)] and 0 <= first <= first + bins <= FINITE
    fits = fits and 0 < rows <= MOST_ROWS
    kinds = [t.dtype.str for t in found] == ["<i8", "<f4", "<i8", "<f4", "<f8"]
    if not fits or not kinds or len({s.name for s in sites}) != len(sites) or (counts < 0).any():
        raise ValueError(f"tensors {shapes} of {rows} rows")
    if not (np.isfinite(noise) & (noise >= 0)).all():
        raise ValueError("noise is not finite, or negative")
    whole = np.zeros((rows, FINITE), np.int64)
    whole[:, first : first + bins] = counts
    histograms, values, noises, at = {}, {}, {}, 0
    behind = {site.name for site in sites} & {site.name.removesuffix(UNNORMED) for site in sites if not site.product}
    for site in sites:
        here = range(at, at + site.rows)
        if site.name in behind:
            noises[site.name] = noise[at : at + site.rows]
        histograms[site.name] = tuple(Histogram(whole[i], float(absmax[i]), int(zeros[i])) for i in here)
        values[site.name], at = scale[at : at + site.rows], at + site.rows
    named = {site.name: site for site in sites}
    why, method = tuple(map(str, about["synthetic"])), str(about["method"])
    samples, data, headroom = int(about["samples"]), dict(about["data"]), float(about["headroom"])
    return Scales(key, named, histograms, values, samples, data, why, method, headroom, noises)


def _site(name: str, program: str, rounds: int | None, shape: list[int]) -> Site:
    if not isinstance(name, str) or not isinstance(program, str) or not (rounds is None or int(rounds) > 0):
        raise ValueError(f"site {name!r} of {rounds!r} rounds")
    return Site(name, program, None if rounds is None else int(rounds), tuple(map(int, shape)))


def _require_values(path: Path, scales: Scales) -> None:
    """No scale is NaN, infinite, zero or negative."""
    for name, values in scales.values.items():
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if wrong.size:
            round = f", round {wrong[0]}" if scales.sites[name].rounds is not None else ""
            rows = [("file", str(path)), ("site", f"{name}{round}"), ("scale", str(values[wrong[0]]))]
            raise FrtcError("scales.value", f"a scale of {name} is no positive number", rows, AGAIN)
