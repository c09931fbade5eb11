"""Image steps against the libraries whose arithmetic they restate, and pictures that are not what was declared."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frtc.errors import FrtcError
from frtc.runtime.policy import Camera, Images
from frtc.runtime.steps_image import ImageStep, PilResize, SignedTorchResize, TorchResize

RNG = np.random.default_rng(5)
SIZES = [(480, 640), (224, 224), (224, 300), (300, 224), (112, 112), (37, 224), (1080, 1920), (1, 1), (2, 3), (720, 96)]
SIZES += [tuple(int(v) for v in RNG.integers(8, 700, 2)) for _ in range(40)]


def picture(height: int, width: int) -> np.ndarray:
    """u8 [h, w, 3]: noise, hard edges and saturated areas."""
    image = np.random.default_rng(height * 10_007 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image[: height // 3, : width // 2] = 255
    image[height // 2 :, width // 3 : width // 2] = (0, 255, 7)
    return image


def pil_with_pad(image: np.ndarray, size: int) -> np.ndarray:
    height, width = image.shape[:2]
    ratio = max(width / size, height / size)
    h, w = int(height / ratio), int(width / ratio)
    small = Image.fromarray(image)
    if height - h > max(0, 2 * (width - w)):  # here Pillow 13 would go down first
        small = small.resize((w, height), Image.Resampling.BILINEAR)
    square = Image.new("RGB", (size, size), 0)
    square.paste(small.resize((w, h), Image.Resampling.BILINEAR), (int((size - w) / 2), int((size - h) / 2)))
    return np.asarray(square)


def torch_with_pad(image: np.ndarray, size: int, border: float) -> np.ndarray:
    height, width = image.shape[:2]
    x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    ratio = max(width / size, height / size)
    h, w = int(height / ratio), int(width / ratio)
    x = torch.nn.functional.interpolate(x, size=(h, w), mode="bilinear", align_corners=False) * 2 - 1
    top, left = (size - h) // 2, (size - w) // 2
    x = torch.nn.functional.pad(x, (left, size - w - left, top, size - h - top), value=border)
    return x[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pil_bit_for_bit(height: int, width: int) -> None:
    image, out = picture(height, width), np.full((224, 224, 3), 99, np.uint8)
    PilResize(height, width, 224, 0, "base").run(image, out)
    assert np.array_equal(out, pil_with_pad(image, 224))


@pytest.mark.parametrize("border", [-1.0, -3.0])
@pytest.mark.parametrize(("height", "width"), SIZES[::3])
def test_torch_to_rounding(height: int, width: int, border: float) -> None:
    image, out = picture(height, width), np.full((224, 224, 3), 99, np.float32)
    SignedTorchResize(height, width, 224, border, "base").run(image, out)
    np.testing.assert_allclose(out, torch_with_pad(image, 224, border), rtol=0, atol=1e-6)
    TorchResize(height, width, 224, (border + 1) / 2, "base").run(image, out)
    np.testing.assert_allclose(out * 2 - 1, torch_with_pad(image, 224, border), rtol=0, atol=1e-6)


def test_the_two_rules_differ() -> None:
    image = picture(480, 640)
    assert np.abs(pil_with_pad(image, 224) / 127.5 - 1 - torch_with_pad(image, 224, -1.0)).max() > 0.1


def run(camera: Camera, image: Any, resize: str = "pil_bilinear", size: int = 32) -> np.ndarray:
    step = ImageStep(Images((camera,), size, resize, 0.0 if resize == "pil_bilinear" else -1.0))  # type: ignore[arg-type]
    out = np.zeros((1, size, size, 3), np.uint8 if resize == "pil_bilinear" else np.float32)
    step.run({camera.role: image}, out)
    return out[0]


@pytest.mark.parametrize("resize", ["pil_bilinear", "torch_bilinear", "torch_bilinear01"])
def test_every_declared_form_gives_the_same_input(resize: str) -> None:
    image = picture(40, 52)
    want = run(Camera("base", "x"), image, resize)
    unit = image.astype(np.float32) / np.float32(255)
    forms = {("hwc", "bgr8"): image[..., ::-1], ("chw", "rgb8"): image.transpose(2, 0, 1),
             ("chw", "bgr8"): image[..., ::-1].transpose(2, 0, 1), ("hwc", "rgb01"): unit,
             ("chw", "bgr01"): np.ascontiguousarray(unit[..., ::-1].transpose(2, 0, 1))}  # fmt: skip
    for (layout, pixel), given in forms.items():
        camera = Camera("base", "x", layout, pixel)  # type: ignore[arg-type]
        # openpi truncates 255*x, so a float picture may lose one step before it is resized
        atol = 1 if pixel.endswith("01") and resize == "pil_bilinear" else 0
        np.testing.assert_allclose(run(camera, given, resize).astype(np.float64), want, atol=atol, rtol=0)


def test_a_camera_may_change_its_size() -> None:
    step, out = ImageStep(Images((Camera("base", "x"),), 224, "pil_bilinear", 0)), np.zeros((1, 224, 224, 3), np.uint8)
    for size in ((480, 640), (100, 50), (480, 640)):
        step.run({"base": picture(*size)}, out)
        assert np.array_equal(out[0], pil_with_pad(picture(*size), 224))


NAN = np.full((4, 4, 3), np.nan, np.float32)
U8, F32 = np.uint8, np.float32
BASE, CHW, UNIT = Camera("base", "x"), Camera("base", "x", "chw"), Camera("base", "x", "hwc", "rgb01")
HOSTILE = [
    (BASE, np.zeros((4, 4, 3), F32), "image_dtype", "image base is a float32 array, not a uint8 array"),
    (BASE, "a.png", "image_dtype", "image base is a str, not a uint8 array"),
    (UNIT, np.zeros((4, 4, 3), U8), "image_dtype", "uint8 array, not a float32 array"),
    (BASE, np.zeros((3, 8, 9), U8), "image_shape", "[3, 8, 9], not [height, width, 3]"),
    (CHW, np.zeros((8, 9, 3), U8), "image_shape", "[8, 9, 3], not [3, height, width]"),
    (BASE, np.zeros((1, 8, 9, 3), U8), "image_shape", "[1, 8, 9, 3], not [height, width, 3]"),
    (BASE, np.zeros((8, 9, 4), U8), "image_shape", "[8, 9, 4], not [height, width, 3]"),
    (BASE, np.zeros((0, 9, 3), U8), "image_shape", "[0, 9, 3], not [height, width, 3]"),
    (BASE, np.zeros((1, 900, 3), U8), "image_shape", "1 x 900 vanishes when resized to 32"),
    (UNIT, np.full((4, 4, 3), 255, F32), "image_range", "image base leaves [0, 1]"),
    (UNIT, NAN, "image_range", "image base leaves [0, 1]"),
    (BASE, np.ma.array(np.zeros((4, 4, 3), U8)), "masked", "image base is a masked array"),
]


@pytest.mark.parametrize(("camera", "image", "code", "message"), HOSTILE)
def test_hostile_pictures(camera: Camera, image: Any, code: str, message: str) -> None:
    with pytest.raises(FrtcError, match=re.escape(message)) as caught:
        run(camera, image)
    assert caught.value.code == f"input.{code}"
