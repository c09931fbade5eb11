"""What activation scales belong to: every byte of the weights, the model's IR, and what decides its inputs.

Two fine-tunes that differ in one weight have different keys. Headers would not do: they are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from frtc.errors import FrtcError
from frtc.lowering.ir import Module
from frtc.lowering.text import show
from frtc.models.lora import TENSORS
from frtc.models.lora_config import CONFIG
from frtc.models.orbax import MANIFEST, METADATA
from frtc.runtime.policy import Policy

if TYPE_CHECKING:
    from frtc.compiler import Opened

CHUNK = 16 << 20  # bytes hashed at once by one thread
WORKERS = min(16, os.cpu_count() or 1)
PARTS = {
    "weights": "the bytes of the checkpoint's files, or of its adapter's",
    "ir": "the model's IR: sizes, steps, or the frtc that traced it",
    "options": "the policy: statistics, tokenizer, cameras, or the options that name them",
}


@dataclass(frozen=True, slots=True)
class Key:
    """SHA-256 of each part, as hexadecimal digits."""

    weights: str
    ir: str
    options: str

    @property
    def digest(self) -> str:
        """Of all parts: the name of the key."""
        return hashlib.sha256("\n".join(asdict(self).values()).encode()).hexdigest()

    def differs(self, other: Key, parts: Iterable[str] = PARTS) -> list[str]:
        """The parts that differ."""
        return [part for part in parts if getattr(self, part) != getattr(other, part)]


def key_of(opened: Opened, front: Module, policy: Policy) -> Key:
    """front: the traced module after passes.standard.FRONT."""
    tokenizer = opened.files.tokenizer
    return Key(weights_digest(weight_files(opened)), ir_digest(front), options_digest(policy, tokenizer))


def weight_files(opened: Opened) -> list[Path]:
    """Every file that a weight comes from, in a fixed order; of a JAX tree all, of an adapter its configuration too."""
    found: list[Path] = []
    for file in opened.checkpoint.files:
        if file.name in (MANIFEST, METADATA):
            found += sorted(path for path in file.parent.rglob("*") if path.is_file())
        else:
            found.append(file)
        if file.name == TENSORS:  # rank and alpha decide what is merged
            found.append(file.parent / CONFIG)
    return list(dict.fromkeys(found))


def weights_digest(files: Iterable[Path]) -> str:
    """Of contents and sizes, not of names: of the hashes of all chunks, file by file."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(WORKERS) as pool:
        for path in files:
            size = _size(path)
            whole.update(f"file {size}\n".encode())
            for digest in pool.map(lambda at, path=path: _chunk(path, at), range(0, size, CHUNK)):
                whole.update(digest)
    return whole.hexdigest()


def ir_digest(module: Module) -> str:
    """Of the programs and weights as text without locations, and of the schedule."""
    texts = [show(graph, locations=False) for graph in (*module.graphs, module.weights)]
    texts += [repr(module.schedule), repr(module.outputs)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def options_digest(policy: Policy, tokenizer: bytes | None) -> str:
    """Of how observations become inputs: the policy, whatever file or option said it, and the tokenizer."""
    said = {**policy.to_json(), "assumed": []}  # who said it decides nothing
    whole = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    whole.update(tokenizer or b"")
    return whole.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as fault:
        raise _unreadable(path, fault) from None


def _chunk(path: Path, at: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(at)
            return hashlib.sha256(file.read(CHUNK)).digest()
    except OSError as fault:
        raise _unreadable(path, fault) from None


def _unreadable(path: Path, fault: OSError) -> FrtcError:
    return FrtcError("checkpoint.read", f"cannot read {path}: {fault.strerror}", [("file", str(path))])
