// y = epilogue(x w^T), x and w in e4m3 with one power-of-two scale for 32 elements of K: block-scaled mma.sync m16n8k32
//
//   x  [M, K], w  [N, K] e4m3        x_scale  [M, K / 32], w_scale  [N, K / 32] e8m0: 2^(byte - 127), 255 is NaN
//   y  [M, N]; bias, gate, residual: epilogue.cuh
//   rows   null, or the number of rows of y that anything reads: tiles beyond it are left out
//   rows of x and w start at multiples of 16 bytes (base address and stride); K is a multiple of 32
//   grid   (ceil(M / BM), ceil(N / BN))                  block  32 threads for each WM x WN part of the tile
//   smem   as in smxx_gemm.cuh, whose tiles, fragments and stores this is: there an element is a pair of ours
//   compiles, not run: no such GPU was at hand. The instruction is the vendor's wrapper
//
// With lane l, g = l / 4 and t = l % 4, a fragment register holds four e4m3: a[0] (row g, k 4t..), a[1] (g + 8, 4t..),
// a[2] (g, 16 + 4t..), a[3] (g + 8, 16 + 4t..), b[0] (k 4t.., column g), b[1] (16 + 4t.., g): ldmatrix gives them as it
// gives pairs of 16-bit elements. The scale of row g comes from t = 0, of row g + 8 from t = 1, of column g from t = 0.
#pragma once

#include "smxx_gemm.cuh"

#include <cute/arch/mma_sm120.hpp>

namespace frtc::sm120 {

using Mma = cute::SM120::BLOCKSCALED::SM120_16x8x32_TN_VS<cute::float_e4m3_t, cute::float_e4m3_t, float, cute::float_ue8m0_t, 32>;

inline constexpr int BLOCK = 32;  // elements of K under one scale, and of K in one instruction

// The scales of this lane's rows (columns) for block `k` of K. Rows that do not exist take the last one's.
template <int COUNT, int STEP>
__device__ __forceinline__ void load_scales(u8 (&out)[COUNT], const u8* scales, int ld, int first, int rows, int k) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) out[i] = scales[static_cast<i64>(min(first + i * STEP, rows - 1)) * ld + k];
}

template <typename TILE>
__device__ __forceinline__ void multiply(float (&acc)[TILE::WM / 16][TILE::WN / 8][4], const Fragments<TILE>& f,
                                         const u8 (&sa)[TILE::WM / 16], const u8 (&sb)[TILE::WN / 8]) {
#pragma unroll
    for (int j = 0; j < TILE::WN / 8; ++j) {
#pragma unroll
        for (int i = 0; i < TILE::WM / 16; ++i) {
            float(&c)[4] = acc[i][j];
            const u32(&a)[4] = f.a[i];
            Mma::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1], c[0],
                     c[1], c[2], c[3], sa[i], sb[j]);
        }
    }
}

template <typename TILE, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(TILE::THREADS)
mxfp8_gemm(const u8* __restrict__ x, const u8* __restrict__ w, const int* __restrict__ rows, int M, int N, int K, int ldx,
           int ldw, i64, i64, const u8* __restrict__ x_scale, const u8* __restrict__ w_scale, int ld_x_scale, int ld_w_scale,
           ARGUMENTS... of_epilogue) {
    constexpr int STAGES = TILE::STAGES, STEPS = TILE::BK / 16;
    extern __shared__ __align__(128) u8 smem[];
    const u16* const x_pairs = reinterpret_cast<const u16*>(x);
    const u16* const w_pairs = reinterpret_cast<const u16*>(w);
    const u32 ring = shared_address(smem);
    const int m0 = blockIdx.x * TILE::BM, n0 = blockIdx.y * TILE::BN, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp % (TILE::BM / TILE::WM) * TILE::WM, warp_n = warp / (TILE::BM / TILE::WM) * TILE::WN;
    if (rows && m0 >= *rows - (kSabotage == Sabotage::row_tile ? TILE::BM : 0)) return;
    int k_tiles = (K / 2 + TILE::BK - 1) / TILE::BK;
    if constexpr (kSabotage == Sabotage::last_k_tile) --k_tiles;

    const auto copy = [&](int tile) {
        if (tile < k_tiles) {
            copy_tiles<false, TILE, false>(ring + tile % STAGES * TILE::STAGE_BYTES, x_pairs, w_pairs, ldx / 2, ldw / 2, M, N,
                                           K / 2, m0, n0, tile * TILE::BK);
        }
        cp_async_commit();
    };
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) copy(s);

    float acc[TILE::WM / 16][TILE::WN / 8][4] = {};
#pragma unroll 1
    for (int tile = 0; tile < k_tiles; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        copy(tile + STAGES - 1);  // into the slot that was read before the barrier
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Fragments<TILE> f;
            u8 sa[TILE::WM / 16], sb[TILE::WN / 8];
            const int block = min(tile * STEPS + step, K / BLOCK - 1);  // behind K the elements are zero
            load_scales<TILE::WM / 16, 16>(sa, x_scale, ld_x_scale, m0 + warp_m + lane / 4 + lane % 2 * 8, M, block);
            load_scales<TILE::WN / 8, 8>(sb, w_scale, ld_w_scale, n0 + warp_n + lane / 4, N, block);
            load_fragments<TILE, false>(f, ring + tile % STAGES * TILE::STAGE_BYTES, warp_m, warp_n, step);
            multiply<TILE>(acc, f, sa, sb);
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    const EPILOGUE epilogue(M, N, 0, of_epilogue...);
    store_rows<TILE>(acc, reinterpret_cast<float*>(smem), epilogue, m0 + warp_m, n0 + warp_n);
    epilogue.template finish<TILE::THREADS>(smem, m0);
}

}  // namespace frtc::sm120
