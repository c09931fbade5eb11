"""One picture out of a video, or out of the bytes of a PNG or JPEG, by FFmpeg's decoders (PyAV).

NOTE: the format is given, never guessed: FFmpeg would follow a playlist that bears a video's name
to other files and hosts. Decoders stop at errors instead of painting over them.
"""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
from av.codec.context import CodecContext
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from frtc.dataset_format import PIXELS, Array, check_picture
from frtc.errors import FrtcError

STRICT = {"max_pixels": str(PIXELS), "err_detect": "explode"}
STILLS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "mjpeg"}  # first bytes -> decoder


def still(data: bytes, where: str) -> Array:
    """u8 [H, W, 3] of a PNG or JPEG file's bytes."""
    codec = next((name for magic, name in STILLS.items() if data.startswith(magic)), None)
    if codec is None:
        what = f"{where} is neither PNG nor JPEG"
        raise FrtcError("dataset.image", what, [("begins with", data[:8].hex(" ") or "nothing")])
    try:
        decoder = CodecContext.create(codec, "r")
        assert isinstance(decoder, VideoCodecContext)
        decoder.options = dict(STRICT)
        frames = [*decoder.decode(av.Packet(data)), *decoder.decode(None)]
    except Exception as fault:  # FFmpeg fails on damaged data in any way
        raise FrtcError("dataset.image", f"{where} cannot be decoded: {_said(fault)}", hint="copy it again") from None
    if len(frames) != 1 or frames[0].is_corrupt:
        raise FrtcError("dataset.image", f"{where} does not hold one whole picture")
    return _rgb(frames[0], where)


def video_frame(path: Path, seconds: float, fps: float) -> Array:
    """u8 [H, W, 3]: the frame nearest to `seconds` on the video's own clock, at most half a frame away.

    Seeks to the key frame before, and decodes from there.
    """
    where = f"{path} at {seconds:.3f} s"
    try:
        with path.open("rb") as file, av.open(file, "r", format="mp4") as container:
            found = _nearest(container, seconds, fps)
    except Exception as fault:  # FFmpeg fails on a damaged file in any way
        hint = "copy the dataset again, or take the episode out"
        raise FrtcError("dataset.video", f"{where} cannot be decoded: {_said(fault)}", hint=hint) from None
    if found is None or abs(found[1] - seconds) > 0.5 / fps:
        near = "it is empty" if found is None else f"the nearest is at {found[1]:.3f} s"
        hint = "video and table do not belong together: copy the dataset again"
        raise FrtcError("dataset.video", f"{where} has no frame: {near}", hint=hint)
    if found[0].is_corrupt:
        raise FrtcError("dataset.video", f"{where} is damaged", hint="copy the dataset again")
    return _rgb(found[0], where)


def _nearest(container: InputContainer, seconds: float, fps: float) -> tuple[VideoFrame, float] | None:
    """The frame and its time."""
    if not container.streams.video:
        return None
    stream = container.streams.video[0]
    stream.codec_context.options = dict(STRICT)
    if stream.time_base is None:
        return None
    before = max(seconds - 0.5 / fps, 0.0)
    container.seek(int(before / stream.time_base), stream=stream)
    best: tuple[VideoFrame, float] | None = None
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        time = float(frame.pts * stream.time_base)
        if best is None or abs(time - seconds) < abs(best[1] - seconds):
            best = (frame, time)
        if time >= seconds:
            break
    return best


def _rgb(frame: VideoFrame, where: str) -> Array:
    picture: Array = np.ascontiguousarray(frame.to_ndarray(format="rgb24"))
    check_picture(picture.shape, picture.dtype, where)
    return picture


def _said(fault: Exception) -> str:
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
