"""New activation scales in a Plan of the same checkpoint: no kernel is compiled, what was proved of the old is dropped.

All weights are made again, as an update makes them: whoever names another checkpoint than the Plan's is told so,
instead of getting weights of one with the scales of another.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from frtc.calibrate import Wishes, calibration_of
from frtc.codegen.recipe import recipe_of
from frtc.compiler import Progress, silent
from frtc.lowering.ir import fresh_nodes
from frtc.recorded import recorded_options, results_in
from frtc.runtime.plan_file import open_plan
from frtc.scales import Scales
from frtc.update import Chosen, Updated, has_scales, no_scales, open_for, update


@fresh_nodes()
def replace_scales(
    plan: str | Path,
    checkpoint: str | Path,
    data: str | Path | None = None,
    scales: Scales | None = None,
    chosen: Chosen | None = None,
    wishes: Wishes | None = None,
    progress: Progress = silent,
) -> Updated:
    """In place. scales: those, or with None what `data` says of the checkpoint, with the Plan's options."""
    chosen, old = chosen or Chosen(), open_plan(plan, verify=False)
    if not has_scales(recipe_of(old)):
        raise no_scales(old)
    if chosen.self_test:
        results_in(old)  # a Plan that does not say where its results lie is refused before minutes of work
    if scales is None:
        assert data is not None, "neither scales nor data"
        opened = open_for(old, Path(checkpoint), recorded_options(old), chosen)
        scales = calibration_of(opened, Path(data), wishes, progress).scales
    return update(plan, checkpoint, plan, replace(chosen, scales=scales, scales_only=True), progress)
