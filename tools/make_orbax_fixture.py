"""Write tests/fixtures/orbax: two small trees that Orbax itself saved, as openpi's JAX training does.

    python3.12 -m venv .venv-orbax && .venv-orbax/bin/pip install jax==0.10.2 orbax-checkpoint==0.12.8
    .venv-orbax/bin/python tools/make_orbax_fixture.py -o tests/fixtures/orbax

`released/` (Pi0): one device, paths as openpi publishes them, bf16. `trainer/7/` (Pi0.5): a step that the trainer's
CheckpointManager wrote, paths end in "value", the arrays are sharded over two devices, float32 but for a frozen bf16
part. Leaves are those of tests/models/*.jax.keys.json with `SIZES` in place of the extents; the values of a leaf follow
from its path (`values`). Orbax names its data files at random: the bytes of two runs differ, what they hold does not.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # before jax is imported

import argparse
import json
import math
import shutil
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KEYS = Path(__file__).parents[1] / "tests" / "models"
# extent in the published models -> here. What is a product there (16 * 72, 8 * 256, 3 * 1024) is one here
SIZES = {
    **{1: 1, 2: 2, 3: 3, 8: 2, 14: 2, 16: 3, 18: 4, 27: 2, 32: 6, 72: 4, 256: 4, 1024: 6, 1152: 12, 2048: 8},
    **{3072: 18, 4096: 14, 4304: 10, 16384: 10, 257152: 22},
}
FROZEN = "PaliGemma/img"
DISTRIBUTIONS = ("jax", "orbax-checkpoint", "tensorstore", "numpy")


def values(path: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Integers from -125 to 125, exact in bfloat16; another sequence for every path."""
    count = np.arange(math.prod(shape), dtype=np.int64)
    return ((count * 37 + zlib.crc32(path.encode())) % 251 - 125).astype(np.float32).reshape(shape)


def leaves(model: str) -> dict[str, tuple[int, ...]]:
    """Path -> shape."""
    keys = json.loads((KEYS / f"{model}.jax.keys.json").read_text())["keys"]
    return {key["jax"]: tuple(SIZES[extent] for extent in key["jax_shape"]) for key in keys}


def nested(flat: dict[str, Any], ending: tuple[str, ...] = ()) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in flat.items():
        at = tree
        *parents, last = (*path.split("/"), *ending)
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = array
    return tree


def released(folder: Path) -> None:
    arrays = {path: jax.numpy.asarray(values(path, shape), jax.numpy.bfloat16) for path, shape in leaves("pi0").items()}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", {"params": nested(arrays)})


def trainer(folder: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))

    def placed(path: str, shape: tuple[int, ...]) -> jax.Array:
        """The largest axis is divided, as openpi's FSDP does."""
        array = values(path, shape)
        array = array.astype(jax.numpy.bfloat16) if path.startswith(FROZEN) else array
        even = [axis for axis, extent in enumerate(shape) if extent % 2 == 0]
        axis = max(even, key=lambda axis: shape[axis], default=None)
        spec = PartitionSpec(*("fsdp" if i == axis else None for i in range(len(shape))))
        return jax.device_put(array, NamedSharding(mesh, spec))

    params = nested({path: placed(path, shape) for path, shape in leaves("pi05").items()}, ("value",))
    handlers = {name: ocp.PyTreeCheckpointHandler() for name in ("params", "train_state")}
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        state = {"step": 7, "opt_state": {"0": {"count": jax.numpy.zeros((), jax.numpy.int32)}}}
        manager.save(7, {"params": {"params": params}, "train_state": state})
        manager.wait_until_finished()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    folder = parser.parse_args().output.resolve()
    if folder.exists():
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as made:
        released(Path(made) / "released")
        trainer(Path(made) / "trainer")
        shutil.copytree(made, folder, ignore=shutil.ignore_patterns("commit_success.txt"))  # it names the folder
    facts = {
        "versions": {name: version(name) for name in DISTRIBUTIONS},
        "sizes": {str(extent): here for extent, here in SIZES.items()},
        "frozen": FROZEN,
    }
    (folder / "fixture.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
