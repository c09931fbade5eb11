// (q, k, v) = rope(x w^T): the product of sm90_gemm.cuh with the epilogue of epilogue_rope.cuh.
#pragma once

#include "epilogue_rope.cuh"
#include "sm90_gemm.cuh"
