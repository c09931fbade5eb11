"""`python -m frtc.passes FILE`: run a reproducer, the text that a failing pass was given, through that pass again.

Prints the IR that comes out; a failure raises as it did. Passes that ask what a GPU's kernels can fuse are told: all.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from frtc.errors import UsageError
from frtc.lowering.text import parse_module, show_module
from frtc.passes.pipeline import Options, name_of, run_passes
from frtc.passes.rewrite import Pass
from frtc.passes.standard import pipeline


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m frtc.passes FILE")
    text = Path(arguments[0]).read_text()
    module, _ = run_passes(parse_module(text), [_pass_of(text)], Options.from_environment())
    print(show_module(module), end="")


def _pass_of(text: str) -> Pass:
    """The pass that the first line, `# pass NAME`, names."""
    passes = {name_of(one): one for one in pipeline(lambda node: True)}
    found = re.match(r"# pass (\w+)$", text, re.MULTILINE)
    if found is None or found[1] not in passes:
        raise UsageError("usage.reproducer", f"the first line names no pass of {', '.join(passes)}")
    return passes[found[1]]


if __name__ == "__main__":
    main(sys.argv[1:])
