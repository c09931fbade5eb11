"""The policy of a checkpoint: what its files say, what options add, what had to be assumed.

  files = read_policy_files(folder, family, options)    # origin, cameras, statistics, prompt; facts with their sources
  policy = files.policy(sizes)                          # once the model's sizes are known

An option wins over a file, a file over the family's published default. A default that changes motion is recorded as
assumed (an error with `strict`). A choice without a neutral value is an error that lists the choices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frtc.errors import FrtcError, UsageError, nearest
from frtc.lerobot_files import (
    NEWLINE_STEPS,
    POST,
    PRE,
    Pipeline,
    camera_keys,
    feature_dim,
    read_pipeline,
    relative_mask,
)
from frtc.models.checkpoint import read_json
from frtc.models.evidence import Fact
from frtc.models.policies import PolicyFamily
from frtc.policy_options import PolicyOptions, action_mask
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
    Tokens,
    Unnormalise,
)
from frtc.runtime.tokenize import load
from frtc.statistics import OPENPI_EPS, OPENPI_RULES, Statistics, openpi_asset, openpi_statistics

ORIGINS = ("openpi", "lerobot-0.4", "lerobot-0.6")
TOKENIZERS = ("tokenizer.json", "tokenizer/tokenizer.json", "assets/tokenizer.json")
# origin -> (resize rule, border in the unit of the images input); lerobot 0.4 pads with -1 before x*2-1
RESIZE: dict[str, tuple[Any, float]] = {
    "openpi": ("pil_bilinear", 0.0),
    "lerobot-0.4": ("torch_bilinear", -3.0),
    "lerobot-0.6": ("torch_bilinear", -1.0),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the model's tensors and configuration decide."""

    image: int  # pixels of a side
    budget: int  # prompt tokens
    vocab: int  # rows of the embedding table
    horizon: int
    action_width: int  # padded


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """Everything about the policy but the model's sizes. `tokenizer` are the bytes that go into the Plan."""

    family: PolicyFamily
    origin: str
    cameras: tuple[Camera, ...]
    state: State
    action: Norm
    action_dim: int
    mask: tuple[bool, ...]  # actions relative to the state; () where none is
    prompt: Prompt
    resolution: int | None  # side of the pictures, where the files name it
    tokenizer: bytes
    facts: tuple[Fact, ...]
    assumed: tuple[Assumption, ...]

    def policy(self, sizes: Sizes) -> Policy:
        """The policy for a model of these sizes."""
        if self.resolution not in (None, sizes.image):
            what = f"config.json says pictures of {self.resolution} pixels, the model takes {sizes.image}"
            raise FrtcError("policy.features", what, [("field", "config.json: image_resolution")])
        width = sizes.action_width
        state_width = width if self.family.state_input else 0
        for name, dim, fits in (("state", self.state.dim, not state_width), ("action", self.action_dim, False)):
            if dim > width and not fits:
                what = f"{name} of {dim} dimensions does not fit into the model's width {width}"
                raise FrtcError("statistics.value", what, hint=f"--{name}-dim cuts padding off")
        resize, border = RESIZE[self.origin]
        prepare = (
            Images(self.cameras, sizes.image, resize, border),
            replace(self.state, width=state_width),
            self.prompt,
            self._tokens(sizes),
            Noise(sizes.horizon, width),
        )
        absolute = (Absolute(self.mask),) if any(self.mask) else ()
        finish = (Slice(sizes.horizon, self.action_dim), Unnormalise(self.action), *absolute)
        return Policy(prepare, finish, self.assumed)

    def _tokens(self, sizes: Sizes) -> Tokens:
        tokenizer = load(self.tokenizer)
        pieces = {piece: tokenizer.token_to_id(piece) for piece in (self.family.bos, self.family.pad)}
        if absent := [piece for piece, number in pieces.items() if number is None]:
            what = f"the tokenizer has no piece {' and no '.join(absent)}"
            raise FrtcError("tokenizer.vocab", what, hint="it belongs to another model")
        if (count := tokenizer.get_vocab_size()) > sizes.vocab:
            what = f"the tokenizer has {count} pieces, the model {sizes.vocab} embeddings"
            raise FrtcError("tokenizer.vocab", what, hint="it belongs to another model")
        digest = hashlib.sha256(self.tokenizer).hexdigest()
        return Tokens(sizes.budget, pieces[self.family.bos], pieces[self.family.pad], sizes.vocab, digest)


@dataclass(slots=True)
class _Reader:
    """One reading of a checkpoint folder: options and config.json at hand, facts collected on the way."""

    folder: Path
    family: PolicyFamily
    options: PolicyOptions
    config: dict[str, Any]
    facts: list[Fact] = field(default_factory=list)
    assumed: list[Assumption] = field(default_factory=list)

    def fact(self, name: str, value: Any, source: str) -> Any:
        self.facts.append(Fact(name, value, source))
        return value

    def assume(self, name: str, value: Any, why: str, option: str) -> Any:
        self.facts.append(Fact(name, value, why, assumed=True))
        self.assumed.append(Assumption(name, value if isinstance(value, str) else repr(value), why, option))
        return value

    def origin(self) -> str:
        """openpi or lerobot is proved by the side files; lerobot's version only by a field that came with 0.5.1."""
        wanted = self.options.origin
        if wanted is not None and wanted not in ORIGINS:
            raise UsageError("policy.origin", f"unknown origin {wanted}", [("choices", ", ".join(ORIGINS))])
        lerobot = (self.folder / PRE).is_file() or "type" in self.config
        proof = PRE if (self.folder / PRE).is_file() else "config.json: type" if lerobot else f"no {PRE}"
        if wanted is not None:
            if wanted.startswith("lerobot") != lerobot:
                found = "lerobot" if lerobot else "openpi"
                what = f"--origin {wanted}, but the files are {found}'s"
                raise UsageError("policy.origin", what, [("because", proof)])
            return str(self.fact("origin", wanted, "option"))
        if not lerobot:
            return str(self.fact("origin", "openpi", proof))
        if "use_relative_actions" in self.config:
            return str(self.fact("origin", "lerobot-0.6", "config.json: use_relative_actions"))
        why = "config.json has no field newer than lerobot 0.5.0; borders of pictures and the prompt differ since 0.5"
        return str(self.assume("origin", "lerobot-0.4", why, "--origin lerobot-0.4 or lerobot-0.6"))

    def cameras(self, slots: Sequence[tuple[str, str]], source: str, assumed: bool) -> tuple[Camera, ...]:
        """(role, key) in model order, of those in `slots` that the options keep."""
        given, views, keys = self.options.camera, self.options.views, [key for _, key in slots]
        if given and not slots:
            slots, keys = given, [key for _, key in given]  # no file gives the order: the option does
        chosen, source = list(slots), source if slots and not given else "option"
        if unknown := [key for _, key in given if key not in keys]:
            rows = [("given", ", ".join(f"{role}={key}" for role, key in given)), ("known", ", ".join(keys))]
            rows += [("nearest", near)] if (near := nearest(unknown[0], keys)) else []
            raise UsageError("policy.cameras", f"the checkpoint has no camera {', '.join(unknown)}", rows)
        roles = {key: role for role, key in given}
        if len(roles) != len(given) or len(set(roles.values())) != len(given):
            raise UsageError("policy.cameras", "--camera names a role or a key twice")
        if given:
            chosen = [(roles[key], key) for key in keys if key in roles]
        if views is not None and (views != len(given) if given else not 1 <= views <= len(slots)):
            have = f"{len(given)} cameras are given" if given else f"the checkpoint has {len(slots)}"
            raise UsageError("policy.cameras", f"--views {views}, but {have}", [("known", ", ".join(keys))])
        if views is not None and not given:
            chosen, source = chosen[:views], "option"
        roles_shown = [role for role, _ in chosen]
        if assumed and source != "option":
            self.assume("cameras", ", ".join(roles_shown), source, "--views N, or --camera ROLE=KEY for each")
        else:
            self.fact("cameras", roles_shown, source)
        return tuple(Camera(role, key, self.options.layout, self.options.pixel) for role, key in chosen)

    def mask(self, proved: tuple[bool, ...] | None, source: str, state_dim: int, action_dim: int) -> tuple[bool, ...]:
        """Which actions are relative to the state. proved: by files; None where no file says."""
        option = self.options.actions
        if option is not None:
            mask = action_mask(option, min(action_dim, state_dim))
            self.fact("actions", option, "option")
        elif proved is None:
            mask = ()
            self.assume("actions", "absolute", source, "--actions absolute, or delta[:MASK]")
        else:
            mask = proved
            self.fact("actions", "delta" if any(mask) else "absolute", source)
        if len(mask) > min(action_dim, state_dim):
            what = f"{len(mask)} actions are relative to a state of {state_dim} numbers, of {action_dim} actions in all"
            raise UsageError("policy.actions", what, hint="--actions delta:MASK names the relative dimensions")
        return mask

    def tokenizer(self) -> bytes:
        """The bytes of a tokenizer.json: the option's, or one in the checkpoint."""
        places = [self.options.tokenizer] if self.options.tokenizer else [self.folder / name for name in TOKENIZERS]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            hint = "pass one with --tokenizer FILE (PaliGemma's tokenizer.json); it goes into the Plan"
            rows = [("looked for", str(place)) for place in places]
            raise UsageError("tokenizer.missing", "the checkpoint has no tokenizer", rows, hint)
        self.fact("tokenizer", path.name, "option" if self.options.tokenizer else "the checkpoint's")
        return path.read_bytes()

    def openpi(self) -> PolicyFiles:
        options, family = self.options, self.family
        why = f"the slots that {family.name} publishes; no file says which cameras the robot has"
        cameras = self.cameras(family.cameras, why, assumed=True)
        asset = openpi_asset(self.folder, options.asset)
        stats = openpi_statistics(self.folder, asset)
        self.fact("asset", asset, "option" if options.asset else f"assets/{asset}: the only one")
        state, action = self._cut(stats["state"], options.state_dim), self._cut(stats["actions"], options.action_dim)
        rule, keep = family.openpi_norm, options.constant_statistics
        norms = [s.norm(rule, OPENPI_RULES[rule], OPENPI_EPS, keep) for s in (state, action)]
        why = "no file says; actions as trained, no delta transform"
        mask = self.mask(None, why, state.dim, action.dim)
        shown = options.state_in_prompt
        if shown is None:
            why = f"no file says; the published default of {family.name}"
            shown = self.assume("state_in_prompt", family.state_in_prompt, why, "--state-in-prompt yes or no")
        else:
            self.fact("state_in_prompt", shown, "option")
        prompt = Prompt("spaces", family.with_state if shown else family.plain, state.dim if shown else 0)
        return self._files("openpi", cameras, State(state.dim, norms[0]), norms[1], action.dim, mask, prompt)

    def _cut(self, stats: Statistics, dim: int | None) -> Statistics:
        """Statistics of the real dimensions. openpi pads some files to the model's width with zeros."""
        name = f"{stats.feature.rstrip('s')}_dim"
        if dim is not None:
            if not 1 <= dim <= stats.dim:
                rows = [("file", stats.where)]
                raise UsageError("policy.dims", f"{name} {dim}, but the statistics have {stats.dim} dimensions", rows)
            self.fact(name, dim, "option")
        elif 0 < stats.real < stats.dim:
            why = f"the last {stats.dim - stats.real} of {stats.dim} statistics are all zero: taken for padding"
            dim = self.assume(name, stats.real, why, f"--{name.replace('_', '-')} N")
        else:
            dim = self.fact(name, stats.dim, stats.where)
        return stats.cut(dim or stats.dim)

    def lerobot(self, origin: str) -> PolicyFiles:
        options, family, config = self.options, self.family, self.config
        pre, post = read_pipeline(self.folder, PRE, (family.lerobot_state_step,)), read_pipeline(self.folder, POST)
        cameras = self._lerobot_cameras(pre)
        dims = {
            "state": feature_dim(config, "input_features", "observation.state"),
            "action": feature_dim(config, "output_features", "action"),
        }
        for name, dim in dims.items():
            self.fact(f"{name}_dim", dim, f"config.json: {'in' if name == 'state' else 'out'}put_features")
            if getattr(options, f"{name}_dim") not in (None, dim):
                given = getattr(options, f"{name}_dim")
                raise UsageError("policy.dims", f"{name}_dim {given}, but config.json says {dim}")
        keep = options.constant_statistics
        state = pre.norm("normalizer_processor", "observation.state", dims["state"], keep)
        action = post.norm("unnormalizer_processor", "action", dims["action"], keep)
        mask = self.mask(relative_mask(pre, post, dims["action"]), f"{PRE}, {POST}", dims["state"], dims["action"])
        prompt = self._lerobot_prompt(pre, origin, dims["state"])
        return self._files(origin, cameras, State(dims["state"], state), action, dims["action"], mask, prompt)

    def _lerobot_prompt(self, pre: Pipeline, origin: str, state_dim: int) -> Prompt:
        """As the pipeline writes it: cleaned, with the state; or as given, perhaps with a newline at the end."""
        family, option = self.family, self.options.state_in_prompt
        shown = family.lerobot_state_step in pre.steps if option is None else option
        self.fact("state_in_prompt", shown, "option" if option is not None else f"{PRE}: {family.lerobot_state_step}")
        if shown:  # 0.4 pads the state before it writes it into the prompt
            numbers = self._count("max_state_dim", 32) if origin == "lerobot-0.4" else state_dim
            return Prompt("spaces", family.with_state, numbers)
        if option is not None:
            return Prompt("spaces", family.plain)
        return Prompt("newline" if any(step in pre.steps for step in NEWLINE_STEPS) else "none", "{prompt}")

    def _files(
        self,
        origin: str,
        cameras: tuple[Camera, ...],
        state: State,
        action: Norm,
        action_dim: int,
        mask: tuple[bool, ...],
        prompt: Prompt,
    ) -> PolicyFiles:
        return PolicyFiles(
            family=self.family,
            origin=origin,
            cameras=cameras,
            state=state,
            action=action,
            action_dim=action_dim,
            mask=mask,
            prompt=prompt,
            resolution=self._resolution() if origin != "openpi" else None,
            tokenizer=self.tokenizer(),
            facts=tuple(self.facts),
            assumed=tuple(self.assumed),
        )

    def _lerobot_cameras(self, pre: Pipeline) -> tuple[Camera, ...]:
        """In the order of input_features; a role is the last part of the key that the robot uses."""
        renamed = pre.steps.get("rename_observations_processor", {}).get("rename_map") or {}
        robot = {new: old for old, new in renamed.items()} if isinstance(renamed, dict) else {}
        keys = camera_keys(self.config)
        last = {key: str(robot.get(key, key)).rpartition(".")[2] for key in keys}
        slots = [(last[key] if list(last.values()).count(last[key]) == 1 else key, key) for key in keys]
        if not slots and not self.options.camera:
            choices = ", ".join(key for _, key in self.family.cameras)
            raise UsageError(
                "policy.cameras",
                "no file says which cameras the policy sees, nor their order",
                [("looked in", "config.json: input_features"), ("published", choices)],
                "pass --camera ROLE=KEY for each, in the order of training",
            )
        return self.cameras(slots, "config.json: input_features", assumed=False)

    def _resolution(self) -> int | None:
        size = self.config.get("image_resolution")
        if size is None:
            return None
        if not isinstance(size, list) or len(size) != 2 or size[0] != size[1] or type(size[0]) is not int:
            raise FrtcError("policy.features", f"config.json: image_resolution {size!r} is not a square")
        return size[0]

    def _count(self, name: str, default: int) -> int:
        value = self.config.get(name, default)
        if type(value) is not int or value < 1:
            raise FrtcError("policy.features", f"config.json: {name} is {value!r}, not a positive number")
        return value


def read_policy_files(folder: Path, family: PolicyFamily, options: PolicyOptions) -> PolicyFiles:
    """Reads the side files in `folder`, the checkpoint's."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    reader = _Reader(folder, family, options, config)
    origin = reader.origin()
    files = reader.openpi() if origin == "openpi" else reader.lerobot(origin)
    if options.strict and files.assumed:
        rows = [(a.field, f"{a.value} ({a.why}); confirm with {a.option}") for a in files.assumed]
        raise UsageError("policy.assumed", f"--strict, and {len(rows)} values are assumed", rows)
    return files
