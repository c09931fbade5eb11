"""A GPU that nobody sells: an RTX 4090 with fewer SMs."""

from dataclasses import replace

from frtc.kernels.targets.rtx4090 import TARGET as RTX4090

TARGET = replace(RTX4090, name="toygpu", title="Toy GPU", sms=46, evidence="compiles, not run", source="made up")
