"""NVIDIA GeForce RTX 5090."""

from frtc.kernels.targets import KiB, MiB, Target

TARGET = Target(
    name="rtx5090", title="NVIDIA GeForce RTX 5090", sm=120, nvcc="sm_120a",
    sms=170, smem_per_block=99 * KiB, smem_per_sm=100 * KiB, l2=96 * MiB, dram=1.792e12,
    tflops={"bf16": 209, "f16": 209, "e4m3": 419, "nvfp4": 1676},
    has=frozenset({"cp.async", "tma", "pdl", "fp8", "fp8_mma", "block_scaled_mma"}),
    min_driver=580, nvrtc_major=13, unified_memory=False,
    evidence="compiles, not run",
    source="NVIDIA RTX Blackwell architecture whitepaper, RTX 5090 column (fp32 accumulation); CUDA programming guide",
)  # fmt: skip
