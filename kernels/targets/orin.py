"""NVIDIA Jetson AGX Orin 64 GB."""

from frtc.kernels.targets import KiB, MiB, Target

TARGET = Target(
    name="orin", title="NVIDIA Jetson AGX Orin 64 GB", sm=87, nvcc="sm_87",
    sms=16, smem_per_block=163 * KiB, smem_per_sm=164 * KiB, l2=4 * MiB, dram=204.8e9,
    tflops={"bf16": 85, "f16": 85},
    has=frozenset({"cp.async"}),
    min_driver=580, nvrtc_major=13, unified_memory=True,
    evidence="compiles, not run",
    source="Jetson AGX Orin technical brief (dense rates: half of the sparse figures); CUDA programming guide",
)  # fmt: skip
