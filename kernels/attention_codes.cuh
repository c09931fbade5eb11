// Results of an attention in e4m3 with one scale for each token: all its heads are one row.
//
//   The heads of a token are spread over the blocks of a panel: all key heads of so many row tiles that the last ends
//   with a whole token. Each block leaves its results in bf16 in `staged` [B, SQ, HQ, DV]. The one that finishes last
//   reads them, finds the largest magnitude m of each token, and writes y * (448 / m) and m / 448: equal inputs, equal
//   bits, since a maximum has no order. `arrived` holds a counter for each panel of each batch: zero before and after.
//   ROW  elements of a token, HQ * DV: a warp holds it in registers, and several tokens where they are short
#pragma once

#include "attention_sums.cuh"
#include "vector.cuh"

namespace frtc {

// The tokens that a panel holds, and whether this block is the last of its blocks to come here.
struct Panel {
    int first, end;  // tokens
    bool complete;

    __device__ __forceinline__ Panel(u32* arrived, u32* flag, int tiles, int tile_rows, int batch, int heads_kv,
                                     int group, int sq) {
        const int all = static_cast<int>(gridDim.x), panel = static_cast<int>(blockIdx.x) / tiles;
        const int from = panel * tiles, to = min(from + tiles, all);
        first = from * tile_rows / group;
        end = min(to * tile_rows / group, sq);
        const int blocks = (to - from) * heads_kv;
        if (blocks == 1) {
            __syncthreads();
            complete = true;
        } else {
            complete = last_to_arrive(arrived + batch * ceil_div(all, tiles) + panel, blocks, flag);
        }
    }
};

// Codes and scales of the tokens first..end-1. `staged`, `out` and `scales` are those of the batch.
template <int ROW, int DV, int WARPS>
__device__ __forceinline__ void store_tokens(const bf16* staged, e4m3* out, i64 out_head, i64 out_row, float* scales,
                                             i64 scale_row, int first, int end, int sq) {
    constexpr int GROUPS = ceil_div(ROW, 256), TOKENS = GROUPS < 16 ? 16 / GROUPS : 1;  // 16 loads a lane under way
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int token = first + warp * TOKENS; token < end; token += WARPS * TOKENS) {
        Vec<bf16, 8> kept[TOKENS][GROUPS] = {};
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const int at = (g * 32 + lane) * 8;
                const bf16* const row = staged + static_cast<i64>(min(token + t, end - 1)) * ROW;
                if (at < ROW) kept[t][g] = *reinterpret_cast<const Vec<bf16, 8>*>(row + at);
            }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            u32 top = 0;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                if (FRTC_SABOTAGE == 4 && (g * 32 + lane) * 8 + DV >= ROW) continue;
#pragma unroll
                for (int j = 0; j < 8; ++j) top = max(top, magnitude(to_f32(kept[t][g].at[j])));
            }
            const RowScale found(row_top<32>(top, nullptr));
            if (token + t >= end) continue;
            const int place = FRTC_SABOTAGE == 3 ? (token + t + 1) % sq : token + t;
            if (lane == 0) scales[place * scale_row] = found.scale;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const int at = (g * 32 + lane) * 8;
                float v[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = to_f32(kept[t][g].at[j]) * found.factor;
                if (at < ROW) store_f32<8>(out + at / DV * out_head + (token + t) * out_row + at % DV, v);
            }
        }
    }
}

}  // namespace frtc
