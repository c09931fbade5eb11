"""Two BPE tokenizers of under 1,000 pieces, learnt from the sentences below.

One has the habits of Gemma's: pad 0, eos 1, bos 2, unk 3; spaces become U+2581; one BOS and no EOS; each digit and mark
is a piece of its own; runs of spaces or newlines are pieces; characters that have no piece fall back to bytes.
The other has those of SmolLM2's: bytes are the alphabet, each digit is a piece of its own, no BOS.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPACE = "\u2581"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
RUNS = [SPACE * n for n in range(2, 5)] + ["\n" * n for n in range(2, 4)]
LEARNT = 96  # merged pieces asked of the trainer; the corpus decides how many of them there are
SENTENCES = [
    "Task: pick up the red cup, State: ;\nAction: ",
    "Task: put the blue block into the bowl, State: ;\nAction: ",
    "Task: open the top drawer and place the cup inside, State: ;\nAction: ",
    "Task: fold the towel on the table, State: ;\nAction: ",
    "Task: pour the water into the cup, State: ;\nAction: ",
    "Task: push the green button with the left gripper, State: ;\nAction: ",
    "Task: close the drawer, then pick the towel up, State: ;\nAction: ",
    "Task: move the bowl to the right of the plate, State: ;\nAction: ",
]
CHAT_PAD = "<|im_end|>"
CHAT_SPECIAL = ["<|endoftext|>", "<|im_start|>", CHAT_PAD, "<image>", "<fake_token_around_image>", "<global-img>"]
CHARACTERS = sorted({chr(code) for code in range(33, 127)} | {"\n", "\t", SPACE})


def train_merges() -> list[tuple[str, str]]:
    """Merges inside words only, each word with the space before it, as SentencePiece's training splits text."""
    trainee = Tokenizer(models.BPE())
    trainee.normalizer = normalizers.Replace(" ", SPACE)
    trainee.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}?[A-Za-z]+|[^A-Za-z]"), behavior="isolated")
    size = len(CHARACTERS) + LEARNT
    trainee.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=size, initial_alphabet=CHARACTERS, show_progress=False)
    )
    return [(left, right) for left, right in json.loads(trainee.to_str())["model"]["merges"]]


def build() -> Tokenizer:
    """Pieces in Gemma's order: special, newline, runs of white space, bytes, learnt pieces, single characters."""
    runs = [(run[:-1], run[-1]) for run in RUNS]
    merges = runs + train_merges()
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    pieces = SPECIAL + ["\n", *RUNS] + bytes_ + ["".join(pair) for pair in merges[len(runs) :]] + CHARACTERS
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def save(path: Path) -> int:
    """Write tokenizer.json and return the number of pieces."""
    tokenizer = build()
    tokenizer.save(str(path), pretty=False)
    return tokenizer.get_vocab_size()


def save_byte_level(path: Path) -> int:
    """Write tokenizer.json of the byte-level one and return the number of pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = len(CHAT_SPECIAL) + 256 + LEARNT
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=CHAT_SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([sentence.partition(",")[0] + "\n" for sentence in SENTENCES], trainer)
    tokenizer.save(str(path), pretty=False)
    return tokenizer.get_vocab_size()
