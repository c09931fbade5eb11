"""lerobot's side files: config.json and the saved pre- and post-processor pipelines, as far as they decide actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frtc.errors import FrtcError
from frtc.models.checkpoint import read_json
from frtc.runtime.policy import Norm, is_name
from frtc.statistics import LEROBOT_MODES, lerobot_statistics

PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
NEWLINE_STEPS = ("pi0_new_line_processor", "smolvla_new_line_processor")
HARMLESS = ("rename_observations_processor", "to_batch_processor", "device_processor")
KNOWN = {
    PRE: (*HARMLESS, *NEWLINE_STEPS, "relative_actions_processor", "normalizer_processor", "tokenizer_processor"),
    POST: (*HARMLESS, "unnormalizer_processor", "absolute_actions_processor"),
}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Steps of one file by registry name: their `config`, with `state_file` among it."""

    folder: Path
    file: str
    steps: Mapping[str, Mapping[str, Any]]

    def norm(self, step: str, feature: str, dim: int, keep_constant: bool) -> Norm:
        """How `step` treats `feature`. lerobot leaves a feature without statistics as it is; here that is an error."""
        config = self.steps.get(step)
        if config is None:
            raise FrtcError(
                "statistics.missing",
                f"{self.file} has no {step}",
                [("looked in", str(self.folder / self.file)), ("found", ", ".join(self.steps))],
            )
        kind = "ACTION" if feature == "action" else "STATE"
        mode = _table(config, "norm_map", self.file).get(kind, "IDENTITY")
        if mode not in LEROBOT_MODES:
            raise FrtcError(
                "policy.unsupported",
                f"{self.file}: {kind} is normalised by {mode}",
                [("known", ", ".join(LEROBOT_MODES))],
            )
        rule, names = LEROBOT_MODES[mode]
        if rule == "identity":
            return Norm("identity")
        state_file, eps = config.get("state_file"), config.get("eps", 1e-8)
        if not isinstance(state_file, str) or Path(state_file).name != state_file:
            raise FrtcError(
                "statistics.missing",
                f"{self.file}: {step} names no statistics file in this folder",
                [("found", f"state_file {state_file!r}")],
            )
        if not (self.folder / state_file).is_file():
            raise FrtcError(
                "statistics.missing",
                f"the statistics file of {step} is not in the checkpoint",
                [("looked for", str(self.folder / state_file)), ("named by", self.file)],
            )
        if type(eps) not in (int, float) or not 0 <= eps < 1:
            raise FrtcError("policy.unsupported", f"{self.file}: eps of {step} is {eps!r}")
        stats = lerobot_statistics(self.folder / state_file, feature, dim)
        return stats.norm(rule, names, float(eps), keep_constant)


def read_pipeline(folder: Path, file: str, also: tuple[str, ...] = ()) -> Pipeline:
    """A saved pipeline in which every step is one whose meaning we know."""
    path, known = folder / file, (*KNOWN[file], *also)
    if not path.is_file():
        hint = "checkpoints from before lerobot 0.4 are converted by its migrate_policy_normalization script"
        raise FrtcError("statistics.missing", f"the checkpoint has no {file}", [("looked for", str(path))], hint)
    found = read_json(path).get("steps")
    if not isinstance(found, list) or not all(isinstance(step, dict) for step in found):
        raise FrtcError("policy.pipeline", f"{file} has no list of steps", [("file", str(path))])
    steps: dict[str, Mapping[str, Any]] = {}
    for step in found:
        name = step.get("registry_name")
        if name not in known:
            rows = [("file", str(path)), ("known", ", ".join(known))]
            raise FrtcError(
                "policy.pipeline", f"{file} has a step of unknown meaning: {name or step.get('class')}", rows
            )
        if name in steps and name not in HARMLESS:
            raise FrtcError("policy.pipeline", f"{file} has the step {name} twice", [("file", str(path))])
        steps[name] = {**_table(step, "config", file), "state_file": step.get("state_file")}
    if _table(steps.get("normalizer_processor", {}), "norm_map", file).get("VISUAL", "IDENTITY") != "IDENTITY":
        raise FrtcError("policy.unsupported", f"{file} normalises camera pictures", [("file", str(path))])
    tokens = steps.get("tokenizer_processor", {})
    if tokens.get("padding_side", "right") != "right":
        raise FrtcError("policy.unsupported", f"{file} pads the prompt on the left", [("file", str(path))])
    return Pipeline(folder, file, steps)


def refuse_transforms(config: Mapping[str, Any]) -> None:
    """lerobot's own change of units works on numbers that are already normalised: nothing here means that."""
    for field in ("adapt_to_pi_aloha", "use_delta_joint_actions_aloha"):
        if config.get(field):
            raise FrtcError(
                "policy.unsupported",
                f"config.json: {field} is {config[field]!r}",
                [("lerobot", "changes the units of state and actions inside the model, between its two pipelines")],
                "train in the robot's units, or with relative actions in the pipelines",
            )


def feature_dim(config: Mapping[str, Any], group: str, name: str) -> int:
    """Length of a vector feature in config.json."""
    entry = _table(config, group, "config.json").get(name)
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 1:
        raise FrtcError(
            "policy.features",
            f"config.json does not say how long {name} is",
            [("looked in", f"config.json: {group}.{name}.shape"), ("found", repr(entry))],
        )
    return shape[0]


def camera_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Pictures among input_features in the order that the model sees; `empty_camera_…` are masked ones: left out."""
    features = _table(config, "input_features", "config.json")
    visual = [name for name, entry in features.items() if isinstance(entry, dict) and entry.get("type") == "VISUAL"]
    return tuple(name for name in visual if not name.rpartition(".")[2].startswith("empty_camera_"))


def relative_mask(pre: Pipeline, post: Pipeline, dim: int) -> tuple[bool, ...]:
    """Which of the `dim` actions are relative to the state; () if none. A name that holds an excluded word is not."""
    before, after = pre.steps.get("relative_actions_processor", {}), post.steps.get("absolute_actions_processor", {})
    if bool(before.get("enabled")) != bool(after.get("enabled")):
        raise FrtcError(
            "policy.pipeline",
            "only one of the pipelines makes actions relative",
            [(PRE, f"enabled {before.get('enabled')}"), (POST, f"enabled {after.get('enabled')}")],
        )
    if not before.get("enabled"):
        return ()
    words, names = (_lower(before.get(field)) for field in ("exclude_joints", "action_names"))
    mask = [not any(word in name for word in words) for name in names[:dim]]
    return (*mask, *[True] * (dim - len(mask)))  # dimensions without a name are relative: lerobot's rule


def action_names(pre: Pipeline, dim: int) -> tuple[str, ...]:
    """What the pipeline calls the `dim` actions; () where it names others, or in no way that can be printed."""
    names = pre.steps.get("relative_actions_processor", {}).get("action_names")
    if not isinstance(names, list) or len(names) != dim:
        return ()
    return tuple(names) if all(isinstance(name, str) and is_name(name) for name in names) else ()


def _lower(names: object) -> list[str]:
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise FrtcError(
            "policy.pipeline", f"{PRE}: names of relative actions are no list", [("found", repr(names)[:80])]
        )
    return [name.lower() for name in names or () if name]


def _table(owner: Mapping[str, Any], field: str, file: str) -> Mapping[str, Any]:
    value = owner.get(field) or {}
    if not isinstance(value, dict):
        raise FrtcError("policy.pipeline", f"{file}: {field} is not an object", [("found", repr(value)[:80])])
    return value
