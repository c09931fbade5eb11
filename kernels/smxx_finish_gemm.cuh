// A product of smxx_gemm.cuh whose rows are finished: finished.cuh.
#pragma once

#include "finished.cuh"
#include "smxx_gemm.cuh"
