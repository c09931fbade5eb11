"""NVIDIA A100 SXM."""

from frtc.kernels.targets import KiB, MiB, Target

TARGET = Target(
    name="a100", title="NVIDIA A100 SXM", sm=80, nvcc="sm_80",
    sms=108, smem_per_block=163 * KiB, smem_per_sm=164 * KiB, l2=40 * MiB, dram=1.555e12,
    tflops={"bf16": 312, "f16": 312},
    has=frozenset({"cp.async"}),
    min_driver=580, nvrtc_major=13, unified_memory=False,
    evidence="compiles, not run",
    source="NVIDIA A100 datasheet, 40 GB SXM column; CUDA programming guide, compute capabilities",
)  # fmt: skip
