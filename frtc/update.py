"""New weights, statistics and tokenizer in a Plan, from another checkpoint of the same model: no tracing, no kernels.

The Plan's recipe is evaluated on the checkpoint's parameters, and its policy is read anew from the checkpoint's files
with the options that the Plan was compiled with. The result is, byte for byte, what `frtc compile --no-self-test`
makes of the checkpoint. Evidence about the old weights is dropped; `self_test` makes new
vectors, which a Plan of `--family native` needs before it acts. A Plan with static activation scales takes those of the
new checkpoint: the old ones would clip its values, and nothing would say so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import frtc
from frtc.codegen.recipe import recipe_of
from frtc.codegen.write import write_plan
from frtc.compiler import (
    CompileOptions,
    Opened,
    Progress,
    bytes_written,
    config_json,
    evidence_of,
    open_model,
    require_folder,
    require_mapped,
    require_room,
    self_test,
    silent,
    sizes_in,
)
from frtc.console import size
from frtc.errors import FrtcError, UsageError
from frtc.lowering.ir import Graph, Node, fresh_nodes, rebuild, walk
from frtc.lowering.ops import const
from frtc.passes.quantize import SCALE
from frtc.passes.sites import UNNORMED
from frtc.policy import TOKENIZER
from frtc.precision import RecordedScales, parameters
from frtc.recorded import (
    kept_results,
    kept_tokenizer,
    recorded_config,
    recorded_options,
    recorded_scales,
    results_in,
    tokenizer_was_chosen,
)
from frtc.report import facts_text, flat
from frtc.results import RESULTS
from frtc.runtime.plan import Program
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.policy import Assumption, Policy, Tokens
from frtc.scales import Scales, is_scale
from frtc.scales_key import Key, options_digest, weight_files, weights_digest
from frtc.verify_weights import differing


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the user may say of the new checkpoint; the rest is as the Plan was compiled.

    tokenizer   None: the Plan's where one was chosen when it was compiled, else the checkpoint's, else the Plan's
    asset       which of several statistics; None: as the Plan was compiled
    self_test   make the vectors of a self-test, by the emulator
    scales      of the new checkpoint's activations, for a Plan with static ones
    scales_only the checkpoint is the Plan's own: weights that no activation scale is part of may not change
    """

    adapter: Path | None = None
    tokenizer: Path | None = None
    asset: str | None = None
    self_test: bool = False
    scales: Scales | None = None
    scales_only: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """facts: (name, value, source)

    changed   False where the program is the one that the Plan held before
    tested    it holds the vectors of a self-test
    """

    path: Path
    plan_id: str
    model: str
    target: str
    changed: bool
    tested: bool
    facts: tuple[tuple[str, Any, str], ...]
    assumed: tuple[Assumption, ...]
    file_nbytes: int
    weights: int
    weights_nbytes: int
    seconds: float

    @staticmethod
    def of(
        path: Path, plan_id: str, old: Plan, opened: Opened, policy: Policy, tested: bool, seconds: float
    ) -> Updated:
        return Updated(
            path=path,
            plan_id=plan_id,
            model=opened.model.title,
            target=old.program.target.name,
            changed=plan_id != old.plan_id,
            tested=tested,
            facts=tuple((f.name, f.value, f.source) for f in opened.facts),
            assumed=policy.assumed,
            file_nbytes=path.stat().st_size,
            weights=len(old.program.weights),
            weights_nbytes=old.program.weights_nbytes,
            seconds=seconds,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        made = f"{self.weights} weights, {size(self.weights_nbytes)}, in {self.seconds:.1f} s; no kernel was compiled"
        lines = [
            f"{self.path}: {self.model} for {self.target}, {size(self.file_nbytes)}",
            f"  plan {self.plan_id}{'' if self.changed else ', as before: the checkpoint holds the same values'}",
            facts_text(self.facts, self.assumed),
            made,
        ]
        return "\n".join(lines + ["it holds no self-test; --self-test makes one"] * (not self.tested))


@fresh_nodes()
def update(
    plan: str | Path,
    checkpoint: str | Path,
    out: str | Path,
    chosen: Chosen | None = None,
    progress: Progress = silent,
) -> Updated:
    """Write to `out` what compiling `checkpoint` for the Plan's GPU with its options would make. `out` may be `plan`:
    the file changes when the new one is complete, or not at all."""
    started, out = time.perf_counter(), Path(out)
    old = open_plan(plan, verify=False)  # its weights are not read
    require_folder(out)  # after it: in place, a file that is no Plan is the input's fault
    chosen = chosen or Chosen()
    options = replace(recorded_options(old), self_test=chosen.self_test)
    places = results_in(old) if chosen.self_test else kept_results(old)
    expressions = recipe_of(old)
    _require_scales(old, expressions, chosen.scales)
    opened = open_for(old, Path(checkpoint), options, chosen)
    _require_same_model(old, opened)
    require_mapped(_without_scales(expressions), opened)
    policy = _policy(old.program, opened)
    _require_own(chosen.scales, opened, policy)
    require_room(policy, opened.files.tokenizer)
    program = replace(old.program, policy=policy.to_json())

    def evidence(written: Path) -> dict[str, Any]:
        if chosen.scales_only:
            _require_same_weights(old, open_plan(written, verify=False), expressions, opened, progress)
        test = {"self_test": self_test(written, places, progress)} if options.self_test else {RESULTS: places}
        kept = {"tuning": old.evidence["tuning"]} if "tuning" in old.evidence else {}  # of launches, which stay
        return evidence_of(opened, options) | _calibration(old, chosen.scales) | _versions(old) | kept | test

    blobs = {name: bytes(data) for name, data in old.files().items()} | {TOKENIZER: opened.files.tokenizer}
    watch = bytes_written(program, progress)
    leaves = parameters(opened.read, chosen.scales)
    plan_id = write_plan(out, program, expressions, leaves, blobs, evidence, watch)
    return Updated.of(out, plan_id, old, opened, policy, options.self_test, time.perf_counter() - started)


def open_for(plan: Plan, checkpoint: Path, options: CompileOptions, chosen: Chosen) -> Opened:
    """The checkpoint, with the Plan's tokenizer where it has none or the Plan's was chosen."""
    asset = chosen.asset or options.policy.asset
    options = replace(options, adapter=chosen.adapter, policy=replace(options.policy, asset=asset))
    if chosen.tokenizer or not tokenizer_was_chosen(plan):
        try:
            return _open_with(checkpoint, options, chosen.tokenizer)
        except UsageError as fault:
            if fault.code != "tokenizer.missing" or chosen.tokenizer:
                raise
    with kept_tokenizer(plan) as tokenizer:
        return _open_with(checkpoint, options, tokenizer)


def _open_with(checkpoint: Path, options: CompileOptions, tokenizer: Path | None) -> Opened:
    return open_model(checkpoint, replace(options, policy=replace(options.policy, tokenizer=tokenizer)))


def _require_same_model(plan: Plan, opened: Opened) -> None:
    """Kind and configuration decide the program; only values may differ."""
    if opened.model.name != plan.program.model:
        what = f"the Plan is a {plan.program.model}, the checkpoint a {opened.model.name}"
        raise UsageError("update.model", what, [("checkpoint", str(opened.checkpoint))])
    ours, theirs = (dict(flat(c)) for c in (recorded_config(plan), config_json(opened.config)))
    differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if differ:
        rows = [(name, f"Plan {ours.get(name)}, checkpoint {theirs.get(name)}") for name in differ]
        what = f"the checkpoint's model has another configuration: {', '.join(differ[:3])}"
        raise UsageError("update.config", what, rows, "another program is needed: compile the checkpoint")


def has_scales(expressions: Mapping[str, Node]) -> bool:
    """Static activation scales are part of some weight."""
    return any(map(is_scale, walk(expressions.values())))


def _require_scales(old: Plan, expressions: Mapping[str, Node], scales: Scales | None) -> None:
    """Scales where the Plan's weights are made of some, and only there."""
    static = has_scales(expressions)
    if static and scales is None:
        rows = [("plan", f"{old.path}: FP8 with static activation scales")]
        hint = (
            "`frtc calibrate CHECKPOINT --data DATA -o F.scales`, then `frtc update PLAN CHECKPOINT --scales F.scales`"
        )
        raise UsageError("update.scales", "the new checkpoint needs activation scales of its own", rows, hint)
    if not static and scales is not None:
        raise no_scales(old)
    if scales is None:
        return
    scales.require_leaves(expressions.values())
    used = {node["key"][len(SCALE) :] for node in walk(expressions.values()) if is_scale(node)}
    used |= {site.removesuffix(UNNORMED) for site in used}  # a site that fell has 16 bits with its norm or without
    fallen = {site: why for site, why in scales.fallen().items() if site in used}
    if fallen:
        what = f"{len(fallen)} sites that the Plan runs in FP8 cannot be held in it"
        raise FrtcError(
            "scales.fallen",
            what,
            list(fallen.items())[:5],
            "compile again: they fall back to 16 bits, or keep their norm",
        )


def no_scales(plan: Plan) -> UsageError:
    """What to say of a Plan whose program takes no activation scales."""
    dynamic = plan.evidence.get("calibration", {}).get("scales") == "per row"
    what = "each row finds its scale as it runs" if dynamic else "nothing in it is stored with an activation scale"
    hint = "compile the checkpoint with `--precision fp8 --scales F.scales`"
    return UsageError(
        "calibrate.plan", f"the Plan has no static scales to replace: {what}", [("plan", str(plan.path))], hint
    )


def _without_scales(expressions: Mapping[str, Node]) -> Graph:
    """The weights' graph over the model's parameters alone."""
    whole = Graph("weights", (), tuple(expressions.items()))
    return rebuild(whole, lambda old, new: const(1.0, "f32", old.shape) if is_scale(old) else new)


def _require_own(scales: Scales | None, opened: Opened, policy: Policy) -> None:
    """The scales are of this checkpoint's bytes and policy. Sites and rounds were compared with the recipe."""
    if scales is not None:
        key = Key(weights_digest(weight_files(opened)), "", options_digest(policy, opened.files.tokenizer))
        scales.require_key(key, ("weights", "options"))


def _require_same_weights(
    old: Plan, new: Plan, expressions: Mapping[str, Node], opened: Opened, progress: Progress
) -> None:
    """Weights without scales are as they were; of the old scales the checkpoint makes what the Plan holds."""
    pairs = zip(old.program.weights, old.sha256, new.sha256, strict=False)
    changed = [weight.name for weight, before, after in pairs if before != after]
    scaled = {name for name in changed if has_scales({"": expressions[name]})}
    recorded = recorded_scales(old)
    if recorded is not None:
        scaled -= set(differing(old, parameters(opened.read, recorded), progress, scaled))
    if others := [name for name in changed if name not in scaled]:
        rows = [("plan", str(old.path)), ("checkpoint", str(opened.checkpoint)), ("first", others[0])]
        hint = "`frtc update PLAN CHECKPOINT --scales F.scales` puts another checkpoint into a Plan"
        raise UsageError("calibrate.checkpoint", "the Plan was made of another checkpoint", rows, hint)


def _calibration(old: Plan, scales: Scales | None) -> dict[str, Any]:
    """As a compilation records it: for the Plan's sites, in its order."""
    recorded = RecordedScales.of_evidence(old.evidence)
    if scales is None or recorded is None:
        found = old.evidence.get("calibration")
        return {"calibration": found} if found is not None and scales is None else {}
    fallen, now = recorded.fallen(), scales.fallen()
    found = {"scales": "static", "sites": {site: scales.of(site).tolist() for site in recorded.sites}}
    found["fallen"] = {site: now.get(site, why) for site, why in fallen.items()}
    return {"calibration": found | scales.about()}


def _versions(old: Plan) -> dict[str, str]:
    """The frtc that made the program, and this one where it is another."""
    made_by = str(old.evidence.get("frtc", frtc.__version__))
    return {"frtc": made_by} | ({"updated_by": frtc.__version__} if made_by != frtc.__version__ else {})


def _policy(program: Program, opened: Opened) -> Policy:
    """As the checkpoint's files say; the sizes are the program's."""
    tokens = Policy.from_json(program.policy).find(Tokens)
    shapes = {slot.name: slot.shape for slot in program.inputs}
    return opened.policy(sizes_in(shapes, tokens.vocab if tokens else 0))
