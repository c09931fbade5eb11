// Sums of the blocks of sm90_attention_keys.cuh: a block sends them to the one that the columns belong to, which adds
// them.
#pragma once

#include "attention_sums.cuh"
#include "sm90_keys_fragments.cuh"

namespace frtc {

// The rows whose maxima and weights a lane looks after, OWN of them in a row.
template <typename Tile>
struct OwnRows {
    int first;
    bool mine;

    __device__ __forceinline__ OwnRows() {
        const int g = threadIdx.x % 32 / 4, column = g * Tile::OWN % Tile::COLUMNS;
        first = column / 2 * 8 + threadIdx.x % 4 * 2 + column % 2, mine = g * Tile::OWN < Tile::COLUMNS;
    }
    __device__ __forceinline__ void put(float* warps, int warp, const float (&x)[Tile::COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < Tile::OWN; ++i)
            if (mine) warps[warp * Tile::ROWS + first + i] = x[i];
    }
    template <typename Op>
    __device__ __forceinline__ void get(float (&x)[Tile::OWN], const float* warps, Op op) const {
#pragma unroll
        for (int w = 0; w < Tile::TILES; ++w)
#pragma unroll
            for (int i = 0; i < Tile::OWN; ++i) x[i] = op(x[i], warps[w * Tile::ROWS + first + i]);
    }
};

// Where a warp sends what belongs to its columns: to the block of its number.
template <typename Tile>
struct KeysPeer {
    u32 sums, stats, barriers;

    __device__ __forceinline__ KeysPeer(u32 smem, int warp, int rank, int own_row) {
        const u32 there = cluster_address(smem, warp);
        sums = there + Tile::SUMS_AT + rank * Tile::SOURCE + threadIdx.x % 32 * 16;
        stats = there + Tile::STATS_AT + rank * Tile::STATS + own_row * 8;
        barriers = there + Tile::BARRIERS_AT;
        known(sums), known(stats), known(barriers);
    }

    __device__ __forceinline__ void send_stats(const float (&top)[Tile::OWN], const float (&weight)[Tile::OWN],
                                               bool mine) const {
        if constexpr (Tile::OWN == 2)
            store_async(stats, barriers, top[0], weight[0], top[1], weight[1]);
        else if (mine)
            store_async(stats, barriers, __float_as_uint(top[0]), __float_as_uint(weight[0]));
    }

    // Word i of a packet: rows 2t + i % 2 of the first or second eight, or columns.
    __device__ __forceinline__ void send(const float (&o)[Tile::PARTS][Tile::M_TILES][Tile::PART / 2],
                                         int group) const {
        const int part = group / Tile::M_TILES, m = group % Tile::M_TILES;
        if constexpr (Tile::EIGHTS == 1) {
            send_packet(0, &o[0][0][0], &o[0][1][0]);
        } else {
#pragma unroll
            for (int i = 0; i < Tile::PACKETS; ++i)
                send_packet((m * Tile::PARTS + part) * Tile::PACKETS + i, &o[part][m][8 * i], &o[part][m][8 * i + 4]);
        }
    }

private:
    __device__ __forceinline__ void send_packet(int place, const float* first, const float* second) const {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const of = i < 2 ? first : second;
            x[i] = __uint_as_float(pack2<bf16>(of[i % 2], of[i % 2 + 2]));
        }
        store_async(sums + place * 512, barriers + 8, x[0], x[1], x[2], x[3]);
    }
};

template <typename Tile, int GROUP = 0>
__device__ __forceinline__ void send_values(const KeysPeer<Tile>& peer,
                                            const float (&o)[Tile::PARTS][Tile::M_TILES][Tile::PART / 2]) {
    wgmma_wait<Tile::GROUPS - 1 - GROUP>();
    peer.send(o, GROUP);
    if constexpr (GROUP + 1 < Tile::GROUPS) send_values<Tile, GROUP + 1>(peer, o);
}

// Which row of this block's columns a lane adds up, where it lies in a source's packets and in out. Lanes that would
// meet in a bank take different words of their packets.
template <typename Tile>
struct MergedRow {
    int row;
    u32 at;

    __device__ __forceinline__ explicit MergedRow(int pair) {
        const int lane = threadIdx.x % 32;
        const int word = Tile::EIGHTS == 1 ? (pair + lane / 8) % 2 : (pair + lane / 8) % 4;
        row = (Tile::EIGHTS == 1 ? 0 : pair / 4 * 16 + word / 2 * 8) + lane % 4 * 2 + word % 2;
        at = (Tile::EIGHTS == 1 ? 0 : pair / 4 * 512) + lane * 16 + word * 4;
    }
    // From the first two of a lane's columns to the next.
    static constexpr int STEP = Tile::EIGHTS == 1 ? 8 : Tile::EIGHTS / 2 * 512;
};

// The rows that a lane stores, or not.
template <typename Tile>
struct OutRows {
    u64 place[Tile::ROUNDS];  // of its first column, in elements
    bool exists[Tile::ROUNDS];

    // start: of the first query of the first head
    __device__ __forceinline__ OutRows(int warp, int rank, i64 start, i64 head_step, i64 row_step, int queries) {
        const int column = rank * Tile::SHARE + static_cast<int>(threadIdx.x) % 32 / 4 * Tile::LANE;
#pragma unroll
        for (int round = 0; round < Tile::ROUNDS; ++round) {
            const int row = MergedRow<Tile>(warp + round * Tile::WARPS).row;
            place[round] = start + row % Tile::PACK * head_step + row / Tile::PACK * row_step + column;
            exists[round] = row / Tile::PACK < queries && column < Tile::DV;
            known(place[round]);
        }
    }
};

// What each block's sums of a row count in the total, and `unit` over the total's weight.
template <typename Tile>
struct BlockShares {
    float of[Tile::SPLIT], factor;

    __device__ __forceinline__ BlockShares(const unsigned char* stats, int row, float unit) {
        float2 stat[Tile::SPLIT];
        float top = kNoKey, total = 0.0f;
#pragma unroll
        for (int r = 0; r < Tile::SPLIT; ++r) {
            stat[r] = *reinterpret_cast<const float2*>(stats + r * Tile::STATS + row * 8);
            top = r == 0 ? stat[r].x : fmaxf(top, stat[r].x);
        }
#pragma unroll
        for (int r = 0; r < Tile::SPLIT; ++r) {
            of[r] = FRTC_SABOTAGE == 5 ? 1.0f : exp2_fast(stat[r].x - top);
            if (FRTC_SABOTAGE == 2 && r == Tile::SPLIT - 1) of[r] = 0.0f;
            total = fmaf(of[r], stat[r].y, total);
        }
        factor = total > 0.0f ? __fdividef(unit, total) : 0.0f;
    }

    // A lane's columns of the row; sums: in the first block's.
    __device__ __forceinline__ void add(float (&all)[Tile::LANE], const unsigned char* sums) const {
        u32 pair[Tile::SPLIT][Tile::M_TILES];
#pragma unroll
        for (int r = 0; r < Tile::SPLIT; ++r)
#pragma unroll
            for (int m = 0; m < Tile::M_TILES; ++m)
                pair[r][m] = *reinterpret_cast<const u32*>(sums + r * Tile::SOURCE + m * MergedRow<Tile>::STEP);
#pragma unroll
        for (float& x : all) x = 0.0f;
#pragma unroll
        for (int r = 0; r < Tile::SPLIT; ++r)
#pragma unroll
            for (int m = 0; m < Tile::M_TILES; ++m) {
                all[2 * m] = fmaf(of[r], __uint_as_float(pair[r][m] << 16), all[2 * m]);
                all[2 * m + 1] = fmaf(of[r], __uint_as_float(pair[r][m] & 0xffff0000u), all[2 * m + 1]);
            }
#pragma unroll
        for (float& x : all) x *= factor;
    }
};

// Rows of this block's columns, of all blocks, to out.
template <typename Tile, typename TOut>
__device__ __forceinline__ void merge_rows(const unsigned char* smem, u32 stats_full, int warp,
                                           const OutRows<Tile>& rows, TOut* out, float unit) {
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        if (warp + round * Tile::WARPS >= Tile::PAIRS) break;
        const MergedRow<Tile> merged(warp + round * Tile::WARPS);
        float all[Tile::LANE];
        if (round == 0) barrier_wait(stats_full, 0);
        const BlockShares<Tile> shares(smem + Tile::STATS_AT, merged.row, unit);
        if (round == 0) barrier_wait(stats_full + 8, 0);
        shares.add(all, smem + Tile::SUMS_AT + merged.at);
        if (rows.exists[round]) store_f32<Tile::LANE>(out + rows.place[round], all);
    }
}

}  // namespace frtc
