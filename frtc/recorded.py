"""What a Plan remembers of its compilation: options, configuration, places, and the tokenizer as a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frtc.compiler import CompileOptions, options_of
from frtc.errors import FrtcError
from frtc.policy import TOKENIZER
from frtc.precision import ActivationScales, RecordedScales
from frtc.results import RESULTS
from frtc.runtime.plan_file import Plan
from frtc.runtime.policy import Policy, Tokens
from frtc.runtime.tokenize import load


def recorded_options(plan: Plan) -> CompileOptions:
    """The options that the Plan was compiled with; no tokenizer and no adapter, whose paths are not kept."""
    try:
        return options_of(plan.evidence["options"])
    except (KeyError, TypeError, ValueError, AttributeError):
        hint = "compile it again: the evidence of a Plan names the options it was compiled with"
        raise FrtcError("plan.options", "the Plan does not say how it was compiled", _notes(plan), hint) from None


def recorded_config(plan: Plan) -> dict[str, Any]:
    """The model's configuration, as JSON has it."""
    found = plan.evidence.get("config")
    if not isinstance(found, dict):
        hint = "compile it again: the evidence of a Plan names the configuration of its model"
        raise FrtcError("plan.options", "the Plan does not say which configuration its model has", _notes(plan), hint)
    return found


def recorded_scales(plan: Plan) -> ActivationScales | None:
    """The static activation scales that it was compiled with; None where it has none."""
    try:
        return RecordedScales.of_evidence(plan.evidence)
    except (KeyError, TypeError, AttributeError):  # evidence is not validated when a Plan opens
        raise unreadable_scales("there are none") from None


def unreadable_scales(why: str) -> FrtcError:
    hint = "name the calibration that it was compiled with: --scales FILE"
    return FrtcError("plan.damaged", f"the Plan's record of its activation scales cannot be read: {why}", hint=hint)


def results_in(plan: Plan) -> dict[str, dict[str, Any]]:
    """Program -> name of a result -> where it lies: weights do not move it."""
    if found := kept_results(plan):
        return found
    what = "the Plan does not say where its programs keep their results"
    raise FrtcError("verify.no_vectors", what, hint="compile the Plan again")


def kept_results(plan: Plan) -> dict[str, dict[str, Any]]:
    """As `results_in`; empty where the Plan does not say."""
    test = plan.evidence.get("self_test")
    found = test.get("values") if isinstance(test, dict) else plan.evidence.get(RESULTS)
    return found if isinstance(found, dict) else {}


def _notes(plan: Plan) -> list[tuple[str, str]]:
    return [("plan", str(plan.path)), *(("note", note) for note in plan.notes)]


@contextmanager
def kept_tokenizer(plan: Plan) -> Iterator[Path | None]:
    """The Plan's tokenizer as a file of the name that it had, beside it the piece that fills prompts."""
    data = plan.files().get(TOKENIZER)
    if data is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _file_name(plan)
        path.write_bytes(data)
        step = Policy.from_json(plan.program.policy).find(Tokens)
        pad = load(bytes(data)).id_to_token(step.pad) if step else None
        (path.parent / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad} if pad else {}))
        yield path


def tokenizer_was_chosen(plan: Plan) -> bool:
    """By --tokenizer, not by lying in the checkpoint."""
    return _fact(plan, "tokenizer").get("source") == "option"


def _file_name(plan: Plan) -> str:
    name = Path(str(_fact(plan, "tokenizer").get("value", ""))).name
    return name if name not in ("", "tokenizer_config.json") else "tokenizer.json"


def _fact(plan: Plan, name: str) -> dict[str, Any]:
    source = plan.evidence.get("source")
    facts = source.get("facts") if isinstance(source, dict) else None
    found = (f for f in facts if isinstance(f, dict) and f.get("name") == name) if isinstance(facts, list) else iter(())
    return next(found, {})
