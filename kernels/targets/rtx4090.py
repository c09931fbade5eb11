"""NVIDIA GeForce RTX 4090."""

from frtc.kernels.targets import KiB, MiB, Target

TARGET = Target(
    name="rtx4090", title="NVIDIA GeForce RTX 4090", sm=89, nvcc="sm_89",
    sms=128, smem_per_block=99 * KiB, smem_per_sm=100 * KiB, l2=72 * MiB, dram=1.008e12,
    tflops={"bf16": 165, "f16": 165, "e4m3": 330},
    has=frozenset({"cp.async", "fp8", "fp8_mma"}),
    min_driver=580, nvrtc_major=13, unified_memory=False,
    evidence="compiles, not run",
    source="NVIDIA Ada GPU architecture whitepaper, RTX 4090 column (fp32 accumulation); CUDA programming guide",
)  # fmt: skip
