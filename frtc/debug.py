"""What FRTC_DEBUG 3 and 5 and FRTC_DUMP show of the kernels. The passes' share is in passes/pipeline.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from frtc.codegen.build import Built
from frtc.codegen.nvrtc import Job
from frtc.kernels.targets import Target
from frtc.passes.pipeline import Options, write_dump

KERNELS, SOURCES = 3, 5  # levels of FRTC_DEBUG


def show_kernels(built: Built, target: Target, options: Options) -> None:
    """Chosen kernels and why, generated sources and compiler lines; files src/ and cubin/ in the dump folder."""
    if options.debug >= KERNELS:
        for stage, calls in built.emitted.items():
            for i, call in enumerate(calls):
                print(f"{stage}/{i} {call.site.op}  # {call.name}\n{call.choice}", file=sys.stderr)
    if options.debug < SOURCES and options.dump is None:
        return
    for (cubin, image), job in zip(built.cubins.items(), jobs(built, target), strict=True):
        text = f"// {job.entry}\n// nvrtc {' '.join(job.options)}\n{job.source}"
        if options.debug >= SOURCES:
            print(text, file=sys.stderr)
        if options.dump is not None:
            for folder, suffix, data in (("src", "cu", text.encode()), ("cubin", "cubin", image)):
                write_dump(options.dump / folder / f"{cubin}.{suffix}", data)


def jobs(built: Built, target: Target) -> Iterator[Job]:
    """The distinct kernels in the order of the Plan's cubins."""
    calls = [call for calls in built.emitted.values() for call in calls]
    stages = (s for call in calls for s in call.choice.kernel.stages(call.site, call.choice.config, target))
    yield from dict.fromkeys(Job.of(stage, target) for stage in stages)
