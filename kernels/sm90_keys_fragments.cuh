// What a block of sm90_attention_keys.cuh multiplies: its keys and values as fragments in registers, queries in shared
// memory, and the loads that bring them.
#pragma once

// Test builds that must fail: see sm90_attention_keys.cuh.
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE 0
#endif

#include "sm90.cuh"
#include "vector.cuh"

namespace frtc {

// Sizes of one instance, in elements; bytes where they say so.
template <int D_, int DV_, int ROWS_, int TILES_, int PACK_>
struct KeysTile {
    static constexpr int D = D_, DV = DV_, ROWS = ROWS_, TILES = TILES_, LATE = TILES - 1, PACK = PACK_;
    static constexpr int WARPS = 8, SPLIT = 8;
    static constexpr int STEPS = D / 16, CHUNKS = D / 32;        // of the first product; loads of a row of k by a lane
    static constexpr int EIGHTS = ROWS / 8, COLUMNS = ROWS / 4;  // of rows; rows whose scores a lane has
    static constexpr int OWN = ceil_div(COLUMNS, 8);             // rows whose maximum a lane finds
    static constexpr int M_TILES = DV > 128 ? 2 : 1;             // of 64 columns of a warpgroup
    static constexpr int LANE = 2 * M_TILES, SHARE = 8 * LANE;   // columns of a lane, of a warp
    // Rows of the second product, and how often they are made; pieces of q.
    static constexpr int PART = ROWS < 32 ? ROWS : 32, PARTS = ROWS / PART, PART_EIGHTS = PART / 8;
    static constexpr int UNITS = EIGHTS * CHUNKS, LOADS = ceil_div(UNITS, WARPS);
    static constexpr int PANEL = ROWS * 128;  // bytes
    static constexpr int P_AT = ceil_div(D, 64) * PANEL, TOPS_AT = P_AT + 2 * PANEL;
    static constexpr int SUMS_AT = TOPS_AT + 2 * WARPS * ROWS * 4, SOURCE = ROWS * SHARE * 2;
    static constexpr int STATS_AT = SUMS_AT + SPLIT * SOURCE, STATS = ROWS * 8;
    static constexpr int BARRIERS_AT = STATS_AT + SPLIT * STATS;
    // The second product is made in groups, and what a group has made is sent while the next is computed: packets of
    // two eights of rows times two columns, or, where there is but one eight, times four. A warp adds up PAIRS / WARPS
    // times a row of each two for all its lanes.
    static constexpr int GROUPS = EIGHTS == 1 ? 1 : PARTS * M_TILES, PACKETS = PART_EIGHTS / 2, PAIRS = ROWS / 4;
    static constexpr int ROUNDS = ceil_div(PAIRS, WARPS);
    static_assert(D % 32 == 0 && D <= 256 && DV % 16 == 0 && DV <= 256 && TILES >= 1 && TILES <= WARPS);
    static_assert((ROWS == 8 && M_TILES == 2) || ROWS == 16 || ROWS == 32 || ROWS == 64, "packets of 16 bytes");
};

// The value is known here, not only where it is used: before the wait, where instructions cost nothing.
__device__ __forceinline__ void known(u32& x) {
    asm volatile("" : "+r"(x));
}
__device__ __forceinline__ void known(u64& x) {
    asm volatile("" : "+l"(x));
}

// Loads of global memory in their order, from addresses that may be known long before.
__device__ __forceinline__ u64 global_address(const void* p) {
    return static_cast<u64>(__cvta_generic_to_global(p));
}
__device__ __forceinline__ uint4 load_global_16(u64 address) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}
template <int WORDS>
__device__ __forceinline__ Vec<u32, WORDS> load_global_words(u64 address) {
    Vec<u32, WORDS> v;
    if constexpr (WORDS == 2)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.at[0]), "=r"(v.at[1]) : "l"(address) : "memory");
    else
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(v.at[0]) : "l"(address) : "memory");
    return v;
}
// `otherwise` where the address is 0.
__device__ __forceinline__ u32 load_global_if(u64 address, u32 otherwise) {
    u32 v;
    asm volatile("{\n"
                 ".reg .pred there;\n"
                 "setp.ne.u64 there, %1, 0;\n"
                 "mov.u32 %0, %2;\n"
                 "@there ld.global.u32 %0, [%1];\n"
                 "}" : "=&r"(v) : "l"(address), "r"(otherwise) : "memory");
    return v;
}

// Descriptors of K-major tiles, made of one: `bytes` further.
struct Descriptor {
    u32 low;

    __device__ __forceinline__ explicit Descriptor(u32 address) : low((address & 0x3FFFF) >> 4 | 1u << 16) {}
    __device__ __forceinline__ u64 at(u32 bytes) const {
        return static_cast<u64>(64u | 1u << 30) << 32 | (low + (bytes >> 4));
    }
};

// Four 8x8 matrices, two elements a lane and register, to rows of 16 bytes: lane 8i + r gives the address of row r of
// matrix i. TRANSPOSED: rows in shared memory are columns of the fragments.
template <bool TRANSPOSED>
__device__ __forceinline__ void stmatrix_four(u32 to, u32 a, u32 b, u32 c, u32 d) {
    if constexpr (TRANSPOSED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix_two_transposed(u32 to, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

// Which keys a block has: its early ones begin at `first`, up to `end`; its late ones at `late`, up to `late_end`.
struct KeyShare {
    int first, end, late, late_end;

    __device__ __forceinline__ KeyShare(int rank, int fresh, int sk) {
        const int span = ceil_div(fresh, 8), late_span = ceil_div(sk - fresh, 8);
        first = rank * span, end = min(first + span, fresh);
        late = fresh + rank * late_span, late_end = min(late + late_span, sk);
    }
};

// A warp's 16 keys: of rows g and g + 8 all chunks of 32 columns, of which lane t has eight.
template <typename Tile>
struct KeyFragments {
    uint4 low[Tile::CHUNKS], high[Tile::CHUNKS];

    // row: this lane's columns of a row
    __device__ __forceinline__ static void load(uint4 (&keys)[Tile::CHUNKS], u64 row) {
#pragma unroll
        for (int c = 0; c < Tile::CHUNKS; ++c) keys[c] = load_global_16(row + c * 64);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < Tile::CHUNKS; ++c) low[c] = high[c] = make_uint4(0, 0, 0, 0);
    }
    // always: true, but the compiler does not know. A fragment has its four registers side by side: half of them move
    // there while loads are under way, those that late keys may come to only here.
    __device__ __forceinline__ void settle(bool always) {
#pragma unroll
        for (uint4& four : high) {
            four.x = always ? four.x : 0, four.y = always ? four.y : 0;
            four.z = always ? four.z : 0, four.w = always ? four.w : 0;
        }
    }
};

// The keys of all tiles of a block, of this lane's columns: of each tile 2t, 2t + 1, 2t + 8, 2t + 9.
template <typename Tile>
struct ValueFragments {
    u32 at[Tile::TILES][Tile::M_TILES][4];

    __device__ __forceinline__ void load(int tile, int i, u64 row) {
        const auto pairs = load_global_words<Tile::M_TILES>(row);
#pragma unroll
        for (int m = 0; m < Tile::M_TILES; ++m) at[tile][m][i] = pairs.at[m];
    }

    // Early tiles. Only where `hole` says so some key of a tile may be hidden, from `count` on.
    __device__ __forceinline__ void arrange_early(int count, bool hole) {
#pragma unroll
        for (int tile = 0; tile < Tile::LATE; ++tile) arrange(tile, 0), arrange(tile, 1);
        if (!hole) return;
#pragma unroll
        for (int tile = 0; tile < Tile::LATE; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) hide(tile, half, count - tile * 16);
    }
    // The last tile: new keys are its second half.
    __device__ __forceinline__ void arrange_late(int count) {
        arrange(Tile::LATE, 1), hide(Tile::LATE, 1, count + 8);
#pragma unroll
        for (int m = 0; m < Tile::M_TILES; ++m) at[Tile::LATE][m][0] = at[Tile::LATE][m][1] = 0;
    }

private:
    // Pairs of columns of a key become pairs of keys of a column.
    __device__ __forceinline__ void arrange(int tile, int half) {
#pragma unroll
        for (int m = 0; m < Tile::M_TILES; ++m) {
            u32 &first = at[tile][m][2 * half], &second = at[tile][m][2 * half + 1];
            const u32 even = __byte_perm(first, second, 0x5410);
            second = __byte_perm(first, second, 0x7632), first = even;
        }
    }
    // Zeros from key `count` of the tile on.
    __device__ __forceinline__ void hide(int tile, int half, int count) {
        const int hidden = 32 - 16 * (count - 8 * half - static_cast<int>(threadIdx.x) % 4 * 2);  // bits
        const u32 seen = FRTC_SABOTAGE == 6 ? ~0u : __funnelshift_rc(~0u, 0u, max(hidden, 0));
#pragma unroll
        for (int m = 0; m < Tile::M_TILES; ++m) at[tile][m][2 * half] &= seen, at[tile][m][2 * half + 1] &= seen;
    }
};

// Where this lane's keys are. `early`: of its two keys of scores, places among the block's early ones; beyond all where
// the warp has none. `late`: of the second one, among the new ones.
template <typename Tile>
struct KeyPlaces {
    static constexpr int NONE = 1 << 30;
    u64 k, v, late_k, late_v[2];  // this lane's columns of the first row, of new rows
    int k_row, v_row;             // bytes
    int first, last;              // of the block's early keys
    int early[2], late, key[2];
    bool has_late;

    __device__ __forceinline__ KeyPlaces(const bf16* k_, const bf16* v_, int k_row, int v_row, const KeyShare& share,
                                         int warp, int sk)
        : k_row(k_row), v_row(v_row), first(share.first), last(share.end - 1), has_late(warp == Tile::LATE) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        k = global_address(k_ + t * 8);
        v = global_address(v_ + min(warp * Tile::SHARE + g * Tile::LANE, Tile::DV - Tile::LANE));
        early[0] = warp < Tile::LATE ? warp * 16 + g : NONE, early[1] = warp < Tile::LATE ? early[0] + 8 : NONE;
        late = has_late ? g : NONE;
        key[0] = first + early[0], key[1] = has_late ? share.late + g : first + early[1];
        late_k = k + min(share.late + g, sk - 1) * k_row;
        known(late_k);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            late_v[i] = v + min(share.late + 2 * t + i, sk - 1) * v_row;
            known(late_v[i]);
        }
    }

    // Places beyond the last key are taken by that one: nothing of it counts twice, but it is a number. Warps without
    // early keys have it, too.
    __device__ __forceinline__ void load_early(KeyFragments<Tile>& keys, ValueFragments<Tile>& values) const {
        if constexpr (Tile::LATE == 0) {
            keys.clear();
        } else {
            keys.load(keys.low, k + min(first + early[0], last) * k_row);
            keys.load(keys.high, k + min(first + early[1], last) * k_row);
        }
#pragma unroll
        for (int tile = 0; tile < Tile::LATE; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int place = tile * 16 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2 + i / 2 * 8;
                values.load(tile, i, v + min(first + place, last) * v_row);
            }
    }
    __device__ __forceinline__ void load_late(KeyFragments<Tile>& keys, ValueFragments<Tile>& values) const {
        if (has_late) keys.load(keys.high, late_k);
        values.load(Tile::LATE, 2, late_v[0]), values.load(Tile::LATE, 3, late_v[1]);
    }
};

// A warp's part of q on its way to shared memory, eight rows of 32 columns at a time.
template <typename Tile>
struct QueryCopy {
    u64 from[Tile::LOADS];
    u32 to[Tile::LOADS];
    uint4 held[Tile::LOADS];
    int warp;

    // q: the first of PACK heads
    __device__ __forceinline__ QueryCopy(u32 q_at, int warp, const bf16* q, int query, int sq, i64 head_step,
                                         i64 row_step)
        : warp(warp) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Tile::LOADS; ++i) {
            const int unit = warp + i * Tile::WARPS, eight = unit / Tile::CHUNKS, chunk = unit % Tile::CHUNKS;
            const int row = eight * 8 + lane / 4, piece = FRTC_SABOTAGE == 3 ? 3 - lane / 8 : lane / 8;
            const int token = min(query + row / Tile::PACK, sq - 1);
            from[i] = global_address(q + row % Tile::PACK * head_step + token * row_step + chunk * 32 + lane % 4 * 8);
            to[i] = q_at + chunk / 2 * Tile::PANEL + (eight * 8 + lane % 8) * 128 +
                    ((chunk % 2 * 4 + piece) ^ (lane % 8)) * 16;
            known(from[i]), known(to[i]);
        }
    }
    __device__ __forceinline__ bool has(int i) const {
        return Tile::UNITS % Tile::WARPS == 0 || warp + i * Tile::WARPS < Tile::UNITS;
    }
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < Tile::LOADS; ++i)
            if (has(i)) held[i] = load_global_16(from[i]);
    }
    // Word 2 p + h of a lane's eight columns is columns 2t, 2t + 1 of half h of step p.
    __device__ __forceinline__ void store() const {
#pragma unroll
        for (int i = 0; i < Tile::LOADS; ++i)
            if (has(i)) stmatrix_four<false>(to[i], held[i].x, held[i].y, held[i].z, held[i].w);
    }
};

}  // namespace frtc
