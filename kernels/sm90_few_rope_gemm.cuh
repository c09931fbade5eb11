// linear_rope_qkv: epilogue_rope.cuh behind the products of sm90_few_gemm.cuh.
#pragma once

#include "epilogue_rope.cuh"
#include "sm90_few_gemm.cuh"
