// What a product of matrices does with its fp32 accumulators before the one rounding of the result.
//
//   linear         y = residual + gate * act(acc + bias)      bias [N], gate [N] or [M, N], residual [M, N]
//   gated_linear   y[:, i] = act(acc[:, 2i]) * acc[:, 2i+1]   rows of w interleaved gate, up
//
// Every absent operand has the type None and costs nothing. Operand types are free; arithmetic is in fp32.
#pragma once

#include "numeric.cuh"

namespace frtc {

struct None {};

// A defect to compile in, so that a test can prove that it would notice: -DFRTC_SABOTAGE=last_k_tile
enum class Sabotage { none, last_k_tile, neighbour_gate, row_tile };
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE none
#endif
inline constexpr Sabotage kSabotage = Sabotage::FRTC_SABOTAGE;

// Whether groups of N elements in rows of stride `ld` can be moved as vectors.
template <int N, typename T>
__device__ __forceinline__ bool vectors_ok(const T* p, int ld) {
    constexpr unsigned long long BYTES = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
    return (reinterpret_cast<unsigned long long>(p) | (static_cast<unsigned int>(ld) * sizeof(T))) % BYTES == 0;
}
template <int N>
__device__ __forceinline__ bool vectors_ok(const None*, int) {
    return true;
}

template <typename Out, typename Bias, typename Residual, typename Gate, Act ACT, bool GATED>
struct Epilogue {
    using OutType = Out;
    using BiasType = Bias;
    using ResidualType = Residual;
    using GateType = Gate;

    static constexpr int IN = 8;                  // accumulators of one row per call
    static constexpr int OUT = GATED ? 4 : 8;     // results of one row per call

    const Bias* bias;
    const Residual* residual;  // may alias y: each element is read by the thread that writes it
    const Gate* gate;
    Out* y;
    int rows, columns;  // of y
    int ld_residual, ld_gate, ld_y;  // elements; ld_gate 0: one row for all
    bool vectors;

    __device__ __forceinline__ Epilogue(const Bias* bias, const Residual* residual, const Gate* gate, Out* y, int rows,
                                        int accumulators, int ld_residual, int ld_gate, int ld_y)
        : bias(bias), residual(residual), gate(gate), y(y), rows(rows), columns(GATED ? accumulators / 2 : accumulators),
          ld_residual(ld_residual), ld_gate(ld_gate), ld_y(ld_y),
          vectors(vectors_ok<OUT>(bias, 0) && vectors_ok<OUT>(residual, ld_residual) && vectors_ok<OUT>(gate, ld_gate) &&
                  vectors_ok<OUT>(y, ld_y)) {}

    // Takes acc[0..7] of columns column .. column + 7 (a multiple of 8) of the product.
    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN]) const {
        const int first = GATED ? column / 2 : column;
        if (row >= rows || first >= columns) return;
        if (vectors && first + OUT <= columns) {
            float result[OUT];
            compute<true>(result, acc, row, first);
            store_f32(y + static_cast<long long>(row) * ld_y + first, result);
        } else {
            float result[OUT];
            compute<false>(result, acc, row, first);
#pragma unroll
            for (int i = 0; i < OUT; ++i) {
                if (first + i < columns) y[static_cast<long long>(row) * ld_y + first + i] = from_f32<Out>(result[i]);
            }
        }
    }

private:
    template <bool VECTORS>
    __device__ __forceinline__ void compute(float (&out)[OUT], const float (&acc)[IN], int row, int first) const {
        if constexpr (GATED) {
#pragma unroll
            for (int i = 0; i < OUT; ++i) out[i] = activate<ACT>(acc[2 * i]) * acc[2 * i + 1];
        } else {
            const int gate_row = kSabotage == Sabotage::neighbour_gate && row > 0 ? row - 1 : row;
            float b[OUT], g[OUT], r[OUT];
            fetch<VECTORS>(b, bias, first, 0.0f, first);
            fetch<VECTORS>(g, gate, static_cast<long long>(gate_row) * ld_gate + first, 1.0f, first);
            fetch<VECTORS>(r, residual, static_cast<long long>(row) * ld_residual + first, 0.0f, first);
#pragma unroll
            for (int i = 0; i < OUT; ++i) out[i] = r[i] + g[i] * activate<ACT>(acc[i] + b[i]);
        }
    }

    // OUT elements from p + at, which is column `first`; `absent` where there is no operand or no such column.
    template <bool VECTORS, typename T>
    __device__ __forceinline__ void fetch(float (&out)[OUT], const T* p, long long at, float absent, int first) const {
        if constexpr (VECTORS) {
            load_f32(out, p + at);
        } else {
#pragma unroll
            for (int i = 0; i < OUT; ++i) out[i] = first + i < columns ? to_f32(p[at + i]) : absent;
        }
    }
    template <bool VECTORS>
    __device__ __forceinline__ void fetch(float (&out)[OUT], const None*, long long, float absent, int) const {
#pragma unroll
        for (int i = 0; i < OUT; ++i) out[i] = absent;
    }
};

}  // namespace frtc
