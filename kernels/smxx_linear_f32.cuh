// y = epilogue(x w^T) in fp32 on the ordinary units: for few outputs, for fp32 next to 16 bits, and for rows that the
// tensor-core kernels (smxx_gemm.cuh, smxx_tf32_gemm.cuh) cannot read
//
//   x  [M, K] rows of stride ldx          w  [N, K] rows of stride ldw          fp32, bf16 or fp16, any alignment
//   y  [M, N], or [M, N / 2] where gated; bias, gate, residual: epilogue.cuh; batch, rows as in smxx_gemm.cuh
//   x may be a value before its norm (row_factors.cuh), y the value before another one, with its moments (moments.cuh)
//
//   smxx_linear_f32   tiles, for many outputs. Sums over K in order, one fused multiply-add at a time
//     grid   (ceil(M / BM), ceil(N / 128), batch)    block  256 threads, each TM = BM / 16 rows by 8 columns
//     smem   two [16, BM + 128] tiles of fp32, k-major, static
//     moves  x and w from L2 for every tile; bound by shared memory: TM + 8 floats for 8 TM multiply-adds
//   smxx_dot_f32      one warp, or SHARES = 4 of them, for 8 columns of one row, for few outputs. Lanes take turns along K, and
//                     the sums of warps are added in their order. What the epilogue needs comes while the product is made
//     grid   (M, ceil(N * SHARES / 32), batch)       block  4 warps
#pragma once

#include "epilogue.cuh"
#include "numeric.cuh"
#include "ptx.cuh"

namespace frtc {

// One thread's share of a [ROWS, K_TILE] tile: loaded to registers while the tile before is multiplied.
template <int ROWS, int K_TILE, int THREADS>
struct TileShare {
    static constexpr int COUNT = ROWS * K_TILE / THREADS, STEP = THREADS / K_TILE;
    static_assert(ROWS % STEP == 0, "whole shares");
    float at[COUNT];

    template <typename T>
    __device__ __forceinline__ void load(const T* matrix, int ld, int row0, int rows, int k0, int K) {
        const int k = k0 + threadIdx.x % K_TILE;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int row = row0 + threadIdx.x / K_TILE + i * STEP;
            at[i] = row < rows && k < K ? to_f32(matrix[static_cast<i64>(row) * ld + k]) : 0.0f;
        }
    }

    // Transposes: tile[k][row], rows of STRIDE floats.
    template <int STRIDE>
    __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            tile[threadIdx.x % K_TILE * STRIDE + threadIdx.x / K_TILE + i * STEP] = at[i];
        }
    }
};

template <typename X, typename W, int BM, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(256, 1)
smxx_linear_f32(const X* x, const W* w, const int* rows, int M, int N, int K, int ldx, int ldw, i64 batch_x, i64 batch_w,
                ARGUMENTS... of_epilogue) {
    grid_wait(), grid_release();
    constexpr int K_TILE = 16, BN = 128, TM = BM / 16, TN = EPILOGUE::IN;
    // Four floats of padding keep the rows aligned and spread a warp's transposing stores over the banks.
    constexpr int A = BM + 4, B = BN + 4;
    __shared__ __align__(16) float tiles[2][K_TILE * (A + B)];
    x += blockIdx.z * batch_x, w += blockIdx.z * batch_w;

    const int m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;
    if (rows && m0 >= *rows) return;
    const int row0 = threadIdx.x / 16 * TM, column0 = threadIdx.x % 16 * TN;
    const int k_tiles = (K + K_TILE - 1) / K_TILE - (kSabotage == Sabotage::last_k_tile ? 1 : 0);
    TileShare<BM, K_TILE, 256> of_x;
    TileShare<BN, K_TILE, 256> of_w;
    float acc[TM][TN] = {};
    of_x.load(x, ldx, m0, M, 0, K), of_w.load(w, ldw, n0, N, 0, K);
    for (int tile = 0; tile < k_tiles; ++tile) {
        float* const a = tiles[tile % 2];
        float* const b = a + K_TILE * A;
        of_x.template store<A>(a), of_w.template store<B>(b);
        __syncthreads();  // the one barrier: the other tile is written only after every thread has passed here
        of_x.load(x, ldx, m0, M, (tile + 1) * K_TILE, K), of_w.load(w, ldw, n0, N, (tile + 1) * K_TILE, K);
#pragma unroll
        for (int k = 0; k < K_TILE; ++k) {
            float u[TM], v[TN];
            load_f32(u, a + k * A + row0);
            load_f32(v, b + k * B + column0);
#pragma unroll
            for (int i = 0; i < TM; ++i) {
#pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(u[i], v[j], acc[i][j]);
            }
        }
    }
    EPILOGUE epilogue(M, N, blockIdx.z, of_epilogue...);
    if constexpr (finds_factors<EPILOGUE>()) {
        if (threadIdx.x < 128) epilogue.factors.template find<BM>(m0, 0);
        epilogue.factors.origin = -m0;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) epilogue.store(m0 + row0 + i, n0 + column0, acc[i]);
}

// This lane's part of the products of one row of x with 8 rows of w, V neighbouring elements at a time; one of LANES lanes.
template <int V, int LANES, int COLUMNS, typename X, typename W>
__device__ __forceinline__ void dot(float (&acc)[COLUMNS], const X* x, const W* w, int ldw, int columns, int K) {
#pragma unroll 2
    for (int k = threadIdx.x % LANES * V; k < K; k += LANES * V) {
        float u[V];
        load_f32(u, x + k);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            float v[V];
            load_f32(v, w + static_cast<i64>(j < columns ? j : 0) * ldw + k);
#pragma unroll
            for (int i = 0; i < V; ++i) acc[j] = fmaf(u[i], v[i], acc[j]);
        }
    }
}

// The moments of a row, asked for before the product; nothing where the epilogue makes no factor of them.
template <typename EPILOGUE>
__device__ __forceinline__ auto moments_of(const EPILOGUE& epilogue, int row) {
    if constexpr (finds_factors<EPILOGUE>()) {
        return epilogue.factors.ask_row(row);
    } else {
        return None{};
    }
}

// Sums of the four warps of a block, for all threads: added up in their order or, APART, those of warp `lane % 4`.
template <bool APART, int COLUMNS>
__device__ __forceinline__ void exchange(float (&acc)[COLUMNS]) {
    __shared__ float sums[4][COLUMNS];
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) sums[threadIdx.x / 32][j] = acc[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        acc[j] = sums[APART ? threadIdx.x % 4 : 0][j];
#pragma unroll
        for (int warp = 1; warp < (APART ? 1 : 4); ++warp) acc[j] += sums[warp][j];
    }
}

template <typename X, typename W, int SHARES, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(128, 4)
smxx_dot_f32(const X* x, const W* w, const int* rows, int M, int N, int K, int ldx, int ldw, i64 batch_x, i64 batch_w,
             ARGUMENTS... of_epilogue) {
    grid_wait(), grid_release();
    constexpr bool TOGETHER = stores_together<EPILOGUE>(), WHOLE = EPILOGUE::WHOLE;
    static_assert(SHARES == 1 || (SHARES == 4 && !TOGETHER), "warps that meet are a whole block");
    constexpr int COLUMNS = EPILOGUE::IN, V = 4, LANES = 32 * SHARES;
    x += blockIdx.z * batch_x, w += blockIdx.z * batch_w;

    const int row = blockIdx.x, first = blockIdx.y * (4 / SHARES) * COLUMNS, column = first + threadIdx.x / LANES * COLUMNS;
    if ((column >= N && !TOGETHER) || (rows && row >= *rows)) return;
    const int length = K - (kSabotage == Sabotage::last_k_tile ? 1 : 0);
    // Where 32 columns are stored at once, the first four lanes of the block do it, and warps beyond the edge come along.
    const int stored = !TOGETHER ? column : threadIdx.x < 4 ? first + threadIdx.x * COLUMNS : N;
    EPILOGUE epilogue(M, N, blockIdx.z, of_epilogue...);
    const auto moments = moments_of(epilogue, row);
    const auto of_columns = epilogue.template columns_at<WHOLE>(stored);
    const auto of_row = epilogue.template row_at<WHOLE>(row, stored);
    const int inside = TOGETHER ? min(column, N - COLUMNS) : column;
    x += static_cast<i64>(row) * ldx, w += static_cast<i64>(inside) * ldw;
    float acc[COLUMNS] = {};
    if (length % V == 0 && vectors_ok<V>(x, ldx) && vectors_ok<V>(w, ldw)) {
        dot<V, LANES>(acc, x, w, ldw, N - inside, length);
    } else {
        dot<1, LANES>(acc, x, w, ldw, N - inside, length);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) acc[j] = warp_sum(acc[j]);
    if constexpr (SHARES > 1 || TOGETHER) exchange<TOGETHER>(acc);
    if constexpr (finds_factors<EPILOGUE>()) epilogue.factors.settle_row(moments, row);
    if (TOGETHER ? threadIdx.x < 32 : threadIdx.x % LANES == 0) {
        epilogue.template store<WHOLE>(row, stored, acc, of_columns, of_row);
    }
}

}  // namespace frtc
