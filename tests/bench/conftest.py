"""Tiny checkpoints of every policy, written once for all tests of the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import full_model
from bench.full_model import Shape, compiled, plan_path
from frtc.models import load_models

POLICIES = [name for name, model in load_models().items() if model.synthetic is not None]


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a policy whose files go to the tests' own folder."""
    monkeypatch.setattr(full_model, "SCRATCH", scratch)
    return str(request.param)


@pytest.fixture(scope="session")
def tiny_plan(scratch: Path) -> Path:
    """Pi0.5 in bf16, ten actions."""
    shape = Shape("pi05", prompt=48, horizon=10, size="tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_model, "SCRATCH", scratch)
        if not plan_path(shape).exists():
            compiled(shape)
        return plan_path(shape)
