// What a product of matrices does with its fp32 accumulators before the one rounding of the result.
//
//   linear         y = residual + gate * act(acc + bias)      bias [N], gate [N] or [M, N], residual [M, N]
//   gated_linear   y[:, i] = act(acc[:, 2i]) * acc[:, 2i+1]   rows of w interleaved gate, up
//   with scales    acc *= x_scale [M, 1], then acc *= alpha ([N] or one), both fp32, before all else
//   e4m3 results   round(y * inv), saturating at 448; inv is one fp32 number
//
// Every absent operand has the type None and costs nothing. Operand types are free; arithmetic is in fp32.
//
// A mainloop knows an epilogue by this and no more, so that another class with the same members serves as well:
//   EPILOGUE(M, N, batch, arguments...)  sizes of the product, which of its batches, and the kernel's last parameters: the
//                                        pack that Product.arguments() lists and the kernel's template-id spells out
//   store(row, column, acc[8])           accumulators of columns column .. column + 7, a multiple of 8; rows and columns
//                                        beyond the edges come too, and are not to be stored
//   finish<THREADS, SHARES>(smem, m0)    by THREADS threads of the block, from 0 on, once, behind their last store: rows from
//                                        m0 on of this column of tiles are stored, or one of SHARES shares of them. Other
//                                        threads have ended or are about to. The block's dynamic shared memory is free,
//                                        behind a barrier. Blocks that store nothing (early shares of split K) do not come
//   BLOCKS                               may be absent: __launch_bounds__'s least number of blocks on an SM
#pragma once

#include "numeric.cuh"

namespace frtc {

struct None {};

// A defect to compile in, so that a test can prove that it would notice: -DFRTC_SABOTAGE=last_k_tile
enum class Sabotage { none, last_k_tile, neighbour_gate, neighbour_scale, row_tile };
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE none
#endif
inline constexpr Sabotage kSabotage = Sabotage::FRTC_SABOTAGE;

// 0 leaves it to ptxas, which spills now and then so that one more block fits.
template <typename EPILOGUE>
constexpr int least_blocks() {
    if constexpr (requires { EPILOGUE::BLOCKS; }) return EPILOGUE::BLOCKS;
    return 0;
}

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

// Factors of the columns of the product: absent, one number, one for each column.
enum class Alpha { none, one, each };

template <typename Out, typename Bias, typename Residual, typename Gate, Act ACT, bool GATED, Alpha ALPHA = Alpha::none,
          bool X_SCALE = false>
struct Epilogue {
    static constexpr int IN = 8;                  // accumulators of one row per call
    static constexpr int OUT = GATED ? 4 : 8;     // results of one row per call
    static constexpr bool SCALED_OUT = sizeof(Out) == 1;

    const Bias* bias;
    const Residual* residual;  // may alias y: each element is read by the thread that writes it
    const Gate* gate;
    const float* alpha;
    const float* x_scale;
    Out* y;
    int rows, columns, accumulators;             // of y, and columns of the product
    int ld_residual, ld_gate, ld_x_scale, ld_y;  // elements; 0: one row for all
    float alpha_one, inv;
    bool vectors;

    __device__ __forceinline__ Epilogue(int m, int n, int batch, const Bias* bias, const Residual* residual, const Gate* gate,
                                        const float* alpha, const float* x_scale, const float* inv, Out* y, int ld_residual,
                                        int ld_gate, int ld_x_scale, int ld_y, long long batch_residual, long long batch_gate,
                                        long long batch_x_scale, long long batch_y)
        : bias(bias), residual(at(residual, batch * batch_residual)), gate(at(gate, batch * batch_gate)), alpha(alpha),
          x_scale(X_SCALE ? x_scale + batch * batch_x_scale : nullptr), y(y + batch * batch_y), rows(m),
          columns(GATED ? n / 2 : n), accumulators(n), ld_residual(ld_residual), ld_gate(ld_gate), ld_x_scale(ld_x_scale),
          ld_y(ld_y), alpha_one(ALPHA == Alpha::one ? *alpha : 1.0f), inv(SCALED_OUT ? *inv : 1.0f),
          vectors(vectors_ok<OUT>(bias, 0) && vectors_ok<OUT>(this->residual, ld_residual) &&
                  vectors_ok<OUT>(this->gate, ld_gate) && vectors_ok<OUT>(this->y, ld_y) &&
                  (ALPHA != Alpha::each || vectors_ok<IN>(alpha, 0))) {}

    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN]) const {
        const int first = GATED ? column / 2 : column;
        if (row >= rows || first >= columns) return;
        Out* const to = y + static_cast<long long>(row) * ld_y + first;
        float result[OUT];
        if (vectors && first + OUT <= columns) {
            compute<true>(result, acc, row, column);
            store_f32(to, result);
        } else {
            compute<false>(result, acc, row, column);
#pragma unroll
            for (int i = 0; i < OUT; ++i) {
                if (first + i < columns) to[i] = from_f32<Out>(result[i]);
            }
        }
    }

    template <int THREADS, int SHARES = 1>
    __device__ __forceinline__ void finish(unsigned char*, int) const {}

private:
    template <typename T>
    __device__ __forceinline__ static const T* at(const T* p, long long offset) {
        return p + offset;
    }
    __device__ __forceinline__ static const None* at(const None* p, long long) { return p; }

    template <bool VECTORS>
    __device__ __forceinline__ void compute(float (&out)[OUT], const float (&unscaled)[IN], int row, int column) const {
        float acc[IN];
        scale<VECTORS>(acc, unscaled, row, column);
        if constexpr (GATED) {
#pragma unroll
            for (int i = 0; i < OUT; ++i) out[i] = activate<ACT>(acc[2 * i]) * acc[2 * i + 1];
        } else {
            const int gate_row = kSabotage == Sabotage::neighbour_gate && row > 0 ? row - 1 : row;
            const int left = columns - column;
            float b[OUT], g[OUT], r[OUT];
            fetch<VECTORS>(b, bias, column, 0.0f, left);
            fetch<VECTORS>(g, gate, static_cast<long long>(gate_row) * ld_gate + column, 1.0f, left);
            fetch<VECTORS>(r, residual, static_cast<long long>(row) * ld_residual + column, 0.0f, left);
#pragma unroll
            for (int i = 0; i < OUT; ++i) out[i] = r[i] + g[i] * activate<ACT>(acc[i] + b[i]);
        }
        if constexpr (SCALED_OUT) {
#pragma unroll
            for (int i = 0; i < OUT; ++i) out[i] *= inv;
        }
    }

    template <bool VECTORS>
    __device__ __forceinline__ void scale(float (&acc)[IN], const float (&unscaled)[IN], int row, int column) const {
        const int scale_row = kSabotage == Sabotage::neighbour_scale && row > 0 ? row - 1 : row;
        const float of_row = X_SCALE ? x_scale[static_cast<long long>(scale_row) * ld_x_scale] : 1.0f;
        float of_column[IN];
        if constexpr (ALPHA == Alpha::each) fetch<VECTORS>(of_column, alpha, column, 1.0f, accumulators - column);
#pragma unroll
        for (int i = 0; i < IN; ++i) {
            acc[i] = X_SCALE ? unscaled[i] * of_row : unscaled[i];
            if constexpr (ALPHA == Alpha::each) acc[i] *= of_column[i];
            if constexpr (ALPHA == Alpha::one) acc[i] *= alpha_one;
        }
    }

    // N elements from p + at, of which `left` exist; `absent` for the others, and where there is no operand.
    template <bool VECTORS, int N, typename T>
    __device__ __forceinline__ static void fetch(float (&out)[N], const T* p, long long at, float absent, int left) {
        if constexpr (VECTORS) {
            load_f32(out, p + at);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) out[i] = i < left ? to_f32(p[at + i]) : absent;
        }
    }
    template <bool VECTORS, int N>
    __device__ __forceinline__ static void fetch(float (&out)[N], const None*, long long, float absent, int) {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = absent;
    }
};

}  // namespace frtc
