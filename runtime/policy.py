"""The policy as data: from a raw observation to device inputs, and from the model's output to robot units.

A `Policy` is a closed, ordered list of steps. Each step is one record here and one NumPy function beside this file, and
its JSON form lives in the Plan. The device inputs that a policy makes (`device_inputs`):

  images  u8  [V, S, S, 3]  resize "pil_bilinear": 0..255; the model's vision stage scales by x/255*2-1
          f32 [V, S, S, 3]  resize "torch_bilinear01": in [0, 1] (a border may be lower); the vision stage does x*2-1
          f32 [V, S, S, 3]  resize "torch_bilinear", of older Plans: already in [-1, 1] (a border may be lower)
  state   f32 [width]       only where the model takes the state as numbers (width > 0); zero-padded
  tokens  i32 [budget]      BOS, text, then `pad`
  n       i32 []            how many of the tokens are valid
  noise   f32 [H, W]        given by the caller, or Philox4x32-10 (noise.py)

V views in model order, channels RGB, rows top-down. Previous chunk and delay (real-time chunking) are not inputs: the
published rule needs the gradient of the denoise step, which the compiled model does not have.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from frtc.errors import FrtcError, nearest
from frtc.runtime.policy_json import MOST, SCHEMA, bad, later, no_others, read, write

RESERVED = ("state", "prompt", "noise")  # keys of an observation that are not cameras
VECTOR_STEPS = 16  # most of them in a row

Layout = Literal["hwc", "chw"]
Pixel = Literal["rgb8", "bgr8", "rgb01", "bgr01"]  # 8: uint8; 01: float32 in [0, 1]


@dataclass(frozen=True, slots=True)
class Norm:
    """How one vector is normalised. The rules and their precision are the origin's own: steps_vector.py."""

    rule: Literal["identity", "openpi_mean_std", "openpi_range", "lerobot_mean_std", "lerobot_range"]
    mean_or_low: tuple[float, ...] = ()
    std_or_high: tuple[float, ...] = ()
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Camera:
    role: str  # its key in the observation
    source: str  # its name in the checkpoint's own files, for messages
    layout: Layout = "hwc"
    pixel: Pixel = "rgb8"


@dataclass(frozen=True, slots=True)
class Images:
    """Camera pictures of any size -> `images`: resized keeping the aspect, the rest filled with `border`."""

    cameras: tuple[Camera, ...]
    size: int
    resize: Literal["pil_bilinear", "torch_bilinear", "torch_bilinear01"]
    border: float  # in the unit of `images`
    place: Literal["center", "end"] = later("center")  # end: all of the border above or on the left


@dataclass(frozen=True, slots=True)
class Scale:
    """x[i] *= factor[i]; dimensions after the last factor stay."""

    factor: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Linkage:
    """On `dims`: the stroke of a slider, 0 to 1, -> the turn of the crank that drives it, 0 at `zero` and 1 at `full`.

    low, high    where the slider is at strokes 0 and 1, in metres from the crank's axis
    arm, crank   lengths of the rod and of the crank in metres
    zero, full   angles in radians; the angle is clipped to -pi/2 .. pi/2
    """

    dims: tuple[int, ...]
    low: float
    high: float
    arm: float
    crank: float
    zero: float
    full: float


@dataclass(frozen=True, slots=True)
class Rescale:
    """On `dims`: x + shift as a share of the range from low to high, unclipped."""

    dims: tuple[int, ...]
    shift: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class State:
    """State [dim] -> normalised; also the device input `state` [width] where width > 0, padded with zeros.

    It comes in robot units, or as vector steps before this one made it.
    """

    dim: int
    norm: Norm
    width: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Instruction (and state as 256 bins over [-1, 1]) -> text. {prompt} and {state} in the template are replaced."""

    clean: Literal["none", "spaces", "newline"]  # spaces: strip, "_" and newline to space; newline: end with one
    template: str
    state_numbers: int = 0  # numbers in the text; beyond the state's dim they are the bin of 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text -> `tokens` and `n`: BOS, the tokenizer's ids, right padding. Longer than the budget is an error."""

    budget: int
    bos: int  # -1: none
    pad: int
    vocab: int  # rows of the embedding table: no id may reach it
    tokenizer: str  # SHA-256 of the tokenizer.json kept in the Plan


@dataclass(frozen=True, slots=True)
class Noise:
    """-> `noise` [horizon, width]."""

    horizon: int
    width: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Model output -> the first `horizon` rows and the `dim` columns that the robot has; reports use their names."""

    horizon: int
    dim: int
    names: tuple[str, ...] = later(())  # one for each column, or none


@dataclass(frozen=True, slots=True)
class Unnormalise:
    norm: Norm


@dataclass(frozen=True, slots=True)
class Absolute:
    """actions[:, i] += state[i] (the state that was normalised) where mask[i]; dimensions after the mask stay."""

    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that no file proves and no option gave. Said at every open until an option confirms it."""

    field: str
    value: str
    why: str
    option: str


# Vector steps: on the state before it is normalised, and on the actions at the end; any number of each, in any order
VECTOR = {"scale": Scale, "linkage": Linkage, "rescale": Rescale}
PREPARE = {"images": Images, **VECTOR, "state": State, "prompt": Prompt, "tokens": Tokens, "noise": Noise}  # the order
FINISH = {"slice": Slice, "unnormalise": Unnormalise, "absolute": Absolute, **VECTOR}
VectorSteps = tuple[Scale | Linkage | Rescale, ...]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Policy:
    prepare: tuple[Any, ...]
    finish: tuple[Any, ...]
    assumed: tuple[Assumption, ...] = ()

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise FrtcError("policy.value", f"the policy contradicts itself: {problem}")

    def find(self, kind: type[S]) -> S | None:
        """The step of this kind; a policy has at most one (but for vector steps)."""
        return next((step for step in (*self.prepare, *self.finish) if type(step) is kind), None)

    @property
    def state_steps(self) -> VectorSteps:
        """From the state as observed to the state as it is normalised."""
        return vector_steps(self.prepare)

    @property
    def action_steps(self) -> VectorSteps:
        """From un-normalised, absolute actions to what the robot takes."""
        return vector_steps(self.finish)

    def device_inputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (element type, shape) of what `prepare` makes."""
        made: dict[str, tuple[str, tuple[int, ...]]] = {}
        if images := self.find(Images):
            dtype = "u8" if images.resize == "pil_bilinear" else "f32"
            made["images"] = (dtype, (len(images.cameras), images.size, images.size, 3))
        if (state := self.find(State)) and state.width:
            made["state"] = ("f32", (state.width,))
        if tokens := self.find(Tokens):
            made |= {"tokens": ("i32", (tokens.budget,)), "n": ("i32", ())}
        if noise := self.find(Noise):
            made["noise"] = ("f32", (noise.horizon, noise.width))
        return made

    def to_json(self) -> dict[str, Any]:
        """The form kept in the Plan's program entry."""
        return {
            "schema": SCHEMA,
            "prepare": [_step_json(step, PREPARE) for step in self.prepare],
            "finish": [_step_json(step, FINISH) for step in self.finish],
            "assumed": [dataclasses.asdict(a) for a in self.assumed],
        }

    @staticmethod
    def from_json(data: object) -> Policy:
        """Inverse of to_json. Anything it does not know is refused."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            hint = "open it with the frtc that wrote it, or compile it again"
            raise FrtcError(
                "policy.version",
                "this policy is not in a form that this frtc reads",
                [("found", repr(found)), ("known", SCHEMA)],
                hint,
            )
        no_others(data, ("schema", "prepare", "finish", "assumed"), "policy")
        steps = {
            name: tuple(_read_steps(data[name], table, name))
            for name, table in (("prepare", PREPARE), ("finish", FINISH))
        }
        assumed = read(tuple[Assumption, ...], data["assumed"], "assumed")
        return Policy(steps["prepare"], steps["finish"], assumed)


def vector_steps(steps: tuple[Any, ...]) -> VectorSteps:
    return tuple(step for step in steps if isinstance(step, Scale | Linkage | Rescale))


def _step_json(step: Any, table: Mapping[str, type]) -> dict[str, Any]:
    name = next(name for name, kind in table.items() if kind is type(step))
    return {"step": name, **write(step)}


def _read_steps(items: object, table: Mapping[str, type], where: str) -> Iterator[Any]:
    if not isinstance(items, list):
        raise bad(where, "a list of steps", items)
    for i, item in enumerate(items):
        name = item.get("step") if isinstance(item, Mapping) else None
        if not isinstance(name, str) or name not in table:
            known = [("known", ", ".join(table)), ("nearest", nearest(str(name), table))]
            raise FrtcError("policy.step", f"{where}[{i}] is no step of {SCHEMA}: {name!r}", known)
        yield read(table[name], {k: v for k, v in item.items() if k != "step"}, f"{where}[{i}].{name}")


def _problems(policy: Policy) -> Iterator[str]:
    """What makes a well-typed policy senseless. Steps come in table order, so each reads what earlier ones made."""
    for steps, table in ((policy.prepare, PREPARE), (policy.finish, FINISH)):
        if not _in_order([type(step) for step in steps], list(table.values())):
            yield f"the steps are not a part of {', '.join(table)} in this order"
            return  # the checks below look steps up by kind
    state, noise = policy.find(State), policy.find(Noise)
    yield from _vector_problems("prepare", policy.state_steps, state.dim if state else 0)
    if images := policy.find(Images):
        yield from _image_problems(images)
    if state:
        yield from _size("state.dim", state.dim)
        yield from _norm_problems("state", state.norm, state.dim)
        if state.width and not state.dim <= state.width <= MOST:
            yield f"state.width {state.width} cannot hold {state.dim} numbers"
    if (prompt := policy.find(Prompt)) or policy.find(Tokens):
        yield from _text_problems(prompt, policy.find(Tokens), state)
    if noise:
        yield from _size("noise", noise.horizon)
        yield from _size("noise", noise.width)
    yield from _finish_problems(policy, state, noise)


def is_name(text: str) -> bool:
    """Short, and what a terminal prints as it stands."""
    return 0 < len(text) <= 64 and text.isprintable()


def _in_order(found: list[type], table: list[type]) -> bool:
    """Each kind at most once and in the table's order; kinds of vector steps count as one that may be repeated."""
    vector = list(VECTOR.values())
    if not all(kind in table for kind in found):
        return False
    ranks = [table.index(vector[0] if kind in vector else kind) for kind in found]
    once = [rank for rank, kind in zip(ranks, found, strict=True) if kind not in vector]
    return ranks == sorted(ranks) and len(once) == len(set(once))


def _size(name: str, value: int) -> Iterator[str]:
    if not 1 <= value <= MOST:
        yield f"{name} {value} is not in 1..{MOST}"


def _image_problems(images: Images) -> Iterator[str]:
    roles = [camera.role for camera in images.cameras]
    known = len(set(roles)) == len(roles) and not set(roles) & {*RESERVED, ""} and all(map(str.isprintable, roles))
    if not 1 <= len(roles) <= 16 or not known:
        yield f"camera roles {roles} are not 1 to 16 different printable names apart from {', '.join(RESERVED)}"
    yield from _size("images.size", images.size)
    if images.resize == "pil_bilinear" and images.border not in range(256):
        yield f"border {images.border} is not a byte"
    if images.resize != "pil_bilinear" and not -16.0 <= images.border <= 16.0:
        yield f"border {images.border} is not near [-1, 1]"


def _norm_problems(name: str, norm: Norm, dim: int) -> Iterator[str]:
    want = 0 if norm.rule == "identity" else dim
    if len(norm.mean_or_low) != want or len(norm.std_or_high) != want:
        yield f"{name} has {dim} dims, its statistics {len(norm.mean_or_low)} and {len(norm.std_or_high)}"
    numbers = (*norm.mean_or_low, *norm.std_or_high, norm.eps)
    if norm.eps < 0 or not all(math.isfinite(v) for v in numbers):
        yield f"{name} has statistics that are not finite"


def _vector_problems(where: str, steps: VectorSteps, dim: int) -> Iterator[str]:
    """dim: how many numbers the steps get."""
    if len(steps) > VECTOR_STEPS:
        yield f"{where} has {len(steps)} vector steps, more than {VECTOR_STEPS}"
    for step in steps:
        name, numbers, ranges = f"{where}.{type(step).__name__.lower()}", dataclasses.astuple(step), []
        if isinstance(step, Scale):
            numbers = step.factor
            if not 1 <= len(numbers) <= dim:
                yield f"{name} has {len(numbers)} factors for {dim} numbers"
        else:
            dims, numbers, ranges = list(step.dims), numbers[1:], [(step.low, step.high)]
            if not dims or dims != sorted(set(dims)) or not 0 <= dims[0] <= dims[-1] < dim:
                yield f"{name} names dims {dims[:8]}, not rising ones below {dim}"
        if isinstance(step, Linkage):
            ranges.append((step.zero, step.full))
            if not (step.crank > 0 and step.arm > 0):
                yield f"{name} has no length: arm {step.arm}, crank {step.crank}"
        if not all(math.isfinite(v) for v in numbers):
            yield f"{name} has numbers that are not finite"
        yield from (f"{name}: the range from {low} to {high} is empty" for low, high in ranges if low == high)


def _text_problems(prompt: Prompt | None, tokens: Tokens | None, state: State | None) -> Iterator[str]:
    if prompt is None or tokens is None:
        yield "prompt and tokens come together"
        return
    numbers = prompt.state_numbers
    if prompt.template.count("{prompt}") != 1 or prompt.template.count("{state}") != (numbers > 0):
        yield f"the template {prompt.template!r} does not hold {{prompt}} once, and {{state}} iff the state is in it"
    if numbers and (state is None or not state.dim <= numbers <= MOST):
        yield f"{numbers} numbers in the prompt do not hold the state"
    if not 1 <= tokens.budget <= 65536:
        yield f"budget {tokens.budget} is not in 1..65536"
    if not (-1 <= tokens.bos < tokens.vocab <= 2**31 - 1 and 0 <= tokens.pad < tokens.vocab):
        yield f"bos {tokens.bos} and pad {tokens.pad} are not below the vocabulary {tokens.vocab}"
    if not re.fullmatch(r"[0-9a-f]{64}", tokens.tokenizer):
        yield "tokens.tokenizer is no SHA-256"


def _finish_problems(policy: Policy, state: State | None, noise: Noise | None) -> Iterator[str]:
    cut, scale, absolute = policy.find(Slice), policy.find(Unnormalise), policy.find(Absolute)
    if cut is None:
        if policy.finish:
            yield "finish does not begin with slice"
        return
    yield from _size("slice.horizon", cut.horizon)
    yield from _size("slice.dim", cut.dim)
    if cut.names and (len(cut.names) != cut.dim or not all(map(is_name, cut.names))):
        yield f"slice.names are not {cut.dim} names of one printed line"
    if noise and (cut.horizon > noise.horizon or cut.dim > noise.width):
        yield f"slice [{cut.horizon}, {cut.dim}] is larger than noise [{noise.horizon}, {noise.width}]"
    if scale:
        yield from _norm_problems("actions", scale.norm, cut.dim)
    yield from _vector_problems("finish", policy.action_steps, cut.dim)
    if absolute and len(absolute.mask) > min(cut.dim, state.dim if state else 0):
        yield f"{len(absolute.mask)} absolute dims, but {cut.dim} actions and {state.dim if state else 0} state numbers"
