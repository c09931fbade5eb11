"""Products on wgmma whose rows are finished: smxx_finish_gemm's finish behind sm90_gemm's products."""

from frtc.kernels import sm90_gemm, smxx_finish_gemm

KERNELS = smxx_finish_gemm.kernels_over(sm90_gemm.MAINLOOP)
