"""NVIDIA H100 / H200 SXM."""

from frtc.kernels.targets import KiB, MiB, Target

TARGET = Target(
    name="hopper", title="NVIDIA H100 / H200 SXM", sm=90, nvcc="sm_90a",
    sms=132, smem_per_block=227 * KiB, smem_per_sm=228 * KiB, l2=50 * MiB, dram=3.35e12,
    tflops={"bf16": 989, "f16": 989, "e4m3": 1979},
    has=frozenset({"cp.async", "tma", "pdl", "wgmma", "fp8"}),
    min_driver=580, nvrtc_major=13, unified_memory=False,
    evidence="run on hardware", family="native", overlaps=True,
    source="NVIDIA H100 datasheet, SXM5 column; CUDA programming guide, compute capabilities",
)  # fmt: skip
