"""Image steps: resize keeping the aspect into a square, in the arithmetic of the checkpoint's origin.

PilResize    Pillow's bilinear with 8-bit pixels, bit for bit: triangle filter widened by the scale when shrinking,
             weights in 22-bit fixed point, across, then down, rounded to 8 bits after each.
             NOTE: Pillow 13 goes down first where the height loses more than twice the pixels that the width loses;
             the published policies pin older versions, which never do.
TorchResize  torch's interpolate(mode="bilinear", align_corners=False, antialias=False) on float32 in [0, 1]; equal to
             torch up to the order of its fused multiply-adds (1e-6). Where `signed`, x*2-1 follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError
from frtc.kernels.dtypes import DTYPES
from frtc.runtime.device_array import CUDA, CUDA_MANAGED, DeviceArray
from frtc.runtime.driver import Driver
from frtc.runtime.masked import require_unmasked
from frtc.runtime.policy import Camera, Images

Array = NDArray[Any]

BITS = 22  # Pillow: 32 - 8 - 2
LEGACY_STREAM = 1  # what DLPack and the array interface call the stream 0
SIDE_MOST = 8192  # pixels of a picture's height and width
BLOCK = 96  # rows resized at a time, so that the accumulators stay in the L2 cache


def fit(height: int, width: int, size: int, role: str) -> tuple[int, int]:
    """Height and width of the picture inside the square: the larger side fills it, both rounded down."""
    ratio = max(width / size, height / size)
    h, w = int(height / ratio), int(width / ratio)
    if h < 1 or w < 1:
        raise FrtcError("input.image_shape", f"image {role} of {height} x {width} vanishes when resized to {size}")
    return h, w


def corner(above: int, beside: int, place: str) -> tuple[int, int]:
    """Top and left of the picture; above, beside: pixels of border in each direction."""
    return (above, beside) if place == "end" else (above // 2, beside // 2)


def pil_weights(n: int, m: int) -> tuple[Array, Array]:
    """For m outputs over n inputs: index i64 [taps, m] and weight i32 [taps, m, 1] in units of 2**-22."""
    scale = n / m
    support = max(scale, 1.0)
    index = np.zeros((2 * math.ceil(support) + 1, m), np.int64)
    weight = np.zeros((*index.shape, 1), np.int32)
    for j in range(m):
        center = (j + 0.5) * scale
        low, high = max(int(center - support + 0.5), 0), min(int(center + support + 0.5), n)
        taps = [max(0.0, 1.0 - abs((x - center + 0.5) * (1.0 / support))) for x in range(low, high)]
        total = 0.0
        for tap in taps:  # in this order: sum() is compensated since Python 3.12
            total += tap
        index[:, j] = np.minimum(low + np.arange(len(index)), n - 1)
        weight[: len(taps), j, 0] = [int(0.5 + tap / total * (1 << BITS)) for tap in taps]
    used = weight.any(axis=(1, 2))
    return index[used], weight[used]


def pil_pass(source: Array, index: Array, weight: Array, acc: Array, product: Array) -> None:
    """acc [m, k] = round(sum over taps of weight * source [n, k]), all i32. No clip: the weights are not negative."""
    acc.fill(1 << (BITS - 1))
    for i in range(len(index)):
        np.take(source, index[i], axis=0, out=product, mode="clip")
        product *= weight[i]
        acc += product
    acc >>= BITS


class PilResize:
    """u8 [height, width, 3] -> u8 [size, size, 3]. Scratch is allocated here, once per input size."""

    def __init__(self, height: int, width: int, size: int, border: float, role: str, place: str = "center") -> None:
        self.h, self.w = fit(height, width, size, role)
        self.top, self.left, self.border = *corner(size - self.h, size - self.w, place), border
        self.across = pil_weights(width, self.w) if self.w != width else None
        self.down = pil_weights(height, self.h) if self.h != height else None
        block = min(BLOCK, height) * 3
        self.columns = np.empty(width * block, np.int32)
        self.acc, self.product = np.empty(self.w * block, np.int32), np.empty(self.w * block, np.int32)
        self.middle = np.empty((height, self.w, 3), np.int32)
        self.acc2, self.product2 = np.empty((2, self.h, self.w * 3), np.int32)

    def run(self, image: Array, out: Array) -> None:
        if self.across is None:
            self.middle[...] = image
        else:
            self._across(image, *self.across)
        out.fill(self.border)
        inside = out[self.top : self.top + self.h, self.left : self.left + self.w]
        if self.down is None:
            inside[...] = self.middle
        else:
            pil_pass(self.middle.reshape(len(self.middle), -1), *self.down, self.acc2, self.product2)
            inside[...] = self.acc2.reshape(inside.shape)

    def _across(self, image: Array, index: Array, weight: Array) -> None:
        """In blocks of rows, turned so that a tap is a contiguous run: [width, 3 * rows] -> [w, 3 * rows]."""
        for row in range(0, len(image), BLOCK):
            part = image[row : row + BLOCK]
            rows, width = part.shape[:2]
            columns = self.columns[: width * 3 * rows].reshape(width, 3, rows)
            columns[...] = part.transpose(1, 2, 0)
            acc, product = (a[: self.w * 3 * rows].reshape(self.w, 3 * rows) for a in (self.acc, self.product))
            pil_pass(columns.reshape(width, -1), index, weight, acc, product)
            self.middle[row : row + BLOCK] = acc.reshape(self.w, 3, rows).transpose(2, 0, 1)


def torch_weights(n: int, m: int) -> tuple[Array, Array, Array, Array]:
    """For m outputs over n inputs: low and high index i64 [m], low and high weight f32 [m, 1]."""
    scale = np.float64(np.float32(n) / np.float32(m))
    # the product is exact in float64, so this rounds once, as the fused multiply-add of torch's builds does
    at = np.maximum(scale * (np.arange(m) + 0.5) - 0.5, 0.0).astype(np.float32)
    low = np.minimum(at.astype(np.int64), n - 1)
    weight = np.clip(at - low.astype(np.float32), np.float32(0), np.float32(1))[:, None]
    return low, np.minimum(low + 1, n - 1), np.float32(1) - weight, weight


class TorchResize:
    """u8 or f32 in [0, 1], [height, width, 3] -> f32 [size, size, 3] in [0, 1], or in [-1, 1] where `signed`."""

    signed = False

    def __init__(self, height: int, width: int, size: int, border: float, role: str, place: str = "center") -> None:
        self.h, self.w = fit(height, width, size, role)
        self.top, self.left, self.border = *corner(size - self.h, size - self.w, place), border
        self.resized = (self.h, self.w) != (height, width)
        self.x0, self.x1, left, right = torch_weights(width, self.w)
        self.beside = left.repeat(3, axis=1), right.repeat(3, axis=1)  # [w, 3]: no short inner loop
        self.y = torch_weights(height, self.h)
        self.rows = np.empty((2, self.h, self.w, 3), np.float32)
        self.part = np.empty((self.h, self.w, 3), np.float32)

    def run(self, image: Array, out: Array) -> None:
        out.fill(self.border)
        inside = out[self.top : self.top + self.h, self.left : self.left + self.w]
        if self.resized:
            y0, y1, above, below = self.y
            for y, row in zip((y0, y1), self.rows, strict=True):
                self._across(image.take(y, axis=0), row)
            np.multiply(self.rows[0], above[:, None], out=inside)
            np.multiply(self.rows[1], below[:, None], out=self.part)
            inside += self.part
        else:
            unit(image, inside)
        if self.signed:
            inside *= np.float32(2)
            inside -= np.float32(1)

    def _across(self, lines: Array, row: Array) -> None:
        """lines [h, width, 3] -> row f32 [h, w, 3]."""
        unit(lines.take(self.x0, axis=1), row)
        unit(lines.take(self.x1, axis=1), self.part)
        row *= self.beside[0]
        self.part *= self.beside[1]
        row += self.part


class SignedTorchResize(TorchResize):
    signed = True


Resize = PilResize | TorchResize
RESIZES: dict[str, type[Resize]] = {
    "pil_bilinear": PilResize, "torch_bilinear": SignedTorchResize, "torch_bilinear01": TorchResize,
}  # fmt: skip


def unit(pixels: Array, out: Array) -> None:
    """Bytes divided by 255, rounded once; floats as they are."""
    if pixels.dtype == np.uint8:
        np.divide(pixels, 255, out=out, dtype=np.float32)
    else:
        out[...] = pixels


class ImageStep:
    """All cameras of an `Images` step into one buffer [V, S, S, 3]."""

    def __init__(self, step: Images) -> None:
        self.step = step
        self.make = RESIZES[step.resize]
        self.plans: list[Resize | None] = [None] * len(step.cameras)
        self.sizes: list[tuple[int, ...]] = [()] * len(step.cameras)

    def run(self, observation: Mapping[str, Any], out: Array) -> None:
        for i, camera in enumerate(self.step.cameras):
            image = read_image(camera, observation[camera.role])
            if self.make is PilResize and image.dtype != np.uint8:
                image = (np.float32(255) * image).astype(np.uint8)  # openpi's rule: truncated
            plan = self.plans[i]
            if plan is None or self.sizes[i] != image.shape[:2]:  # a new camera size: tables and scratch once
                height, width = image.shape[:2]
                plan = self.make(height, width, self.step.size, self.step.border, camera.role, self.step.place)
                self.plans[i], self.sizes[i] = plan, image.shape[:2]
            plan.run(image, out[i])


def read_image(camera: Camera, image: object) -> Array:
    """The picture as a view [height, width, RGB]; what it must be is declared, never guessed from its shape."""
    if not isinstance(image, np.ndarray):
        raise _not_of_type(camera, type(image).__name__)
    require_unmasked(f"image {camera.role}", image)
    if image.dtype != _dtype(camera):
        raise _not_of_type(camera, f"{image.dtype} array")
    _require_shape(camera, image.shape)
    if image.dtype == np.float32 and not (image.min() >= 0 and image.max() <= 1):  # also true for NaN
        raise FrtcError(
            "input.image_range",
            f"image {camera.role} leaves [0, 1]",
            [_declared(camera), ("found", f"{image.min()} to {image.max()}")],
        )
    return as_rgb(camera, image)


def as_rgb(camera: Camera, image: Array) -> Array:
    """A picture as it is declared -> the view [height, width, RGB]."""
    view = image if camera.layout == "hwc" else image.transpose(1, 2, 0)
    return view if camera.pixel.startswith("rgb") else view[..., ::-1]


def on_device(image: object) -> bool:
    """Whether an array that is not NumPy's says that it lies in a GPU's memory."""
    if hasattr(image, "__dlpack_device__"):
        try:
            return int(image.__dlpack_device__()[0]) in (CUDA, CUDA_MANAGED)
        except Exception:  # whatever its owner raises: it lies on several devices, for instance, or on none
            return False
    return hasattr(image, "__cuda_array_interface__")


def read_device(camera: Camera, image: object, driver: Driver, ordinal: int, stream: Any) -> DeviceArray:
    """The same of a picture on GPU `ordinal`, where `stream` may read it; floats are checked when they are read."""
    found = DeviceArray.of(image, gapless=False, stream=int(stream) or LEGACY_STREAM)
    name = str(DTYPES[found.dtype].numpy) if found.dtype in DTYPES else "other"
    if name != _dtype(camera):
        raise _not_of_type(camera, f"{name} array")
    _require_shape(camera, found.shape)
    device = driver.ordinal_of(found.address) if found.device is None else found.device
    if device != ordinal or not found.address or found.address % DTYPES[found.dtype].itemsize:
        about = "no GPU" if device is None else f"GPU {device}"
        what = f"image {camera.role} is at {found.address:#x} on {about}, the Plan on GPU {ordinal}"
        raise FrtcError("input.image_device", what, [_declared(camera)], "copy it there, or pass a NumPy array")
    view = found if camera.layout == "hwc" else found.transposed((1, 2, 0))
    return view if camera.pixel.startswith("rgb") else view.reversed(2)


def _dtype(camera: Camera) -> np.dtype[Any]:
    return np.dtype(np.uint8 if camera.pixel.endswith("8") else np.float32)


def _declared(camera: Camera) -> tuple[str, str]:
    return "declared", f"{camera.role}: {_dtype(camera)} {camera.pixel}, {camera.layout}"


def _not_of_type(camera: Camera, found: str) -> FrtcError:
    what = f"image {camera.role} is a {found}, not a {_dtype(camera)} array"
    return FrtcError("input.image_dtype", what, [_declared(camera)], "convert it, or compile with another --pixel")


def _require_shape(camera: Camera, shape: tuple[int, ...]) -> None:
    channels = shape[-1 if camera.layout == "hwc" else 0] if len(shape) == 3 else 0
    if channels != 3 or 0 in shape:
        want = "[height, width, 3]" if camera.layout == "hwc" else "[3, height, width]"
        raise FrtcError(
            "input.image_shape",
            f"image {camera.role} has the shape {list(shape)}, not {want}",
            [_declared(camera)],
            "pass one picture in this layout, or compile with another --layout",
        )
    if max(shape) > SIDE_MOST:
        what = f"image {camera.role} has the shape {list(shape)}, more than {SIDE_MOST} on a side"
        raise FrtcError("input.image_shape", what, [_declared(camera)], "crop or shrink it first")
