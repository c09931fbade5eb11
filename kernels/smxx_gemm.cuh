// y = epilogue(x w^T) on the tensor cores of every target: mma.sync, cp.async ring, ldmatrix
//
//   x  [M, K] rows of stride ldx          w  [N, K] rows of stride ldw, or [K, N] where K_ROWS
//   X, W   bf16 or fp16 both, or e4m3 both (m16n8k32), or X of 16 bits and W e4m3, which is widened to X on its way from
//          shared memory into fragments (exactly; a NaN in w becomes 480). K_ROWS: 16 bits both
//   the epilogue's operands are the kernel's last parameters, a pack: epilogue.cuh
//   rows of x and w start at multiples of 16 bytes (base address and stride); nothing beyond K (N) of a row is used
//   rows   null, or the number of rows of y (of each batch) that anything reads: tiles beyond it are neither computed nor
//          written, and the rows of the last tile beyond it may hold anything
//   batch  x, w and the epilogue's operands may have one more axis, with its own strides (0: the same for all)
//   grid   (ceil(M / BM), ceil(N / BN), splits or batch)      block  32 threads for each WM x WN part of the tile
//   smem   STAGES * STAGE_BYTES: the ring; after the product, 16 rows of accumulators for each warp
//   moves  every w element once from DRAM (neighbouring blocks share a column of tiles through L2), x from L2
//   SPLIT_K: block z takes the z-th share of the K tiles and leaves fp32 accumulators in `partial`
//          [tile, z, accumulator / 4, thread, 4]; the block that arrives last adds them in the order of z, so results
//          never depend on timing. `arrived` holds one counter for each tile: zero before, zero after.
//
// BK and the widths of tiles count cells of 16 bits: one bf16, or two e4m3, whose fragments have the same bytes. A tile
// of w next to an x of 16 bits (W8) has BK elements too, in BK / 2 cells.
// In shared memory a tile is stored in panels of 64 cells: a row is 128 bytes = 8 chunks of 16, and chunk c of row r
// lies at place c ^ (r % 8). Eight rows of one chunk (an ldmatrix phase) and eight chunks of one row (a cp.async phase)
// both touch all 32 banks once. With 32 cells a row is 64 bytes and chunk c lies at c ^ (r / 2 % 4): the same property.
#pragma once

#include "epilogue.cuh"
#include "numeric.cuh"
#include "ptx.cuh"

namespace frtc {

template <int BM_, int BN_, int BK_, int WM_, int WN_, int STAGES_, bool W8_ = false>
struct Tile {
    static constexpr bool W8 = W8_;
    static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * (BM / WM) * (BN / WN);
    static constexpr int BKW = W8 ? BK / 2 : BK;  // cells of a row of w
    static constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BKW * 2, STAGE_BYTES = A_BYTES + B_BYTES;
    static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && WN % 16 == 0, "whole fragments");
    static_assert((BK == 32 || BK % 64 == 0) && (BKW == 32 || BKW % 64 == 0), "whole panels");
    static_assert(STAGES >= 2, "one stage is read while another is written");
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of ROWS rows of WIDTH cells.
template <int ROWS, int WIDTH>
__device__ __forceinline__ u32 chunk_offset(int row, int chunk) {
    if constexpr (WIDTH == 32) {
        return row * 64 + ((chunk ^ (row / 2)) & 3) * 16;
    } else {
        return (chunk / 8) * (ROWS * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
    }
}

// Starts the copy of the tile of ROWS rows of WIDTH cells at (row0, column0) of a matrix with row stride ld; zero beyond its
// edges. Columns and strides count elements.
// WHOLE: no row of the tile ends inside it. A size that is 0 or 16 costs a predicate, any other size five instructions.
template <bool WHOLE, int ROWS, int WIDTH, int THREADS, typename T>
__device__ __forceinline__ void copy_tile(u32 to, const T* matrix, int ld, int row0, int rows, int column0, int columns) {
    constexpr int CHUNKS = WIDTH / 8, STEP = THREADS / CHUNKS, SIZE = sizeof(T), VEC = 16 / SIZE;
    static_assert(THREADS % CHUNKS == 0, "a thread keeps its column");
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    const int bytes = WHOLE ? 16 : min(max((columns - column0 - chunk * VEC) * SIZE, 0), 16);
    const T* from = matrix + static_cast<i64>(row0 + first) * ld + column0 + chunk * VEC;
#pragma unroll(WHOLE ? ROWS : 1)
    for (int r = 0; r < ROWS; r += STEP) {
        if (ROWS % STEP == 0 || first + r < ROWS) {
            cp_async_16(to + chunk_offset<ROWS, WIDTH>(first + r, chunk), from, row0 + first + r < rows ? bytes : 0);
        }
        from += static_cast<i64>(STEP) * ld;
    }
}

template <bool WHOLE, typename TILE, bool K_ROWS, typename X, typename W>
__device__ __forceinline__ void copy_tiles(u32 to, const X* x, const W* w, int ldx, int ldw, int M, int N, int K, int m0,
                                           int n0, int k) {
    copy_tile<WHOLE, TILE::BM, TILE::BK, TILE::THREADS>(to, x, ldx, m0, M, k, K);
    if constexpr (K_ROWS) {
        copy_tile<WHOLE, TILE::BK, TILE::BN, TILE::THREADS>(to + TILE::A_BYTES, w, ldw, k, K, n0, N);
    } else {
        copy_tile<WHOLE, TILE::BN, TILE::BKW, TILE::THREADS>(to + TILE::A_BYTES, w, ldw, n0, N, k, K);
    }
}

// The fragments of one k-step of 16 cells of x for a warp: WM rows of x, WN columns of the product.
template <typename TILE>
struct Fragments {
    u32 a[TILE::WM / 16][4];
    u32 b[TILE::WN / 16][4];  // two n8 blocks: (cells 0-7, cells 8-15) of the first, then of the second; W8: not yet widened
};

template <typename TILE, bool K_ROWS>
__device__ __forceinline__ void load_fragments(Fragments<TILE>& f, u32 stage, int warp_m, int warp_n, int step) {
    const int lane = threadIdx.x % 32;
    const u32 b = stage + TILE::A_BYTES;
#pragma unroll
    for (int i = 0; i < TILE::WM / 16; ++i) {
        const int row = warp_m + i * 16 + lane % 16;
        ldmatrix_x4(f.a[i], stage + chunk_offset<TILE::BM, TILE::BK>(row, step * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < TILE::WN / 16; ++j) {
        const int column = warp_n + j * 16;
        if constexpr (K_ROWS) {
            const int row = step * 16 + lane % 16;
            ldmatrix_x4_trans(f.b[j], b + chunk_offset<TILE::BK, TILE::BN>(row, column / 8 + lane / 16));
        } else if constexpr (TILE::W8) {
            // A step is one chunk. Eight rows of one chunk lie in different banks, so these loads have no conflicts.
#pragma unroll
            for (int n8 = 0; n8 < 2; ++n8) {
                const u32 at = b + chunk_offset<TILE::BN, TILE::BKW>(column + n8 * 8 + lane / 4, step) + lane % 4 * 2;
                f.b[j][n8 * 2] = load_shared_16(at), f.b[j][n8 * 2 + 1] = load_shared_16(at + 8);
            }
        } else {
            const int row = column + lane % 8 + lane / 16 * 8;
            ldmatrix_x4(f.b[j], b + chunk_offset<TILE::BN, TILE::BK>(row, step * 2 + lane / 8 % 2));
        }
    }
}

template <typename TILE>
using Accumulators = float[TILE::WM / 16][TILE::WN / 8][4];

// Products of e4m3 without tensor cores for them: the first (last) two elements of every register as fp16. Which k they are
// does not matter, as long as it is the same one in x and w.
template <int HALF, typename TILE>
__device__ __forceinline__ void multiply_as_f16(Accumulators<TILE>& acc, const Fragments<TILE>& f) {
    const auto widen = [](u32 four) { return e4m3_as_f16(static_cast<u16>(four >> (16 * HALF))); };
    u32 a[TILE::WM / 16][4];
#pragma unroll
    for (int i = 0; i < TILE::WM / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[i][r] = widen(f.a[i][r]);
    }
#pragma unroll
    for (int j = 0; j < TILE::WN / 8; ++j) {
        const u32 b0 = widen(f.b[j / 2][j % 2 * 2]), b1 = widen(f.b[j / 2][j % 2 * 2 + 1]);
#pragma unroll
        for (int i = 0; i < TILE::WM / 16; ++i) mma_m16n8k16<f16>(acc[i][j], a[i], b0, b1);
    }
}

template <typename X, typename TILE>
__device__ __forceinline__ void multiply(Accumulators<TILE>& acc, const Fragments<TILE>& f) {
    if constexpr (sizeof(X) == 1 && !kNativeE4m3) {
        multiply_as_f16<0, TILE>(acc, f);
        multiply_as_f16<1, TILE>(acc, f);
        return;
    }
#pragma unroll
    for (int j = 0; j < TILE::WN / 8; ++j) {
        u32 b0 = f.b[j / 2][j % 2 * 2], b1 = f.b[j / 2][j % 2 * 2 + 1];
        if constexpr (TILE::W8) b0 = widen2<X>(b0), b1 = widen2<X>(b1);
#pragma unroll
        for (int i = 0; i < TILE::WM / 16; ++i) {
            if constexpr (sizeof(X) == 1 && kNativeE4m3) {
                mma_m16n8k32_e4m3(acc[i][j], f.a[i], b0, b1);
            } else if constexpr (sizeof(X) == 2) {
                mma_m16n8k16<X>(acc[i][j], f.a[i], b0, b1);
            }
        }
    }
}

// Elements of K in a tile.
template <typename X, typename TILE>
inline constexpr int kTileK = TILE::BK * 2 / static_cast<int>(sizeof(X));

// acc = the warp's part of x w^T over k_tiles tiles. Tiles are copied STAGES - 1 ahead; a slot is refilled after the barrier
// that follows the last read of its fragments. Fragments are loaded one step ahead of the products where registers allow.
template <typename TILE, bool K_ROWS, typename X, typename W>
__device__ __forceinline__ void mainloop(Accumulators<TILE>& acc, u32 ring, const X* x, const W* w, int ldx, int ldw, int M,
                                         int N, int K, int m0, int n0, int k_tiles, int warp_m, int warp_n) {
    constexpr int STAGES = TILE::STAGES, STEPS = TILE::BK / 16, TILE_K = kTileK<X, TILE>;
    constexpr bool WIDENS = TILE::W8 || (sizeof(X) == 1 && !kNativeE4m3);
    constexpr bool AHEAD = !WIDENS || TILE::WM * TILE::WN < (TILE::W8 ? 32 * 64 : 48 * 64);
    const auto copy = [&](int tile, int slot) {
        const u32 to = ring + slot * TILE::STAGE_BYTES;
        const int k = tile * TILE_K;
        if (tile < k_tiles) {
            if (k + TILE_K <= K && (!K_ROWS || n0 + TILE::BN <= N)) {
                copy_tiles<true, TILE, K_ROWS>(to, x, w, ldx, ldw, M, N, K, m0, n0, k);
            } else {
                copy_tiles<false, TILE, K_ROWS>(to, x, w, ldx, ldw, M, N, K, m0, n0, k);
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

    Fragments<TILE> fragments[AHEAD ? 2 : 1];
    if constexpr (AHEAD) {
        arrived();
        load_fragments<TILE, K_ROWS>(fragments[0], ring, warp_m, warp_n, 0);
    }
    int read = 0, write = STAGES - 1;
    for (int tile = 0; tile < k_tiles; ++tile) {
        if constexpr (!AHEAD) arrived();
        const u32 stage = ring + read * TILE::STAGE_BYTES;
        copy(tile + STAGES - 1, write);
        read = read + 1 == STAGES ? 0 : read + 1;
        write = write + 1 == STAGES ? 0 : write + 1;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if constexpr (!AHEAD) {
                load_fragments<TILE, K_ROWS>(fragments[0], stage, warp_m, warp_n, step);
            } else if (step + 1 < STEPS) {
                load_fragments<TILE, K_ROWS>(fragments[(step + 1) % 2], stage, warp_m, warp_n, step + 1);
            } else {
                arrived();
                load_fragments<TILE, K_ROWS>(fragments[0], ring + read * TILE::STAGE_BYTES, warp_m, warp_n, 0);
            }
            multiply<X, TILE>(acc, fragments[AHEAD ? step % 2 : 0]);
        }
    }
    cp_async_wait<0>();
    __syncthreads();
}

// Leaves this block's accumulators in `partial`. True in the block that arrived last, which then holds the sum.
template <typename TILE>
__device__ __forceinline__ bool reduce_splits(Accumulators<TILE>& acc, float* partial, u32* arrived) {
    constexpr int QUADS = (TILE::WM / 16) * (TILE::WN / 8);
    const int tile = blockIdx.x + gridDim.x * blockIdx.y;
    const int splits = gridDim.z;
    float4* const first = reinterpret_cast<float4*>(partial) + static_cast<i64>(tile) * splits * QUADS * TILE::THREADS + threadIdx.x;
    float(&quads)[QUADS][4] = reinterpret_cast<float(&)[QUADS][4]>(acc);
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        const float4 v = make_float4(quads[q][0], quads[q][1], quads[q][2], quads[q][3]);
        __stcg(first + (blockIdx.z * QUADS + q) * TILE::THREADS, v);
    }
    __syncthreads();
    const bool last = __syncthreads_or(threadIdx.x == 0 && atomic_add_acq_rel(arrived + tile, 1) + 1 == splits);
    if (!last) return false;
    if (threadIdx.x == 0) arrived[tile] = 0;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) quads[q][0] = quads[q][1] = quads[q][2] = quads[q][3] = 0.0f;
#pragma unroll 1
    for (int z = 0; z < splits; ++z) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const float4 v = __ldcg(first + (z * QUADS + q) * TILE::THREADS);
            quads[q][0] += v.x, quads[q][1] += v.y, quads[q][2] += v.z, quads[q][3] += v.w;
        }
    }
    return true;
}

// Turns fragments into rows through shared memory, 16 rows of a warp at a time, so that 16-byte accesses of
// neighbouring lanes fill whole lines. Row stride WN + 8 floats: eight lanes of a store phase touch 32 banks.
template <typename TILE, typename EPILOGUE>
__device__ __forceinline__ void store_rows(const Accumulators<TILE>& acc, float* smem, const EPILOGUE& epilogue, int row0,
                                           int column0) {
    constexpr int STRIDE = TILE::WN + 8, LANES = TILE::WN / 8, ROWS = 32 / LANES;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const slab = smem + threadIdx.x / 32 * (16 * STRIDE);
#pragma unroll
    for (int i = 0; i < TILE::WM / 16; ++i) {
        if (i > 0) __syncwarp();
#pragma unroll
        for (int j = 0; j < TILE::WN / 8; ++j) {
            const float(&c)[4] = acc[i][j];
            *reinterpret_cast<float2*>(slab + g * STRIDE + j * 8 + t * 2) = make_float2(c[0], c[1]);
            *reinterpret_cast<float2*>(slab + (g + 8) * STRIDE + j * 8 + t * 2) = make_float2(c[2], c[3]);
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 16; r += ROWS) {
            const int row = r + lane / LANES, column = lane % LANES * 8;
            float v[8];
            load_f32(v, slab + row * STRIDE + column);
            epilogue.store(row0 + i * 16 + row, column0 + column, v);
        }
    }
}

// Of large warps two blocks share an SM at most; ptxas would spill so that the registers of a third one fit, too.
template <typename TILE, typename EPILOGUE>
constexpr int least_blocks_of() {
    return TILE::WM * TILE::WN >= 48 * 64 ? 1 : least_blocks<EPILOGUE>();
}

template <typename X, typename W, typename TILE, typename EPILOGUE, bool SPLIT_K, bool K_ROWS, typename... ARGUMENTS>
__global__ void __launch_bounds__(TILE::THREADS, least_blocks_of<TILE, EPILOGUE>())
smxx_gemm(const X* __restrict__ x, const W* __restrict__ w, const int* rows, int M, int N, int K, int ldx,
          int ldw, i64 batch_x, i64 batch_w, float* partial, u32* arrived, ARGUMENTS... of_epilogue) {
    grid_wait(), grid_release();
    static_assert(TILE::W8 == (sizeof(W) < sizeof(X)) && (!K_ROWS || sizeof(W) == 2), "tiles suit the types");
    extern __shared__ __align__(128) u8 smem[];
    const int m0 = blockIdx.x * TILE::BM, n0 = blockIdx.y * TILE::BN;
    // Every block of a row of tiles leaves here, so that its counters stay zero.
    if (rows && m0 >= *rows - (kSabotage == Sabotage::row_tile ? TILE::BM : 0)) return;
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % (TILE::BM / TILE::WM) * TILE::WM, warp_n = warp / (TILE::BM / TILE::WM) * TILE::WN;

    constexpr int TILE_K = kTileK<X, TILE>;
    int k_tiles = (K + TILE_K - 1) / TILE_K;
    if constexpr (SPLIT_K) {
        static_assert(!K_ROWS, "w is advanced along its rows");
        const int share = (k_tiles + gridDim.z - 1) / gridDim.z, first = blockIdx.z * share;
        k_tiles = min(share, k_tiles - first);
        x += first * TILE_K, w += first * TILE_K, K -= first * TILE_K;
    } else {
        x += blockIdx.z * batch_x, w += blockIdx.z * batch_w;
    }
    if constexpr (kSabotage == Sabotage::last_k_tile) --k_tiles;

    Accumulators<TILE> acc = {};
    mainloop<TILE, K_ROWS>(acc, shared_address(smem), x, w, ldx, ldw, M, N, K, m0, n0, k_tiles, warp_m, warp_n);
    if constexpr (SPLIT_K) {
        if (!reduce_splits<TILE>(acc, partial, arrived)) return;
    }
    const EPILOGUE epilogue(M, N, SPLIT_K ? 0 : blockIdx.z, of_epilogue...);
    store_rows<TILE>(acc, reinterpret_cast<float*>(smem), epilogue, m0 + warp_m, n0 + warp_n);
    epilogue.template finish<TILE::THREADS>(smem, m0);
}

}  // namespace frtc
