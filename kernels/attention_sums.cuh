// Adding the partial sums of an attention: those of a block's warps, and those of several blocks that split the keys.
//
// A partial sum of a row is (sum of exp2(score - maximum) * value, maximum, weight = sum of exp2(score - maximum)), in
// fp32. Its share in the total is exp2(maximum - largest maximum), divided by the total's weight where a mean is asked
// for. Additions have a fixed order: equal inputs, equal bits. Tile is AttentionTile of smxx_attention.cuh.
#pragma once

#include "numeric.cuh"
#include "ptx.cuh"

namespace frtc {

// Running maximum of a row that has seen no key. Finite, so that differences of two such are 0 and not NaN.
inline constexpr float kNoKey = -1e30f;

// Sums, maximum (in log2 units) and weight of every warp to shared memory, for the block's final addition.
template <typename Tile>
__device__ __forceinline__ void stage_sums(float* sums, float2* stats, const float (&o)[Tile::O_TILES][4],
                                           const float (&top)[2], const float (&weight)[2], float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / Tile::WM * Tile::BM + warp % Tile::WM * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < Tile::O_TILES; ++n)
            *reinterpret_cast<float2*>(sums + (row + 8 * r) * Tile::O_PITCH + n * 8 + lane % 4 * 2) =
                make_float2(o[n][2 * r], o[n][2 * r + 1]);
        const float total = warp_sum<4>(weight[r]);
        if (lane % 4 == 0) stats[row + 8 * r] = make_float2(top[r] * scale, total);
    }
}

// What each of the WN partial sums of one row counts in their total: shares[i * BM], from (maximum, weight) at
// stats[i * BM]. Returns the total's (maximum, weight). mean: the shares are divided by that weight, or all zero, and
// `unit` times as large.
template <int BM, int WN>
__device__ __forceinline__ float2 find_shares(float* shares, const float2* stats, bool mean, float unit) {
    float2 part[WN];
    float top = kNoKey, weight = 0.0f;
#pragma unroll
    for (int i = 0; i < WN; ++i) part[i] = stats[i * BM], top = fmaxf(top, part[i].x);
#pragma unroll
    for (int i = 0; i < WN; ++i) part[i].x = exp2_fast(part[i].x - top), weight += part[i].x * part[i].y;
    const float factor = !mean ? 1.0f : weight > 0.0f ? __fdividef(unit, weight) : 0.0f;
#pragma unroll
    for (int i = 0; i < WN; ++i) shares[i * BM] = factor * part[i].x;
    return make_float2(top, weight);
}

// The same for the rows of a tile and up to 32 splits, stats[split * step + row]: all loads are under way at once, then
// a warp takes a row and each lane a split. Shares up to the next multiple of WAYS splits are zero. Of shared memory
// `shares` needs 3 floats for each row and each split, their number rounded up.
template <typename Tile, int WAYS>
__device__ __forceinline__ void find_split_shares(float* shares, const float2* stats, i64 step, int count, int rows,
                                                  float unit) {
    constexpr int BM = Tile::BM, WARPS = Tile::THREADS / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, filled = (count + WAYS - 1) / WAYS * WAYS;
    float2* const parts = reinterpret_cast<float2*>(shares + filled * BM);
#pragma unroll 2
    for (int i = threadIdx.x; i < count * BM; i += Tile::THREADS)
        parts[i] = stats[i / BM * step + min(i % BM, rows - 1)];
    __syncthreads();
#pragma unroll 4
    for (int row = warp; row < BM; row += WARPS) {
        const float2 part = lane < count ? parts[lane * BM + row] : make_float2(kNoKey, 0.0f);
        const float share = exp2_fast(part.x - warp_max(part.x)), weight = warp_sum(share * part.y);
        if (lane < filled) shares[lane * BM + row] = weight > 0.0f ? __fdividef(share * unit, weight) : 0.0f;
    }
}

// For each of the first `rows` rows of the tile and each 4 columns: place(row, col) gets the sum over i of share i
// times partial i. Partial sums are rows of `pitch` elements, `step` elements from one partial to the next. A thread
// has the loads of WAYS partials for ITEMS results under way before it uses the first.
template <typename Tile, int WAYS, int ITEMS, typename Place>
__device__ __forceinline__ void add_partials(const float* sums, int pitch, i64 step, const float* shares, int count,
                                             int rows, Place place) {
    constexpr int QUADS = Tile::DV / 4;
    const int items = min(Tile::BM, rows) * QUADS;
    for (int first = threadIdx.x; first < items; first += ITEMS * Tile::THREADS) {
        float total[ITEMS][4] = {};
        int row[ITEMS], col[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = min(first + i * Tile::THREADS, items - 1);
            row[i] = item / QUADS, col[i] = item % QUADS * 4;
        }
        for (int p = 0; p < count; p += WAYS) {
            float part[WAYS][ITEMS][4] = {};
#pragma unroll
            for (int w = 0; w < WAYS; ++w) {
                if (p + w < count) {
#pragma unroll
                    for (int i = 0; i < ITEMS; ++i)
                        load_f32(part[w][i], sums + (p + w) * step + row[i] * pitch + col[i]);
                }
            }
#pragma unroll
            for (int w = 0; w < WAYS; ++w)
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    const float share = shares[(p + w) * Tile::BM + row[i]];
#pragma unroll
                    for (int j = 0; j < 4; ++j) total[i][j] += share * part[w][i][j];
                }
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            auto* const to = place(row[i], col[i]);
            if (first + i * Tile::THREADS < items) store_f32(to, total[i]);
        }
    }
}

// Whether this block is the last of `blocks` to come here with what it wrote to global memory; then the counter is zero
// again. `flag` is in dynamic shared memory: the largest tiles leave no byte for a static variable.
__device__ __forceinline__ bool last_to_arrive(u32* counter, u32 blocks, u32* flag) {
    __syncthreads();
    if (threadIdx.x == 0) {
        *flag = atomic_add_acq_rel(counter, 1) + 1 == blocks;
        if (*flag) *counter = 0;
    }
    __syncthreads();
    return *flag;
}

}  // namespace frtc
