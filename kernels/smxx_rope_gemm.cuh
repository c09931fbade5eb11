// (q, k, v) = rope(x w^T): the product of smxx_gemm.cuh, whose kernel is instantiated with the epilogue of
// epilogue_rope.cuh. Tiles, splits and their costs are those of a linear of the same size.
#pragma once

#include "epilogue_rope.cuh"
#include "smxx_gemm.cuh"
