// A product of sm90_gemm.cuh whose rows are finished.
#pragma once

#include "finished.cuh"
#include "sm90_gemm.cuh"
