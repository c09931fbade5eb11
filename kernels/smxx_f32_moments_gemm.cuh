// (s, moments, z): the products of smxx_linear_f32.cuh with the epilogue of moments.cuh.
#pragma once

#include "moments.cuh"
#include "smxx_linear_f32.cuh"
