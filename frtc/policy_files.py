"""The policy of a checkpoint: what its files say, what options add, what had to be assumed.

  files = read_policy_files(folder, family, options)    # origin, cameras, statistics, prompt; facts with their sources
  policy = files.policy(sizes)                          # once the model's sizes are known

An option wins over a file, a file over the family's published default. A default that changes motion is recorded as
assumed (an error with `strict`). A choice without a neutral value is an error that lists the choices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from frtc.errors import FrtcError, UsageError
from frtc.lerobot_files import (
    NEWLINE_STEPS,
    POST,
    PRE,
    Pipeline,
    action_names,
    feature_dim,
    read_pipeline,
    refuse_transforms,
    relative_mask,
)
from frtc.models.checkpoint import read_json
from frtc.models.evidence import Fact
from frtc.models.policies import PolicyFamily
from frtc.policy_cameras import lerobot_cameras, openpi_cameras
from frtc.policy_options import PolicyOptions, action_mask
from frtc.policy_reader import Reader
from frtc.runtime.policy import (
    Absolute,
    Assumption,
    Camera,
    Images,
    Noise,
    Norm,
    Policy,
    Prompt,
    Slice,
    State,
    Unnormalise,
    VectorSteps,
)
from frtc.statistics import OPENPI_EPS, OPENPI_RULES, openpi_asset, openpi_statistics
from frtc.tokenizer_files import TokenizerFile, read_tokenizer


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the model's tensors and configuration decide."""

    image: int  # pixels of a side
    budget: int  # prompt tokens
    vocab: int  # rows of the embedding table
    horizon: int
    action_width: int  # padded
    state_width: int = 0  # padded; 0: the state is no input of the model


@dataclass(frozen=True, slots=True)
class Told:
    """What the two origins tell each in their own way.

    action       how actions are un-normalised, [action_dim]
    mask         actions relative to the state; () where none is
    resolution   side of the pictures, where the files name it
    tokenizer    what the origin calls its tokenizer
    names        of the actions; () where no file has them
    """

    cameras: tuple[Camera, ...]
    state: State
    action: Norm
    action_dim: int
    mask: tuple[bool, ...]
    prompt: Prompt
    resolution: int | None
    tokenizer: str
    state_steps: VectorSteps = ()
    action_steps: VectorSteps = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """Everything about the policy but the model's sizes."""

    family: PolicyFamily
    origin: str
    told: Told
    text: TokenizerFile
    facts: tuple[Fact, ...]
    assumed: tuple[Assumption, ...]

    @property
    def cameras(self) -> tuple[Camera, ...]:
        return self.told.cameras

    @property
    def tokenizer(self) -> bytes:
        """The bytes that go into the Plan."""
        return self.text.data

    def policy(self, sizes: Sizes) -> Policy:
        """The policy for a model of these sizes."""
        told, family, pixels = self.told, self.family, self.family.pixels[self.origin]
        if told.resolution not in (None, sizes.image):
            what = f"config.json says pictures of {told.resolution} pixels, the model takes {sizes.image}"
            raise FrtcError("policy.features", what, [("field", f"config.json: {family.resolution}")])
        if family.state_input != (sizes.state_width > 0):
            takes = "takes the state as numbers" if family.state_input else "takes no state"
            raise FrtcError("policy.features", f"{family.name} {takes}, its module has another form")
        widths = {"state": (told.state.dim, sizes.state_width), "action": (told.action_dim, sizes.action_width)}
        for name, (dim, width) in widths.items():
            if 0 < width < dim:
                what = f"{name} of {dim} dimensions does not fit into the model's width {width}"
                raise FrtcError("statistics.value", what, hint=f"--{name}-dim cuts padding off")
        prepare = (
            Images(told.cameras, sizes.image, pixels.resize, pixels.border, pixels.place),
            *told.state_steps,
            replace(told.state, width=sizes.state_width),
            told.prompt,
            self.text.step(family, sizes.budget, sizes.vocab),
            Noise(sizes.horizon, sizes.action_width),
        )
        absolute = (Absolute(told.mask),) if any(told.mask) else ()
        cut = Slice(sizes.horizon, told.action_dim, told.names)
        return Policy(prepare, (cut, Unnormalise(told.action), *absolute, *told.action_steps), self.assumed)


def read_policy_files(folder: Path, family: PolicyFamily, options: PolicyOptions) -> PolicyFiles:
    """Reads the side files in `folder`, the checkpoint's."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    reader = Reader(folder, family, options, config)
    origin = reader.origin()
    told = _openpi(reader) if origin == "openpi" else _lerobot(reader, origin)
    _show_rules(reader, told, origin)
    text = read_tokenizer(reader, told.tokenizer)
    files = PolicyFiles(family, origin, told, text, tuple(reader.facts), tuple(reader.assumed))
    if options.strict and files.assumed:
        rows = [(a.field, f"{a.value} ({a.why}); confirm with {a.option}") for a in files.assumed]
        raise UsageError("policy.assumed", f"--strict, and {len(rows)} values are assumed", rows)
    return files


CLEANING = {"none": "as given", "spaces": "strip, _ and newline to space", "newline": "as given, ends with a newline"}


def _show_rules(reader: Reader, told: Told, origin: str) -> None:
    """What follows from family and origin alone, for people to read."""
    pixels, prompt, by = reader.family.pixels[origin], told.prompt, f"{reader.family.name} of {origin}"
    place = "centred" if pixels.place == "center" else "at the bottom right"
    reader.fact("pictures", f"{pixels.resize}, {place}, border {pixels.border:g}", by)
    reader.fact("text", f"{prompt.template!r}; {CLEANING[prompt.clean]}", by)
    rules = [f"state {told.state.norm.rule}", f"actions {told.action.rule}"]
    reader.fact("normalisation", rules, by if origin == "openpi" else f"{PRE}, {POST}")


def _openpi(reader: Reader) -> Told:
    options, family, robot = reader.options, reader.family, reader.robot()
    cameras = openpi_cameras(reader, robot)
    asset = openpi_asset(reader.folder, options.asset)
    stats = openpi_statistics(reader.folder, asset)
    reader.fact("asset", asset, "option" if options.asset else f"assets/{asset}: the only one")
    state = reader.cut(stats["state"], options.state_dim, robot)
    action = reader.cut(stats["actions"], options.action_dim, robot)
    rule, keep = family.openpi_norm or "", options.constant_statistics
    norms = [s.norm(rule, OPENPI_RULES[rule], OPENPI_EPS, keep) for s in (state, action)]
    if robot:
        proved = action_mask(robot.relative[family.name], action.dim)
        mask = reader.mask(proved, f"robot {robot.name}", state.dim, action.dim)
    else:
        why = "no file says; state and actions as trained: no delta transform, no change of units"
        mask = reader.mask(None, why, state.dim, action.dim)
    return Told(
        cameras=cameras,
        state=State(state.dim, norms[0]),
        action=norms[1],
        action_dim=action.dim,
        mask=mask,
        prompt=_openpi_prompt(reader, state.dim),
        resolution=None,
        tokenizer=family.tokenizer,
        state_steps=robot.state_steps if robot else (),
        action_steps=robot.action_steps if robot else (),
    )


def _openpi_prompt(reader: Reader, state_dim: int) -> Prompt:
    family, shown = reader.family, reader.state_in_prompt()
    if family.state_input:
        return Prompt("spaces", family.plain)
    if shown is None:
        why = f"no file says; the published default of {family.name}"
        shown = reader.assume("state_in_prompt", family.state_in_prompt, why, "--state-in-prompt yes or no")
    else:
        reader.fact("state_in_prompt", shown, "option")
    return Prompt("spaces", family.with_state if shown else family.plain, state_dim if shown else 0)


def _lerobot(reader: Reader, origin: str) -> Told:
    options, family, config = reader.options, reader.family, reader.config
    reader.robot()  # refused: the pipelines say
    refuse_transforms(config)
    own = (family.lerobot_state_step,) if family.lerobot_state_step else ()
    pre, post = read_pipeline(reader.folder, PRE, own), read_pipeline(reader.folder, POST)
    cameras = lerobot_cameras(reader, pre)
    dims = {
        "state": feature_dim(config, "input_features", "observation.state"),
        "action": feature_dim(config, "output_features", "action"),
    }
    for name, dim in dims.items():
        reader.fact(f"{name}_dim", dim, f"config.json: {'in' if name == 'state' else 'out'}put_features")
        if (given := getattr(options, f"{name}_dim")) not in (None, dim):
            raise UsageError("policy.dims", f"{name}_dim {given}, but config.json says {dim}")
    keep = options.constant_statistics
    state = pre.norm("normalizer_processor", "observation.state", dims["state"], keep)
    return Told(
        cameras=cameras,
        state=State(dims["state"], state),
        action=post.norm("unnormalizer_processor", "action", dims["action"], keep),
        action_dim=dims["action"],
        mask=reader.mask(relative_mask(pre, post, dims["action"]), f"{PRE}, {POST}", dims["state"], dims["action"]),
        prompt=_lerobot_prompt(reader, pre, origin, dims["state"]),
        resolution=reader.resolution(),
        tokenizer=str(pre.steps.get("tokenizer_processor", {}).get("tokenizer_name") or family.tokenizer),
        names=action_names(pre, dims["action"]),
    )


def _lerobot_prompt(reader: Reader, pre: Pipeline, origin: str, state_dim: int) -> Prompt:
    """As the pipeline writes it: cleaned, with the state; or as given, perhaps with a newline at the end."""
    family, option = reader.family, reader.state_in_prompt()
    as_given = Prompt("newline" if any(step in pre.steps for step in NEWLINE_STEPS) else "none", "{prompt}")
    if family.state_input:
        return as_given
    shown = family.lerobot_state_step in pre.steps if option is None else option
    reader.fact("state_in_prompt", shown, "option" if option is not None else f"{PRE}: {family.lerobot_state_step}")
    if shown:  # 0.4 pads the state before it writes it into the prompt
        numbers = reader.count("max_state_dim", 32) if origin == "lerobot-0.4" else state_dim
        return Prompt("spaces", family.with_state, numbers)
    return as_given if option is None else Prompt("spaces", family.plain)
