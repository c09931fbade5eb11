// (s, moments, z): the product of smxx_tf32_gemm.cuh with the epilogue of moments.cuh.
#pragma once

#include "moments.cuh"
#include "smxx_tf32_gemm.cuh"
