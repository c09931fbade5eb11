"""The policy as data: from a raw observation to device inputs, and from the model's output to robot units.

A `Policy` is a closed, ordered list of steps. Each step is one record here and one NumPy function beside this file, and
its JSON form lives in the Plan. The device inputs that a policy makes (`device_inputs`):

  images  u8  [V, S, S, 3]  resize "pil_bilinear": 0..255; the model's vision stage scales by x/255*2-1
          f32 [V, S, S, 3]  resize "torch_bilinear": already in [-1, 1] (a border may be lower)
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
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from frtc.errors import FrtcError, nearest

SCHEMA = "frtc.policy/1"
RESERVED = ("state", "prompt", "noise")  # keys of an observation that are not cameras
MOST = 4096  # upper bound of every size, so that a forged policy cannot ask for memory

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
    """Camera pictures of any size -> `images`: resized keeping the aspect, centred, the rest filled with `border`."""

    cameras: tuple[Camera, ...]
    size: int
    resize: Literal["pil_bilinear", "torch_bilinear"]
    border: float  # in the unit of `images`


@dataclass(frozen=True, slots=True)
class State:
    """Joint state in robot units [dim] -> normalised; also the device input `state` [width] where width > 0."""

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
    bos: int
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
    """Model output -> the first `horizon` rows and the `dim` columns that the robot has."""

    horizon: int
    dim: int


@dataclass(frozen=True, slots=True)
class Unnormalise:
    norm: Norm


@dataclass(frozen=True, slots=True)
class Absolute:
    """actions[:, i] += state[i] (robot units, as observed) where mask[i]; dimensions after the mask stay."""

    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that no file proves and no option gave. Said at every open until an option confirms it."""

    field: str
    value: str
    why: str
    option: str


PREPARE = {"images": Images, "state": State, "prompt": Prompt, "tokens": Tokens, "noise": Noise}  # in this order
FINISH = {"slice": Slice, "unnormalise": Unnormalise, "absolute": Absolute}
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
        """The step of this kind; a policy has at most one."""
        return next((step for step in (*self.prepare, *self.finish) if type(step) is kind), None)

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
        _no_others(data, ("schema", "prepare", "finish", "assumed"), "policy")
        steps = {
            name: tuple(_read_steps(data[name], table, name))
            for name, table in (("prepare", PREPARE), ("finish", FINISH))
        }
        assumed = _read(tuple[Assumption, ...], data["assumed"], "assumed")
        return Policy(steps["prepare"], steps["finish"], assumed)


def _step_json(step: Any, table: Mapping[str, type]) -> dict[str, Any]:
    name = next(name for name, kind in table.items() if kind is type(step))
    return {"step": name, **dataclasses.asdict(step)}


def _read_steps(items: object, table: Mapping[str, type], where: str) -> Iterator[Any]:
    if not isinstance(items, list):
        raise _bad(where, "a list of steps", items)
    for i, item in enumerate(items):
        name = item.get("step") if isinstance(item, Mapping) else None
        if not isinstance(name, str) or name not in table:
            known = [("known", ", ".join(table)), ("nearest", nearest(str(name), table))]
            raise FrtcError("policy.step", f"{where}[{i}] is no step of {SCHEMA}: {name!r}", known)
        yield _read(table[name], {k: v for k, v in item.items() if k != "step"}, f"{where}[{i}].{name}")


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as `kind`: a record, tuple, Literal, int, float, bool or str, without coercion."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise _bad(where, "a record", value)
        hints = get_type_hints(kind)
        _no_others(value, tuple(hints), where)
        return kind(**{name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)) or len(value) > MOST:
            raise _bad(where, f"a list of at most {MOST} items", value)
        return tuple(_read(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise _bad(where, " or ".join(get_args(kind)), value)
        return value
    if kind is float and type(value) in (int, float) and abs(value) <= 1e300:  # neither NaN nor infinity
        return float(value)
    if kind is float or type(value) is not kind:
        raise _bad(where, "a finite number" if kind is float else kind.__name__, value)
    return value


def _no_others(found: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    """Exactly the known fields: a missing or unknown one is an error."""
    missing, unknown = [k for k in known if k not in found], [str(k) for k in found if k not in known]
    if missing or unknown:
        rows = [("missing", ", ".join(missing)), ("unknown", ", ".join(unknown)), ("known", ", ".join(known))]
        raise FrtcError("policy.field", f"{where} does not have the fields of {SCHEMA}", [r for r in rows if r[1]])


def _bad(where: str, want: str, found: object) -> FrtcError:
    return FrtcError("policy.field", f"{where} has no valid value", [("wants", want), ("found", repr(found)[:80])])


def _problems(policy: Policy) -> Iterator[str]:
    """What makes a well-typed policy senseless. Steps come in table order, so each reads what earlier ones made."""
    for steps, table in ((policy.prepare, PREPARE), (policy.finish, FINISH)):
        kinds = list(table.values())
        order = [kinds.index(type(step)) if type(step) in kinds else -1 for step in steps]
        if -1 in order or order != sorted(set(order)):
            yield f"the steps are not a part of {', '.join(table)} in this order"
            return  # the checks below look steps up by kind
    state, noise = policy.find(State), policy.find(Noise)
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


def _size(name: str, value: int) -> Iterator[str]:
    if not 1 <= value <= MOST:
        yield f"{name} {value} is not in 1..{MOST}"


def _image_problems(images: Images) -> Iterator[str]:
    roles = [camera.role for camera in images.cameras]
    if not 1 <= len(roles) <= 16 or len(set(roles)) != len(roles) or set(roles) & {*RESERVED, ""}:
        yield f"camera roles {roles} are not 1 to 16 different names apart from {', '.join(RESERVED)}"
    yield from _size("images.size", images.size)
    if images.resize == "pil_bilinear" and images.border not in range(256):
        yield f"border {images.border} is not a byte"
    if images.resize == "torch_bilinear" and not -16.0 <= images.border <= 16.0:
        yield f"border {images.border} is not near [-1, 1]"


def _norm_problems(name: str, norm: Norm, dim: int) -> Iterator[str]:
    want = 0 if norm.rule == "identity" else dim
    if len(norm.mean_or_low) != want or len(norm.std_or_high) != want:
        yield f"{name} has {dim} dims, its statistics {len(norm.mean_or_low)} and {len(norm.std_or_high)}"
    numbers = (*norm.mean_or_low, *norm.std_or_high, norm.eps)
    if norm.eps < 0 or not all(math.isfinite(v) for v in numbers):
        yield f"{name} has statistics that are not finite"


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
    if not (0 <= tokens.bos < tokens.vocab <= 2**31 - 1 and 0 <= tokens.pad < tokens.vocab):
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
    if noise and (cut.horizon > noise.horizon or cut.dim > noise.width):
        yield f"slice [{cut.horizon}, {cut.dim}] is larger than noise [{noise.horizon}, {noise.width}]"
    if scale:
        yield from _norm_problems("actions", scale.norm, cut.dim)
    if absolute and len(absolute.mask) > min(cut.dim, state.dim if state else 0):
        yield f"{len(absolute.mask)} absolute dims, but {cut.dim} actions and {state.dim if state else 0} state numbers"
