"""NVIDIA Jetson AGX Thor."""

from frtc.kernels.targets import KiB, MiB, Target

TARGET = Target(
    name="thor", title="NVIDIA Jetson AGX Thor", sm=110, nvcc="sm_110a",
    sms=20, smem_per_block=227 * KiB, smem_per_sm=228 * KiB, l2=32 * MiB, dram=273e9,
    tflops={"bf16": 250, "f16": 250, "e4m3": 500, "nvfp4": 1000},
    has=frozenset({"cp.async", "tma", "pdl", "tcgen05", "fp8"}),
    min_driver=580, nvrtc_major=13, unified_memory=True,
    evidence="compiles, not run",
    source="Jetson Thor series datasheet (dense rates: half of the sparse figures); CUDA programming guide",
)  # fmt: skip
