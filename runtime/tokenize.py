"""Token step: a tokenizer.json held in memory, through the `tokenizers` library. No file, no network on the robot."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError
from frtc.runtime.policy import Tokens


class TokenStep:
    def __init__(self, step: Tokens, data: bytes | None) -> None:
        """data: the bytes whose SHA-256 the step names."""
        if data is None or hashlib.sha256(data).hexdigest() != step.tokenizer:
            raise FrtcError(
                "tokenizer.hash",
                "the tokenizer is not the one that the policy names",
                [("wants", f"sha256:{step.tokenizer}")],
            )
        self.step, self.tokenizer = step, load(data)
        self.last, self.count = "", -1  # a prompt stays for many inferences: text and how many tokens it has
        self.row = np.full(step.budget, step.pad, np.int32)  # of the last text

    def run(self, text: str, tokens: NDArray[np.int32]) -> int:
        """Fills tokens [budget]; returns how many are valid."""
        if self.count < 0 or text != self.last:
            self.count = -1
            ids = self._ids(text)
            self.row[: len(ids)] = ids
            self.row[len(ids) :] = self.step.pad
            self.last, self.count = text, len(ids)
        tokens[...] = self.row
        return self.count

    def forget(self) -> None:
        """Tokenise the next text even if it is the last one."""
        self.count = -1

    def _ids(self, text: str) -> list[int]:
        step = self.step
        begin = [step.bos] if step.bos >= 0 else []
        ids: list[int] = [*begin, *self.tokenizer.encode(text, add_special_tokens=False).ids]
        if len(ids) > step.budget:
            rows = [("text", repr(text if len(text) <= 120 else text[:120] + "…"))]
            raise FrtcError(
                "prompt.too_long",
                f"the prompt has {len(ids)} tokens, the Plan holds {step.budget}",
                rows,
                f"shorten it, or compile with --prompt-tokens {len(ids)} or more",
            )
        if max(ids, default=0) >= step.vocab:
            raise FrtcError(
                "tokenizer.vocab",
                f"token {max(ids)} is not among the model's {step.vocab} embeddings",
                hint="this tokenizer belongs to another model",
            )
        return ids


def load(data: bytes) -> Any:
    """A tokenizers.Tokenizer that neither cuts nor pads, and remembers no text.

    What it remembers are words, and a prompt that shows the state is one long word, new each time: up to 10,000 of them
    would be kept, 5 KB each, and none found again. The same text again TokenStep knows.
    """
    from tokenizers import Tokenizer  # lazily: `import frtc` stays quick

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise FrtcError(
            "tokenizer.unreadable",
            f"the tokenizer cannot be read: {error}",
            hint="a tokenizer.json is needed; a SentencePiece .model is not read",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if hasattr(tokenizer.model, "_resize_cache"):  # models that keep something
        tokenizer.model._resize_cache(0)
    return tokenizer
