// out = softmax(scale * q k^T, over visible keys) v, for few queries: keys and values in registers
//
//   q [B, HQ, SQ, D]   k [B, HKV, SK, D]   v [B, HKV, SK, DV]   out [B, HQ, SQ, DV]   bf16 views, last axis contiguous,
//   other strides multiples of 8 elements; out also e4m3, times *inv. D a multiple of 32, DV of 16, both up to 256.
//   Row m of a tile of ROWS is head m % PACK of query m / PACK: PACK neighbouring heads read one key head.
//
//   visible   key j: j < length (absent: all), or 0 <= resume <= j; with CAUSAL also j <= i + SK - SQ for query i. Hidden
//             keys may hold anything, NaN too. Without any key the result is zero.
//   grid      (8 * tiles of ROWS / PACK queries, HQ / PACK, B), clusters of 8     block  256: two warpgroups
//   keys      Each block has an eighth of the keys before `fresh`, in tiles 0 .. TILES - 2 of 16, and an eighth of the others,
//             up to 8, in the last. Fragments come straight from memory: the former before the wait where they are among the
//             first `settled` rows, which the grids before do not write, the others behind it.
//   products  s^T = k q^T, a warp has the 16 keys of a tile; o^T = v^T p^T, a warp has 16 or 32 columns. Both A operands
//             are registers, q and p in shared memory have the N side: no row of a product is idle.
//   k, q      Of 32 columns lane t of a row's four has 8t .. 8t + 7, one load. They serve as columns 2t, 2t + 1, 2t + 8,
//             2t + 9 of two steps, and q lies in shared memory in that order: stmatrix puts it there.
//   sums      Columns of warp w belong to block w of the cluster: maxima and weights go there during the second product,
//             sums in bf16 behind it. It adds them in the order of blocks.
//   smem      q [panels of 64 columns][ROWS of 128 swizzled bytes], p [2 panels of 64 keys][ROWS of 128], a float of each
//             warp and row for maxima and for weights, received sums, received (maximum, weight), two barriers
//   rounding  scores, softmax, sums of a block in fp32; probabilities and a block's sums to bf16; out once
//   NOTE: a branch between the two products makes the compiler serialise all products of the kernel: there is none.
//   tested    tests/kernels/test_sm90_attention_keys.py
#pragma once

// Test builds that must fail: 1 hides one key too few, 2 leaves out the sums of the last block, 3 has columns of q in
// another order, 5 adds sums as if their maxima were equal, 6 leaves the hidden rows of v as they are.
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE 0
#endif

#include "attention_sums.cuh"
#include "sm90.cuh"
#include "vector.cuh"

namespace frtc {

// Sizes of one instance, in elements; bytes where they say so.
template <int D_, int DV_, int ROWS_, int TILES_, int PACK_>
struct KeysTile {
    static constexpr int D = D_, DV = DV_, ROWS = ROWS_, TILES = TILES_, LATE = TILES - 1, PACK = PACK_;
    static constexpr int WARPS = 8, SPLIT = 8;
    static constexpr int STEPS = D / 16, CHUNKS = D / 32;           // of the first product; loads of a row of k by a lane
    static constexpr int EIGHTS = ROWS / 8, COLUMNS = ROWS / 4;     // of rows; rows whose scores a lane has
    static constexpr int OWN = ceil_div(COLUMNS, 8);                // rows whose maximum a lane finds
    static constexpr int M_TILES = DV > 128 ? 2 : 1;                // of 64 columns of a warpgroup
    static constexpr int LANE = 2 * M_TILES, SHARE = 8 * LANE;      // columns of a lane, of a warp
    static constexpr int PART = ROWS < 32 ? ROWS : 32, PARTS = ROWS / PART, PART_EIGHTS = PART / 8;  // of the second product
    static constexpr int UNITS = EIGHTS * CHUNKS, LOADS = ceil_div(UNITS, WARPS);                    // of q
    static constexpr int PANEL = ROWS * 128;  // bytes
    static constexpr int P_AT = ceil_div(D, 64) * PANEL, TOPS_AT = P_AT + 2 * PANEL, WEIGHTS_AT = TOPS_AT + WARPS * ROWS * 4;
    static constexpr int SUMS_AT = WEIGHTS_AT + WARPS * ROWS * 4, SOURCE = ROWS * SHARE * 2;
    static constexpr int STATS_AT = SUMS_AT + SPLIT * SOURCE, STATS = ROWS * 8;
    static constexpr int BARRIERS_AT = STATS_AT + SPLIT * STATS;
    static constexpr int PAIRS = ROWS / 4;  // a warp adds up one row of each two of eight
    // Where a warp's row is in packets of a source.
    __device__ __forceinline__ static constexpr int place_of(int pair) {
        return M_TILES == 2 ? pair / 2 * 512 + pair % 2 * 8 : pair / 4 * 512 + pair % 4 * 4;
    }
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
    // always: true, but the compiler does not know. A fragment has its four registers side by side: half of them move there
    // while loads are under way, those that late keys may come to only here.
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

// A warp's part of q on its way to shared memory, eight rows of 32 columns at a time.
template <typename Tile>
struct QueryCopy {
    u64 from[Tile::LOADS];
    u32 to[Tile::LOADS];
    uint4 held[Tile::LOADS];
    int warp;

    // q: the first of PACK heads
    __device__ __forceinline__ QueryCopy(u32 q_at, int warp, const bf16* q, int query, int sq, i64 head_step, i64 row_step)
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

// s^T = k q^T of this warp's 16 keys; not waited for.
template <typename Tile>
__device__ __forceinline__ void key_scores(float (&s)[Tile::ROWS / 2], const KeyFragments<Tile>& k, u32 q_at) {
    const Descriptor q(q_at);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::STEPS; ++step) {
        const uint4 &low = k.low[step / 2], &high = k.high[step / 2];
        const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
        wgmma<bf16, Tile::ROWS>(s, step % 2 ? second : first, q.at(step / 4 * Tile::PANEL + step % 4 * 32), step > 0);
    }
    wgmma_commit();
}

// A lane's two keys: whether a query sees them at all; CAUSAL: the first query that does.
struct KeyView {
    bool seen[2];
    int since[2];
};

// Scores of hidden keys become -inf.
template <typename Tile, bool CAUSAL>
__device__ __forceinline__ void hide_keys(float (&s)[Tile::ROWS / 2], const KeyView& keys, int query) {
#pragma unroll
    for (int i = 0; i < Tile::ROWS / 2; ++i) {
        const int row = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2, half = i / 2 % 2;
        bool sees = keys.seen[half];
        if constexpr (CAUSAL) sees &= query + row / Tile::PACK >= keys.since[half];
        if (!sees) s[i] = __int_as_float(0xff800000);  // -inf
    }
}

// Over the eight lanes of the same t; lanes hand over columns until each has one that is its own, or two.
template <int COLUMNS, typename Op>
__device__ __forceinline__ void reduce_columns(float (&x)[COLUMNS], Op op) {
    int left = COLUMNS;
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
        const bool upper = threadIdx.x / 4 & step;
        const bool halve = left > step;
        if (halve) left /= 2;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (i >= left) break;
            const float given = halve && !upper ? x[i + left] : x[i];
            const float kept = halve && upper ? x[i + left] : x[i];
            x[i] = op(kept, __shfl_xor_sync(0xffffffffu, given, step * 4));
        }
    }
}

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

struct Larger {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Of the two keys of each column.
template <typename Tile, typename Op>
__device__ __forceinline__ void over_keys(float (&x)[Tile::COLUMNS], const float (&s)[Tile::ROWS / 2], Op op) {
#pragma unroll
    for (int c = 0; c < Tile::COLUMNS; ++c) x[c] = op(s[c / 2 * 4 + c % 2], s[c / 2 * 4 + c % 2 + 2]);
    reduce_columns(x, op);
}

// s becomes 2^(scale s - top) with the largest of all the block's keys, `top`, of which each lane keeps its own rows'.
template <typename Tile>
__device__ __forceinline__ void powers(float (&s)[Tile::ROWS / 2], float (&top)[Tile::OWN], const OwnRows<Tile>& own,
                                       float* tops, int warp, float scale) {
    float most[Tile::COLUMNS];
    over_keys<Tile>(most, s, Larger());
    own.put(tops, warp, most);
    __syncthreads();
#pragma unroll
    for (float& x : top) x = kNoKey;
    own.get(top, tops, Larger());
#pragma unroll
    for (float& x : top) x *= scale;
#pragma unroll
    for (int c = 0; c < Tile::COLUMNS; ++c) {
        const float shift =
            __shfl_sync(0xffffffffu, top[c % Tile::OWN], c / Tile::OWN * 4 + static_cast<int>(threadIdx.x) % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float& x = s[c / 2 * 4 + c % 2 + 2 * h];
            x = exp2_fast(fmaf(x, scale, -shift));
        }
    }
}

// p^T to shared memory as rows of keys; to: this lane's address for the first eight rows, or two eights.
template <typename Tile>
__device__ __forceinline__ void store_powers(u32 to, const float (&s)[Tile::ROWS / 2]) {
    u32 pairs[Tile::EIGHTS * 2];
#pragma unroll
    for (int i = 0; i < Tile::EIGHTS * 2; ++i) pairs[i] = pack2<bf16>(s[2 * i], s[2 * i + 1]);
    if constexpr (Tile::EIGHTS == 1)
        stmatrix_two_transposed(to, pairs[0], pairs[1]);
    else
#pragma unroll
        for (int e = 0; e < Tile::EIGHTS; e += 2)
            stmatrix_four<true>(to + e * 1024, pairs[2 * e], pairs[2 * e + 1], pairs[2 * e + 2], pairs[2 * e + 3]);
}

// o^T = v^T p^T of this warp's columns, a group of products for each part of the rows; not waited for.
template <typename Tile>
__device__ __forceinline__ void key_values(float (&o)[Tile::PARTS][Tile::M_TILES][Tile::PART / 2],
                                           const ValueFragments<Tile>& v, u32 p_at) {
    const Descriptor p(p_at);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < Tile::PARTS; ++part) {
#pragma unroll
        for (int tile = 0; tile < Tile::TILES; ++tile) {
            const u64 keys = p.at(tile / 4 * Tile::PANEL + part * Tile::PART * 128 + tile % 4 * 32);
#pragma unroll
            for (int m = 0; m < Tile::M_TILES; ++m)
                wgmma<bf16, Tile::PART>(o[part][m], v.at[tile][m], keys, tile > 0);
        }
        wgmma_commit();
    }
}

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

    // Packets of 16 bytes: rows 2t, 2t + 1 of eight times four columns, or of two eights times two.
    __device__ __forceinline__ void send(const float (&o)[Tile::M_TILES][Tile::PART / 2], int part) const {
        constexpr int EIGHTS = Tile::M_TILES == 2 ? 1 : 2;  // of a packet
#pragma unroll
        for (int e = 0; e < Tile::PART_EIGHTS; e += EIGHTS) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const of = &o[Tile::M_TILES == 2 ? i % 2 : 0][4 * (EIGHTS == 2 ? e + i / 2 : e)];
                const int row = EIGHTS == 2 ? i % 2 : i / 2;
                x[i] = __uint_as_float(pack2<bf16>(of[row], of[row + 2]));
            }
            store_async(sums + (part * Tile::PART_EIGHTS + e) / EIGHTS * 512, barriers + 8, x[0], x[1], x[2], x[3]);
        }
    }
};

template <typename Tile, int PART = 0>
__device__ __forceinline__ void send_values(const KeysPeer<Tile>& peer,
                                            const float (&o)[Tile::PARTS][Tile::M_TILES][Tile::PART / 2]) {
    wgmma_wait<Tile::PARTS - 1 - PART>();
    peer.send(o[PART], PART);
    if constexpr (PART + 1 < Tile::PARTS) send_values<Tile, PART + 1>(peer, o);
}

// What each block's sums of a row count in the total, times `unit` over the total's weight.
template <typename Tile>
__device__ __forceinline__ void find_block_shares(float (&share)[Tile::SPLIT], const unsigned char* stats, int row,
                                                  float unit) {
    float2 stat[Tile::SPLIT];
    float top = kNoKey, total = 0.0f;
#pragma unroll
    for (int r = 0; r < Tile::SPLIT; ++r) {
        stat[r] = *reinterpret_cast<const float2*>(stats + r * Tile::STATS + row * 8);
        top = r == 0 ? stat[r].x : fmaxf(top, stat[r].x);
    }
#pragma unroll
    for (int r = 0; r < Tile::SPLIT; ++r) {
        share[r] = FRTC_SABOTAGE == 5 ? 1.0f : exp2_fast(stat[r].x - top);
        if (FRTC_SABOTAGE == 2 && r == Tile::SPLIT - 1) share[r] = 0.0f;
        total = fmaf(share[r], stat[r].y, total);
    }
    const float factor = total > 0.0f ? __fdividef(unit, total) : 0.0f;
#pragma unroll
    for (float& x : share) x *= factor;
}

// A lane's columns of one row, from all blocks; at: in the sums of the first.
template <typename Tile>
__device__ __forceinline__ void add_blocks(float (&all)[Tile::LANE], const float (&share)[Tile::SPLIT],
                                           const unsigned char* at) {
    using Pairs = Vec<u32, Tile::M_TILES>;
    Pairs pairs[Tile::SPLIT];
#pragma unroll
    for (int r = 0; r < Tile::SPLIT; ++r) pairs[r] = *reinterpret_cast<const Pairs*>(at + r * Tile::SOURCE);
#pragma unroll
    for (int r = 0; r < Tile::SPLIT; ++r)
#pragma unroll
        for (int m = 0; m < Tile::M_TILES; ++m) {
            all[2 * m] = fmaf(share[r], __uint_as_float(pairs[r].at[m] << 16), all[2 * m]);
            all[2 * m + 1] = fmaf(share[r], __uint_as_float(pairs[r].at[m] & 0xffff0000u), all[2 * m + 1]);
        }
}

// No pointer is __restrict__: see sm90_attention. Strides are in elements, those of rows of k and v in bytes. group = HQ /
// HKV. fresh: <= SK, SK - fresh <= 64, resume where that is not negative; ceil(fresh / 8) <= 16 (TILES - 1). scale is the
// op's scale times log2(e).
template <typename TOut, int D, int DV, int ROWS, int TILES, int PACK, bool CAUSAL>
__global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(256, 1)
sm90_attention_keys(const bf16* q, const bf16* k, const bf16* v, const int* length, TOut* out, i64 q_batch, i64 q_head,
                    i64 q_row, i64 k_batch, i64 k_head, i64 v_batch, i64 v_head, i64 out_batch, i64 out_head, i64 out_row,
                    int k_row, int v_row, int group, int sq, int sk, int fresh, int resume, float scale,
                    const float* inv, int settled) {
    using Tile = KeysTile<D, DV, ROWS, TILES, PACK>;
    constexpr int NONE = 1 << 30;
    extern __shared__ __align__(1024) unsigned char smem[];
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    const int batch = blockIdx.z, head = blockIdx.y * PACK, query = blockIdx.x / 8 * (ROWS / PACK);
    const int rank = cluster_rank();
    const u32 base = shared_address(smem), stats_full = base + Tile::BARRIERS_AT;
    float* const tops = reinterpret_cast<float*>(smem + Tile::TOPS_AT);
    float* const weights = reinterpret_cast<float*>(smem + Tile::WEIGHTS_AT);

    if (threadIdx.x == 0) {
        barrier_init(stats_full, 1), barrier_init(stats_full + 8, 1);
        barrier_init_fence();
        barrier_expect(stats_full, Tile::SPLIT * Tile::STATS), barrier_expect(stats_full + 8, Tile::SPLIT * Tile::SOURCE);
    }
    __syncwarp();
    cluster_arrive_relaxed();
    int head_kv = blockIdx.y;
    if (group != PACK) head_kv = head / group;
    const KeyShare share(rank, fresh, sk);
    const OwnRows<Tile> own;
    const KeysPeer<Tile> peer(base, warp, rank, own.first);
    QueryCopy<Tile> queries(base, warp, q + batch * q_batch + head * q_head, query, sq, q_head, q_row);
    u32 p_to = base + Tile::P_AT + warp / 4 * Tile::PANEL + (lane / 16 * 8 + lane % 8) * 128 +
               ((warp % 4 * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
    known(p_to);
    // Rows that do not exist are others of the same kind: nothing of them counts, but they must not be NaN.
    const u64 k_at = global_address(k + batch * k_batch + head_kv * k_head + lane % 4 * 8);
    const u64 v_at = global_address(v + batch * v_batch + head_kv * v_head +
                                    min(warp * Tile::SHARE + lane / 4 * Tile::LANE, DV - Tile::LANE));
    const bool has_early = warp < Tile::LATE, has_late = warp == Tile::LATE;
    const int first_key = has_early ? share.first + warp * 16 + lane / 4 : fresh;
    const int late_key = share.late + lane / 4, early_end = max(fresh - 1, 0);
    // Places of this lane's two keys among the block's early ones, or of the second among its late ones.
    const int first_slot = has_early ? warp * 16 + lane / 4 : NONE;
    const int second_slot = has_early ? warp * 16 + lane / 4 + 8 : has_late ? lane / 4 : NONE;
    const int second_key = has_early ? first_key + 8 : late_key;
    u64 late_k = k_at + min(late_key, sk - 1) * k_row, late_v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        late_v[i] = v_at + min(share.late + lane % 4 * 2 + i, sk - 1) * v_row;
        known(late_v[i]);
    }
    known(late_k);
    // The low bit is 0, but the compiler does not know: it would move a number that is the same in all lanes to a uniform
    // register, and wait for it.
    const u64 length_at = length ? global_address(length) + (late_k & 1) : 0;
    cluster_wait();  // every block of the cluster has its barriers; it would wait for loads, too

    KeyFragments<Tile> keys;
    ValueFragments<Tile> values;
    if (share.end > settled) grid_wait();  // the grids before write some of these keys
    const int low_key = min(first_key, early_end), high_key = min(first_key + 8, early_end);
    keys.load(keys.low, k_at + low_key * k_row), keys.load(keys.high, k_at + high_key * k_row);
#pragma unroll
    for (int tile = 0; tile < Tile::LATE; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = share.first + tile * 16 + lane % 4 * 2 + i % 2 + i / 2 * 8;
            values.load(tile, i, v_at + min(key, early_end) * v_row);
        }
    grid_wait();
    const u32 valid = load_global_if(length_at, sk) + (FRTC_SABOTAGE == 1);
    queries.load();
    if (has_late) keys.load(keys.high, late_k);
    values.load(Tile::LATE, 2, late_v[0]), values.load(Tile::LATE, 3, late_v[1]);
    const float unit = kSame<TOut, e4m3> ? *inv : 1.0f;
    grid_release();
#pragma unroll
    for (int tile = 0; tile < Tile::LATE; ++tile) values.arrange(tile, 0), values.arrange(tile, 1);
    const int seen = static_cast<int>(valid);
    const int early = min(share.end, seen) - share.first;
    const int late = (resume >= 0 ? share.late_end : min(share.late_end, seen)) - share.late;
    if (seen < fresh) {
#pragma unroll
        for (int tile = 0; tile < Tile::LATE; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) values.hide(tile, half, early - tile * 16);
    }
    queries.store();
    keys.settle(sk > 0);
    async_fence();
    __syncthreads();

    float s[ROWS / 2], o[Tile::PARTS][Tile::M_TILES][Tile::PART / 2], top[Tile::OWN], weight[Tile::OWN] = {};
    key_scores<Tile>(s, keys, base);
    values.arrange(Tile::LATE, 1), values.hide(Tile::LATE, 1, late + 8);
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m) values.at[Tile::LATE][m][0] = values.at[Tile::LATE][m][1] = 0;
    wgmma_wait<0>();
    const int since = sk - sq + (FRTC_SABOTAGE == 1);
    const KeyView view{{first_slot < early, second_slot < (warp < Tile::LATE ? early : late)},
                       {share.first + first_slot - since, second_key - since}};
    hide_keys<Tile, CAUSAL>(s, view, query);
    powers<Tile>(s, top, own, tops, warp, scale);
    store_powers<Tile>(p_to, s);
    async_fence();
    __syncthreads();

    key_values<Tile>(o, values, base + Tile::P_AT);
    float sums[Tile::COLUMNS];
    over_keys<Tile>(sums, s, Sum());
    own.put(weights, warp, sums);
    __syncthreads();
    own.get(weight, weights, Sum());
    peer.send_stats(top, weight, own.mine);
    send_values<Tile>(peer, o);

    const int column = rank * Tile::SHARE + lane / 4 * Tile::LANE;
#pragma unroll
    for (int round = 0; round < ceil_div(Tile::PAIRS, Tile::WARPS); ++round) {
        const int pair = warp + round * Tile::WARPS;
        if (pair >= Tile::PAIRS) break;
        const int row = pair / 2 * 8 + lane % 4 * 2 + pair % 2, at = query + row / PACK;
        float part[Tile::SPLIT], all[Tile::LANE] = {};
        if (round == 0) barrier_wait(stats_full, 0);
        find_block_shares<Tile>(part, smem + Tile::STATS_AT, row, unit);
        if (round == 0) barrier_wait(stats_full + 8, 0);
        add_blocks<Tile>(all, part, smem + Tile::SUMS_AT + lane * 16 + Tile::place_of(pair));
        TOut* const to = out + batch * out_batch + (head + row % PACK) * out_head + at * out_row + column;
        if (at < sq && column < DV) store_f32<Tile::LANE>(to, all);
    }
}

}  // namespace frtc
