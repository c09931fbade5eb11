"""Camera frames on a real GPU: the bits of the host step, defects that show, actions of a policy, a steady camera."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc import observation
from frtc.compiler import compile
from frtc.errors import FrtcError
from frtc.policy import Policy
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan_file import open_plan
from frtc.runtime.policy import Camera
from frtc.runtime.session import Session
from tests.frtc.in_memory import Maker
from tests.runtime.frames_plan import images, write
from tests.runtime.here import target_here
from tests.runtime.test_frames import FORMS, RULES, VIEWS, WHOLE, as_form
from tests.runtime.test_policy_images import picture
from tests.runtime.test_session_gpu import BUILDS, Counting

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

KNOWN = [
    (480, 640),
    (224, 224),
    (1080, 1920),
    (1920, 1080),
    (1, 1),
    (2, 3),
    (200, 1),
    (224, 223),
    (37, 224),
    (448, 448),
]
DRAWN = [tuple(int(v) for v in np.random.default_rng(11).integers(16, 800, 2)) for _ in range(14)]


@pytest.fixture(scope="module")
def target() -> str:
    return target_here().name


@contextmanager
def both(path: Path) -> Iterator[tuple[Policy, Policy]]:
    """The Plan on the GPU and in the emulator, whose image step is the host's."""
    plan = open_plan(path)
    with ExitStack() as stack:
        policy = stack.enter_context(Policy(plan, Session(plan)))
        assert policy.executor.frames is not None
        yield policy, stack.enter_context(Policy(plan, Emulator(plan)))


def on_gpu(frame: np.ndarray) -> Any:
    """A tensor with the frame's shape; torch has no steps downwards."""
    return torch.from_numpy(np.ascontiguousarray(frame)).cuda()


def pinned(frame: np.ndarray) -> np.ndarray:
    """In pinned memory, the strides kept where they go upwards."""
    return torch.from_numpy(np.ascontiguousarray(frame)).pin_memory().numpy()


PLACES: tuple[Callable[[np.ndarray], Any], ...] = (lambda frame: frame, pinned, on_gpu)


@pytest.mark.parametrize("place", ["center", "end"])
@pytest.mark.parametrize("resize", RULES)
def test_the_bits_of_the_host_step(resize: str, place: str, target: str, tmp_path: Path) -> None:
    """Two cameras of different sizes; pageable, pinned and on the device in turn; each form at some of the sizes."""
    sizes, turn = [*KNOWN, *DRAWN], 0
    for i, (layout, pixel) in enumerate(FORMS if place == "center" else FORMS[::3]):
        cameras = [Camera("base", "x", layout, pixel), Camera("wrist", "y", layout, pixel)]  # type: ignore[arg-type]
        path = write(tmp_path / f"{i}.plan", images(cameras, 224, resize, RULES[resize], place), target)
        with both(path) as (policy, host):
            for size, other in zip(sizes[i % 4 :: 4], sizes[(i + 2) % 4 :: 4], strict=False):
                frames = [as_form(picture(*s), layout, pixel) for s in (size, other)]
                wanted = host.infer(dict(zip(policy.cameras, frames, strict=True))).output
                seen = [PLACES[(turn + k) % 3](frame) for k, frame in enumerate(frames)]
                found, turn = policy.infer(dict(zip(policy.cameras, seen, strict=True))).output, turn + 1
                wrong = int((found != wanted).sum())
                assert found.tobytes() == wanted.tobytes(), (
                    f"{size}, {other}, {layout}, {pixel}: {wrong} numbers differ"
                )


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, target: str, tmp_path: Path) -> None:
    view = VIEWS[name](WHOLE)
    with both(write(tmp_path / "view.plan", images([Camera("base", "x")]), target)) as (policy, host):
        wanted = host.infer({"base": view}).output
        assert np.array_equal(policy.infer({"base": view}).output, wanted)


def test_views_on_the_device(target: str, tmp_path: Path) -> None:
    """Crops, planes and transposed tensors are read where they are."""
    whole = on_gpu(WHOLE)
    with both(write(tmp_path / "view.plan", images([Camera("base", "x")]), target)) as (policy, host):
        for view in (whole[5:50, 7:70], whole[::2, ::3], whole.transpose(0, 1), whole[:1, :1].expand(60, 80, 3)):
            wanted = host.infer({"base": view.cpu().numpy()}).output
            assert np.array_equal(policy.infer({"base": view}).output, wanted)


def test_work_of_the_callers_stream_is_waited_for(target: str, tmp_path: Path) -> None:
    frame = picture(480, 640)
    with both(write(tmp_path / "s.plan", images([Camera("base", "x")], 224), target)) as (policy, host):
        wanted = host.infer({"base": frame}).output
        policy.infer({"base": on_gpu(frame)})
        for _ in range(20):
            with torch.cuda.stream(torch.cuda.Stream()):
                slow = torch.empty(4096, 4096, device="cuda").normal_()
                made = torch.zeros(480, 640, 3, dtype=torch.uint8, device="cuda")
                for _ in range(8):
                    slow = slow @ slow
                made += torch.from_numpy(frame).cuda(non_blocking=True)
                found = policy.infer({"base": made}).output
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("defect", ["FRTC_SABOTAGE_LAST_TAP", "FRTC_SABOTAGE_TRUNCATED"])
def test_sabotaged(defect: str, target: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.plan", images([Camera("base", "x")], 224), target, defines=(defect,))
    with both(path) as (policy, host):
        seen = {"base": picture(480, 640)}
        assert not np.array_equal(policy.infer(seen).output, host.infer(seen).output)


@pytest.mark.parametrize("resize", RULES)
def test_a_float_out_of_range_on_the_device(resize: str, target: str, tmp_path: Path) -> None:
    camera = Camera("base", "x", "hwc", "rgb01")
    with both(write(tmp_path / "r.plan", images([camera], 224, resize), target)) as (policy, _):
        good = on_gpu(as_form(picture(224, 224), "hwc", "rgb01"))
        for value in (float("nan"), 1.5, -1e-6):
            bad = good.clone()
            bad[200, 100, 2] = value
            with pytest.raises(FrtcError, match=r"image base leaves \[0, 1\]"):
                policy.infer({"base": bad})
            policy.infer({"base": good})


# ---- a policy --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy's Plan."""
    folder = tmp_path_factory.mktemp("frames")
    maker = Maker(folder, target)
    compile(folder / "ck", target, folder / "tiny.plan", maker.options)
    return folder / "tiny.plan"


def test_actions_are_those_of_the_host_step(path: Path) -> None:
    """Bit for bit, over changing sizes and places; and `images` may still be given in between."""
    with Policy.load(path, 0, untested=True) as policy:
        policy.warm()
        for i, size in enumerate([(480, 640), (224, 224), (1080, 1920), (480, 640), (97, 53)]):
            seen = observation.seeded(policy.steps, i)
            seen |= {role: picture(*size) + np.uint8(k) for k, role in enumerate(policy.cameras)}
            prepared = policy.steps.prepare(seen, draw=i)
            for name, values in prepared.inputs.items():
                policy.executor.set(name, values)
            policy.executor.run()
            wanted = policy.steps.finish(policy.executor.get(policy.output), prepared)
            for place in PLACES:
                moved = seen | {role: place(seen[role]) for role in policy.cameras}
                policy.reset()
                assert policy.infer(moved, draw=i).actions.tobytes() == wanted.tobytes()
            policy.executor.run()  # the other graph, on what the frames made
            assert np.array_equal(policy.steps.finish(policy.executor.get(policy.output), prepared), wanted)


def test_a_steady_camera_builds_and_allocates_nothing(path: Path) -> None:
    api = Counting()
    plan = open_plan(path)
    with Policy(plan, Session(plan, driver=Driver(api=api))) as policy:
        policy.warm()
        seen = observation.seeded(policy.steps)
        kinds = [seen | {role: place(seen[role]) for role in policy.cameras} for place in PLACES]
        for kind in kinds:
            policy.infer(kind)
            before, room = api.calls.copy(), policy.executor.memory().slots  # type: ignore[attr-defined]
            for _ in range(300):
                policy.infer(kind)
            made = api.calls - before
            assert made["cuGraphLaunch"] == 300
            assert not [name for name in made if any(word in name for word in BUILDS)]
            assert policy.executor.memory().slots == room  # type: ignore[attr-defined]
