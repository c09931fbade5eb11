"""The tokenizer of a checkpoint: its bytes, which go into the Plan, and the pieces that begin and pad a prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frtc.errors import FrtcError, UsageError
from frtc.models.checkpoint import read_json
from frtc.models.policies import PolicyFamily
from frtc.policy_reader import Reader
from frtc.runtime.policy import Tokens
from frtc.runtime.tokenize import load

PLACES = ("tokenizer.json", "tokenizer/tokenizer.json", "assets/tokenizer.json")


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """data: the tokenizer.json; pad: the piece that fills prompts."""

    data: bytes
    pad: str

    def step(self, family: PolicyFamily, budget: int, vocab: int) -> Tokens:
        """The token step for a model with `vocab` embeddings."""
        tokenizer = load(self.data)
        wanted = [piece for piece in (family.bos, self.pad) if piece]
        pieces = {piece: tokenizer.token_to_id(piece) for piece in wanted}
        if absent := [piece for piece, number in pieces.items() if number is None]:
            raise _foreign(f"the tokenizer has no piece {' and no '.join(absent)}")
        if (count := tokenizer.get_vocab_size()) > vocab:
            raise _foreign(f"the tokenizer has {count} pieces, the model {vocab} embeddings")
        if not family.bos and (added := tokenizer.num_special_tokens_to_add(False)):
            raise _foreign(
                f"the tokenizer adds {added} tokens of its own to a text, {family.name} was trained with none"
            )
        digest = hashlib.sha256(self.data).hexdigest()
        return Tokens(budget, pieces[family.bos] if family.bos else -1, pieces[self.pad], vocab, digest)


def read_tokenizer(reader: Reader, name: str) -> TokenizerFile:
    """The option's, or one in the checkpoint. name: what the origin calls the tokenizer, for the message."""
    option = reader.options.tokenizer
    places = [option] if option else [reader.folder / place for place in PLACES]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        hint = f"pass one with --tokenizer FILE (the tokenizer.json of {name}); it goes into the Plan"
        rows = [("looked for", str(place)) for place in places]
        raise UsageError("tokenizer.missing", "the checkpoint has no tokenizer", rows, hint)
    reader.fact("tokenizer", path.name, "option" if option else "the checkpoint's")
    data = path.read_bytes()
    return TokenizerFile(data, _pad(path.parent / "tokenizer_config.json", data) or reader.family.pad)


def _pad(config: Path, data: bytes) -> str | None:
    """The padding piece by the tokenizer's configuration, or by the tokenizer itself."""
    said = read_json(config).get("pad_token") if config.is_file() else None
    if said is None:
        try:
            whole = json.loads(data)
        except ValueError:
            return None  # `load` says what is wrong with it
        padding = whole.get("padding") if isinstance(whole, dict) else None
        said = padding.get("pad_token") if isinstance(padding, dict) else None
    said = _content(said)
    return said if isinstance(said, str) and said else None


def _content(said: Any) -> Any:
    return said.get("content") if isinstance(said, Mapping) else said


def _foreign(what: str) -> FrtcError:
    return FrtcError("tokenizer.vocab", what, hint="it belongs to another model")
