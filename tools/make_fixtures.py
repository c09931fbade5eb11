"""Write tests/fixtures: what lerobot 0.6.1 itself computes from raw observations with small policies of its own making.

    .venv-oracle/bin/python tools/make_fixtures.py -o tests/fixtures \\
        --gemma-tokenizer .cache/gemma-tokenizer/tokenizer.json

Runs only in the environment of tools/oracle-requirements.txt. Same versions and seed give the same checkpoint bytes,
and on one machine the same bytes of all results. What each tensor means: tests/fixtures/README.md.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before lerobot is imported: nothing may come from a hub

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import oracle_pi
import oracle_policy as policy_of
import oracle_prompts
import oracle_smolvla
import torch
from lerobot.policies.utils import prepare_observation_for_inference
from lerobot.processor import PolicyProcessorPipeline
from oracle_policy import Arrays, Case, Family
from safetensors.numpy import save_file

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x_t, time, velocity
FAMILIES = (oracle_pi.PI05, oracle_pi.PI0, oracle_smolvla.SMOLVLA)
DISTRIBUTIONS = ("lerobot", "torch", "transformers", "tokenizers", "safetensors", "numpy")


class Recorder:
    """Keeps what passes through the policy's own methods while it samples actions."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy = policy
        self.steps: list[Step] = []
        policy.model.embed_prefix, policy.model.denoise_step = self.on_prefix, self.on_step

    def on_prefix(
        self, images: list[torch.Tensor], *rest: torch.Tensor, **named: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = self.policy.model
        self.pixels, self.prefix = images, type(model).embed_prefix(model, images, *rest, **named)
        return self.prefix

    def on_step(self, **arguments: torch.Tensor) -> torch.Tensor:
        self.arguments = arguments
        velocity = self.step(**arguments)
        self.steps.append((arguments["x_t"], arguments["timestep"], velocity))
        return velocity

    def step(self, **arguments: torch.Tensor) -> torch.Tensor:
        model = self.policy.model
        return type(model).denoise_step(model, **arguments)

    def sample(self, batch: dict[str, object], noise: np.ndarray) -> torch.Tensor:
        """Actions [1, horizon, action dim] in normalised units, by the policy's own entry point."""
        self.steps = []
        return self.policy.predict_action_chunk(batch, noise=torch.from_numpy(noise)[None])

    def replay(self, steps: Sequence[Step], batch: dict[str, object]) -> np.ndarray:
        """Velocities [steps, horizon, dim] at the x_t of a reference, so that errors do not add up over steps."""
        self.sample(batch, steps[0][0][0].numpy())
        with torch.no_grad():
            again = [self.step(**(self.arguments | {"x_t": x, "timestep": time})) for x, time, _ in steps]
        return torch.cat(again).float().numpy()

    def results(self) -> Arrays:
        x, time, velocity = (torch.cat(column).float().numpy() for column in zip(*self.steps, strict=True))
        return {"x": x, "time": time, "velocity": velocity}

    def stages(self) -> Arrays:
        """Pixels of the vision tower; embedded prefix and the layers' rotated keys and values, padding cut off."""
        embedded, valid, _ = self.prefix
        layers = self.arguments["past_key_values"].layers
        keys, values = (torch.stack([getattr(layer, name)[0] for layer in layers]) for name in ("keys", "values"))
        found = {"prefix": embedded[0, valid[0]], "keys": keys[:, :, valid[0]], "values": values[:, :, valid[0]]}
        found = {name: tensor.squeeze(1) for name, tensor in found.items()}  # the axis of KV heads where there is one
        found["pixels"] = torch.cat(self.pixels)[:, :, ::8]
        return {name: tensor.float().numpy() for name, tensor in found.items()}


def prepare(pipeline: PolicyProcessorPipeline, case: Case, raw: Arrays) -> dict[str, object]:
    observation = {name: array.copy() for name, array in raw.items() if name != "noise"}
    return pipeline(prepare_observation_for_inference(observation, torch.device("cpu"), task=case.task))


def run_case(family: Family, case: Case, folder: Path, serving: Recorder) -> tuple[Arrays, Arrays, dict[str, object]]:
    """Raw arrays, expected arrays, facts for the JSON."""
    recorder, raw = Recorder(policy_of.load_policy(family, folder)), policy_of.observe(family, case)
    before, after = policy_of.load_pipelines(family, folder)
    batch = prepare(before, case, raw)
    normalised = recorder.sample(batch, raw["noise"])
    expected = recorder.results() | {
        "actions_normalised": normalised[0].numpy(),
        "actions": after(normalised)[0].numpy(),
    }
    if "relative" in family.sides:
        relative_before, relative_after = policy_of.load_pipelines(family, folder.parent / "relative")
        prepare(relative_before, case, raw)  # keeps the state that the actions are relative to
        expected["actions_relative"] = relative_after(normalised)[0].numpy()
    mask = batch["observation.language.attention_mask"][0]
    expected["tokens"] = batch["observation.language.tokens"][0, mask].to(torch.int32).numpy()
    expected["velocity_bf16"] = serving.replay(recorder.steps, batch)
    if case.name == "pick":
        expected |= recorder.stages()
    errors = relative_error(expected["velocity_bf16"], expected["velocity"])
    facts = {"task": case.task, "prompt": batch["task"][0], "cameras": list(case.cameras), "bf16_error": errors}
    return raw, expected, facts


def relative_error(found: np.ndarray, wanted: np.ndarray) -> list[float]:
    """||v - v*|| / ||v*|| of every step."""
    axes = tuple(range(1, wanted.ndim))
    ratio = np.sqrt(((found - wanted) ** 2).sum(axes) / (wanted**2).sum(axes))
    return [float(f"{value:.3e}") for value in ratio]


def run_empty_camera(family: Family, folder: Path) -> Arrays:
    """The first case once more by a configuration with one camera that never sends anything."""
    case = family.cases[0]
    recorder = Recorder(policy_of.load_policy(family, folder, **family.sides["empty_camera"]))
    raw = policy_of.observe(family, case)
    recorder.sample(prepare(policy_of.load_pipelines(family, folder)[0], case, raw), raw["noise"])
    return {"velocity": recorder.results()["velocity"]}


def contiguous(arrays: Arrays) -> Arrays:
    """safetensors.numpy writes strided views in the wrong order without an error."""
    return {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}


def make(family: Family, out: Path) -> None:
    """Checkpoint, side configurations, observations, results."""
    checkpoint = out / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    family.tokenizer(checkpoint / "tokenizer.json")
    observations, expected, facts = {}, {}, {}
    with family.small(checkpoint / "tokenizer.json"):
        policy_of.save_policy(family, checkpoint)
        for side, changes in family.sides.items():
            policy_of.save_side(family, out / side, **changes)
        serving = Recorder(policy_of.load_serving(family, checkpoint))
        for case in family.cases:
            raw, results, facts[case.name] = run_case(family, case, checkpoint, serving)
            observations |= {f"{case.name}.{name}": array for name, array in raw.items()}
            expected |= {f"{case.name}.{name}": array for name, array in results.items()}
        expected |= {f"empty_camera.{name}": array for name, array in run_empty_camera(family, checkpoint).items()}
    save_file(contiguous(observations), out / "observations.safetensors")
    save_file(contiguous(expected), out / "expected.safetensors")
    report = {"seed": policy_of.SEED, "versions": {name: version(name) for name in DISTRIBUTIONS}, "cases": facts}
    write_json(out / "fixture.json", report, rows="cases")


def write_json(path: Path, value: dict[str, object], rows: str) -> None:
    """One line for each entry of `rows`, the one list or dict that grows; the rest on one line each."""
    lines = [
        f" {json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in value.items() if key != rows
    ]
    several = value[rows]
    entries = several.items() if isinstance(several, dict) else ((None, row) for row in several)
    texts = [(f"{json.dumps(key)}: " if key else "") + json.dumps(row, ensure_ascii=False) for key, row in entries]
    opening, closing = "{}" if isinstance(several, dict) else "[]"
    lines.append(f" {json.dumps(rows)}: {opening}\n  " + ",\n  ".join(texts) + f"\n {closing}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder that receives the fixtures")
    parser.add_argument("--only", choices=[family.name for family in FAMILIES], help="one policy instead of all")
    parser.add_argument(
        "--gemma-tokenizer", type=Path, help="the whole Gemma tokenizer.json; writes gemma_prompts.json too"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    for family in FAMILIES:
        if options.only in (None, family.name):
            make(family, options.out / f"{family.name}_lerobot")
    if options.gemma_tokenizer:
        write_json(options.out / "gemma_prompts.json", oracle_prompts.encode(options.gemma_tokenizer), rows="prompts")


if __name__ == "__main__":
    main()
