// (s, moments, z): the product of sm90_turned_gemm.cuh with the epilogue of moments.cuh.
#pragma once

#include "moments.cuh"
#include "sm90_turned_gemm.cuh"
