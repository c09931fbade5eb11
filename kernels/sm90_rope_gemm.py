"""linear_rope_qkv on wgmma: smxx_rope_gemm's epilogue behind sm90_gemm's products."""

from frtc.kernels import sm90_gemm, smxx_rope_gemm

KERNELS = smxx_rope_gemm.kernels_over(sm90_gemm.MAINLOOP)
