// y = epilogue(x w^T) of fp32 operands on the tensor cores of every target: three TF32 products for one of fp32
//
//   x  [M, K] rows of stride ldx          w  [N, K] rows of stride ldw          fp32, rows at multiples of 16 bytes
//   rows, batch, grid, smem, SPLIT_K, partial, arrived, the epilogue's operands: as in smxx_gemm.cuh, whose ring this is
//
//   x = high + low, two TF32 numbers;  x w ~ low high + high low + high high, summed in fp32: what is lost of a product is 3e-7
//   of it, towards zero. Infinities may become NaN.
//   Tensor cores cut off what an accumulator cannot hold, always towards zero: over K = 588 a sum loses 5e-6, over 4096 3e-5.
//   So each K tile of 32 elements has accumulators of its own, which fp32 units add up with rounding: the whole error stays
//   1e-7 to 6e-7 measured on an H200 (fp32 in order: 1e-7 to 4e-7).
//   Order in a K tile: low high, high low and high high of 8 elements after the other into one accumulator; or, in warps of one
//   or two fragments, each of the three into its own, and then (low high + high low) + high high, rounded: less is cut off.
//
//   moves  x for every column of tiles and w for every row of tiles, from L2; bound by the products where both are large
//
// A row of a tile in shared memory is 32 elements: the 64 cells of smxx_gemm.cuh, in the same places. ldmatrix deals 16
// bytes to four lanes, one element to each: the fragments of m16n8k8 of TF32 are those of m16n8k16 of 16 bits byte by byte.
#pragma once

#include "smxx_gemm.cuh"

namespace frtc {

template <int BM_, int BN_, int WM_, int WN_, int STAGES_>
struct F32Tile {
    static constexpr int BM = BM_, BN = BN_, BK = 64, BKW = BK, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * (BM / WM) * (BN / WN);
    static constexpr int A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BN * BK * 2;
    static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && WN % 8 == 0, "whole fragments");
    static_assert(STAGES >= 2, "one stage is read while another is written");
};

// A thread's share of the copies of a tile: 16 bytes of every STEP-th row, of x and then of w, at one place of these rows. Zero
// beyond the edges.
template <typename TILE>
struct F32Copies {
    static constexpr int VEC = 4, STEP = TILE::THREADS / 8, ROWS = TILE::BM + TILE::BN, COUNT = (ROWS + STEP - 1) / STEP;
    static_assert(STEP % 8 == 0, "a thread keeps its place");
    const float* from[COUNT];
    bool there[COUNT];
    u32 to;
    int left;  // elements of a row from this place on

    __device__ __forceinline__ F32Copies(const float* x, const float* w, int ldx, int ldw, int M, int N, int K, int m0, int n0) {
        const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
        to = chunk_offset<ROWS, TILE::BK>(first, chunk), left = K - chunk * VEC;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int place = first + i * STEP;
            const bool of_x = place < TILE::BM;
            const int row = of_x ? m0 + place : n0 + place - TILE::BM, rows = of_x ? M : N;
            there[i] = row < rows && place < ROWS;
            from[i] = (of_x ? x : w) + static_cast<i64>(min(row, rows - 1)) * (of_x ? ldx : ldw) + chunk * VEC;
        }
    }

    // Starts the copies of the next tile. WHOLE: no row ends inside it. A size that is 0 or 16 costs a predicate, any other one
    // five instructions.
    template <bool WHOLE>
    __device__ __forceinline__ void start(u32 stage) {
        const int bytes = WHOLE ? 16 : min(max(left * 4, 0), 16);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (ROWS % STEP == 0 || i + 1 < COUNT || threadIdx.x / 8 + i * STEP < ROWS) {
                cp_async_16(stage + to + i * (STEP * 128), from[i], there[i] ? bytes : 0);
            }
            from[i] += kTileK<float, TILE>;
        }
        left -= kTileK<float, TILE>;
    }
};

// The fragments of 8 elements of K for a warp.
template <typename TILE>
struct F32Fragments {
    u32 a[TILE::WM / 16][4];
    u32 b[TILE::WN / 8][2];
};

// Where a lane finds its first fragments in a stage. The others of a step are whole groups of 8 rows away, and those of another
// step in chunks 2 * step further: bits of the address that nothing else touches.
struct F32Places {
    u32 a, b, b_last;  // of two groups of columns, of a last one alone

    template <typename TILE>
    __device__ __forceinline__ static F32Places of(int warp_m, int warp_n) {
        const int lane = threadIdx.x % 32, row_b = warp_n + lane % 8;
        const u32 b = TILE::A_BYTES + chunk_offset<TILE::BN, TILE::BK>(row_b, lane / 8 % 2);
        return {chunk_offset<TILE::BM, TILE::BK>(warp_m + lane % 16, lane / 16), b + lane / 16 * 1024, b};
    }
};

template <typename TILE>
__device__ __forceinline__ void load_fragments(F32Fragments<TILE>& f, u32 stage, const F32Places& places, int step) {
    constexpr int GROUP = 8 * 128, J = TILE::WN / 8;  // bytes of 8 rows
    const u32 a = (stage + places.a) ^ (step * 32), b = (stage + places.b) ^ (step * 32);
#pragma unroll
    for (int i = 0; i < TILE::WM / 16; ++i) ldmatrix_x4(f.a[i], a + i * 2 * GROUP);
#pragma unroll
    for (int j = 0; j + 1 < J; j += 2) {
        u32 two[4];
        ldmatrix_x4(two, b + j * GROUP);
        f.b[j][0] = two[0], f.b[j][1] = two[1], f.b[j + 1][0] = two[2], f.b[j + 1][1] = two[3];
    }
    if constexpr (J % 2 == 1) ldmatrix_x2(f.b[J - 1], ((stage + places.b_last) ^ (step * 32)) + (J - 1) * GROUP);
}

// Products ignore the 13 bits behind a TF32 number. So `high` is cut off, the difference is exact, and the tensor cores cut it
// in their turn: two instructions, where cvt.rna.tf32 of both parts takes seven.
template <int COUNT>
__device__ __forceinline__ void split(const u32 (&x)[COUNT], u32 (&high)[COUNT], u32 (&low)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        high[i] = x[i] & 0xffffe000u;
        low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high[i]));
    }
}

// c += a b for one m16n8k8 tile of TF32.
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Accumulators that a K tile has for each fragment. A product starts 24 clocks behind the one before it in the same sum (sm_90a),
// others 6: warps of one or two fragments would wait, so each of the three products has a sum of its own there. Of three, 24 more
// registers would leave one block of 64 x 72 on an SM where two fit.
template <typename TILE>
constexpr int kSums = (TILE::WM / 16) * (TILE::WN / 8) <= 2 ? 3 : 1;

// sums += the three products, smallest first.
template <typename TILE>
__device__ __forceinline__ void multiply(Accumulators<TILE> (&sums)[kSums<TILE>], const F32Fragments<TILE>& f) {
    constexpr int I = TILE::WM / 16, J = TILE::WN / 8;
    F32Fragments<TILE> high, low;
#pragma unroll
    for (int i = 0; i < I; ++i) split(f.a[i], high.a[i], low.a[i]);
#pragma unroll
    for (int j = 0; j < J; ++j) split(f.b[j], high.b[j], low.b[j]);
    const auto add = [&](int product, const F32Fragments<TILE>& a, const F32Fragments<TILE>& b) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
#pragma unroll
            for (int i = 0; i < I; ++i) mma_m16n8k8(sums[product % kSums<TILE>][i][j], a.a[i], b.b[j]);
        }
    };
    add(0, low, high), add(1, high, low), add(2, high, high);
}

// acc = the warp's part of x w^T over k_tiles tiles, copied STAGES - 1 ahead as in smxx_gemm.cuh.
template <typename TILE>
__device__ __forceinline__ void mainloop(Accumulators<TILE>& acc, u32 ring, F32Copies<TILE> copies, const F32Places& places,
                                         int K, int k_tiles) {
    constexpr int STAGES = TILE::STAGES, TILE_K = kTileK<float, TILE>, STEPS = TILE_K / 8;
    const auto copy = [&](int tile, int slot) {
        if (tile < k_tiles) {
            if ((tile + 1) * TILE_K <= K) {
                copies.template start<true>(ring + slot * TILE::STAGE_BYTES);
            } else {
                copies.template start<false>(ring + slot * TILE::STAGE_BYTES);
            }
        }
        cp_async_commit();
    };
    const auto arrived = [] {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
    };
#pragma unroll 1  // small code starts sooner: every launch fetches it anew
    for (int s = 0; s < STAGES - 1; ++s) copy(s, s);

    F32Fragments<TILE> fragments[2];
    arrived();
    load_fragments<TILE>(fragments[0], ring, places, 0);
    int read = 0, write = STAGES - 1;
#pragma unroll 1
    for (int tile = 0; tile < k_tiles; ++tile) {
        const u32 stage = ring + read * TILE::STAGE_BYTES;
        copy(tile + STAGES - 1, write);
        read = read + 1 == STAGES ? 0 : read + 1;
        write = write + 1 == STAGES ? 0 : write + 1;
        Accumulators<TILE> sums[kSums<TILE>] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step + 1 < STEPS) {
                load_fragments<TILE>(fragments[(step + 1) % 2], stage, places, step + 1);
            } else {
                arrived();
                load_fragments<TILE>(fragments[0], ring + read * TILE::STAGE_BYTES, places, 0);
            }
            multiply<TILE>(sums, fragments[step % 2]);
        }
#pragma unroll
        for (int i = 0; i < TILE::WM / 16; ++i) {
#pragma unroll
            for (int j = 0; j < TILE::WN / 8; ++j) {
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    float of_tile = sums[0][i][j][r];
#pragma unroll
                    for (int product = 1; product < kSums<TILE>; ++product) of_tile += sums[product][i][j][r];
                    acc[i][j][r] += of_tile;
                }
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();
}

// Turns fragments into rows as smxx_gemm.cuh does, for any number of groups of 8 columns. An odd multiple of 8 floats from row
// to row: eight lanes of a store phase touch 32 banks.
template <typename TILE, typename EPILOGUE>
__device__ __forceinline__ void store_groups(const Accumulators<TILE>& acc, float* smem, const EPILOGUE& epilogue, int row0,
                                             int column0) {
    constexpr int GROUPS = TILE::WN / 8, STRIDE = (GROUPS + 1 - GROUPS % 2) * 8;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const slab = smem + threadIdx.x / 32 * (16 * STRIDE);
#pragma unroll
    for (int i = 0; i < TILE::WM / 16; ++i) {
        if (i > 0) __syncwarp();
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const float(&c)[4] = acc[i][j];
            *reinterpret_cast<float2*>(slab + g * STRIDE + j * 8 + t * 2) = make_float2(c[0], c[1]);
            *reinterpret_cast<float2*>(slab + (g + 8) * STRIDE + j * 8 + t * 2) = make_float2(c[2], c[3]);
        }
        __syncwarp();
#pragma unroll
        for (int at = 0; at < 16 * GROUPS; at += 32) {
            const int row = (at + lane) / GROUPS, column = (at + lane) % GROUPS * 8;
            if (16 * GROUPS % 32 != 0 && row >= 16) break;
            float v[8];
            load_f32(v, slab + row * STRIDE + column);
            epilogue.store(row0 + i * 16 + row, column0 + column, v);
        }
    }
}

// The same for all rows of the block's tile, so that four neighbouring lanes have 32 columns of a row, of as many warps as made
// them. All threads come, behind a barrier.
template <typename TILE, typename EPILOGUE>
__device__ __forceinline__ void store_together(const Accumulators<TILE>& acc, float* smem, const EPILOGUE& epilogue, int m0,
                                               int n0, int warp_m, int warp_n) {
    constexpr int GROUPS = TILE::BN / 8, STRIDE = TILE::BN + 8;
    static_assert(TILE::BN % 32 == 0 && TILE::BM * STRIDE * 4 <= TILE::STAGES * TILE::STAGE_BYTES, "in place of the ring");
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const slab = smem + (warp_m + g) * STRIDE + warp_n + t * 2;
#pragma unroll
    for (int i = 0; i < TILE::WM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < TILE::WN / 8; ++j) {
            const float(&c)[4] = acc[i][j];
            *reinterpret_cast<float2*>(slab + i * 16 * STRIDE + j * 8) = make_float2(c[0], c[1]);
            *reinterpret_cast<float2*>(slab + (i * 16 + 8) * STRIDE + j * 8) = make_float2(c[2], c[3]);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < TILE::BM * GROUPS; at += TILE::THREADS) {
        const int row = at / GROUPS, column = at % GROUPS * 8;
        float v[8];
        load_f32(v, smem + row * STRIDE + column);
        epilogue.store(m0 + row, n0 + column, v);
    }
}

template <typename TILE, typename EPILOGUE, bool SPLIT_K, typename... ARGUMENTS>
__global__ void __launch_bounds__(TILE::THREADS, least_blocks<EPILOGUE>())
smxx_tf32_gemm(const float* __restrict__ x, const float* __restrict__ w, const int* rows, int M, int N, int K, int ldx, int ldw,
               i64 batch_x, i64 batch_w, float* partial, u32* arrived, ARGUMENTS... of_epilogue) {
    grid_wait(), grid_release();
    extern __shared__ __align__(128) u8 smem[];
    const int m0 = blockIdx.x * TILE::BM, n0 = blockIdx.y * TILE::BN;
    if (rows && m0 >= *rows - (kSabotage == Sabotage::row_tile ? TILE::BM : 0)) return;
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % (TILE::BM / TILE::WM) * TILE::WM, warp_n = warp / (TILE::BM / TILE::WM) * TILE::WN;

    constexpr int TILE_K = kTileK<float, TILE>;
    int k_tiles = (K + TILE_K - 1) / TILE_K;
    if constexpr (SPLIT_K) {
        const int share = (k_tiles + gridDim.z - 1) / gridDim.z, first = blockIdx.z * share;
        k_tiles = min(share, k_tiles - first);
        x += first * TILE_K, w += first * TILE_K, K -= first * TILE_K;
    } else {
        x += blockIdx.z * batch_x, w += blockIdx.z * batch_w;
    }
    if constexpr (kSabotage == Sabotage::last_k_tile) --k_tiles;

    Accumulators<TILE> acc = {};
    mainloop<TILE>(acc, shared_address(smem), F32Copies<TILE>(x, w, ldx, ldw, M, N, K, m0, n0),
                   F32Places::of<TILE>(warp_m, warp_n), K, k_tiles);
    if constexpr (SPLIT_K) {
        if (!reduce_splits<TILE>(acc, partial, arrived)) return;
    }
    const EPILOGUE epilogue(M, N, SPLIT_K ? 0 : blockIdx.z, of_epilogue...);
    if constexpr (stores_together<EPILOGUE>()) {
        store_together<TILE>(acc, reinterpret_cast<float*>(smem), epilogue, m0, n0, warp_m, warp_n);
    } else {
        store_groups<TILE>(acc, reinterpret_cast<float*>(smem), epilogue, m0 + warp_m, n0 + warp_n);
    }
    epilogue.template finish<TILE::THREADS>(smem, m0);
}

}  // namespace frtc
