// out = softmax(scale * q k^T, over visible keys) v, for few queries: keys and values in registers
//
//   q [B, HQ, SQ, D]   k [B, HKV, SK, D]   v [B, HKV, SK, DV]   out [B, HQ, SQ, DV]   bf16 views, last axis contiguous,
//   other strides multiples of 8 elements; out also e4m3, times *inv. D a multiple of 32, DV of 16, both up to 256.
//   Row m of a tile of ROWS is head m % PACK of query m / PACK: PACK neighbouring heads read one key head.
//
//   visible   key j: j < length (absent: all), or 0 <= resume <= j; with CAUSAL also j <= i + SK - SQ for query i.
//             Hidden keys may hold anything, NaN too. Without any key the result is zero.
//   grid      (8 * tiles of ROWS / PACK queries, HQ / PACK, B), clusters of 8     block  256: two warpgroups
//   keys      Each block has an eighth of the keys before `fresh`, in tiles 0 .. TILES - 2 of 16, and an eighth of the
//             others, up to 8, in the last. Fragments come straight from memory: the former before the wait where they
//             are among the first `settled` rows, which the grids before do not write, the others behind it.
//   products  s^T = k q^T, a warp has the 16 keys of a tile; o^T = v^T p^T, a warp has 16 or 32 columns. Both A
//             operands are registers, q and p in shared memory have the N side: no row of a product is idle.
//   k, q      Of 32 columns lane t of a row's four has 8t .. 8t + 7, one load. They serve as columns 2t, 2t + 1,
//             2t + 8, 2t + 9 of two steps, and q lies in shared memory in that order: stmatrix puts it there.
//   sums      Columns of warp w belong to block w of the cluster: maxima and weights go there during the second
//             product, sums in bf16 when 64 columns of it are done. It adds them in the order of blocks.
//   smem      q [panels of 64 columns][ROWS of 128 swizzled bytes], p [2 panels of 64 keys][ROWS of 128], a float of
//             each warp and row for maxima and for weights, received sums, received (maximum, weight), two barriers
//   rounding  scores, softmax, sums of a block in fp32; probabilities and a block's sums to bf16; out once
//   NOTE: a branch between the two products makes the compiler serialise all products of the kernel: there is none.
//   tested    tests/kernels/test_sm90_attention_keys.py
#pragma once

// Test builds that must fail: 1 hides one key too few, 2 leaves out the sums of the last block, 3 has columns of q in
// another order, 5 adds sums as if their maxima were equal, 6 leaves the hidden rows of v as they are.
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE 0
#endif

#include "sm90_keys_sums.cuh"

namespace frtc {

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

// Scores of hidden keys become -inf. early, late: so many keys of either kind are seen. CAUSAL: only those up to
// `reach` by the tile's first query, one more by each next one.
template <bool CAUSAL, typename Tile>
__device__ __forceinline__ void hide_keys(float (&s)[Tile::ROWS / 2], const KeyPlaces<Tile>& places, int early,
                                          int late, int reach) {
    const bool seen[2] = {places.early[0] < early, places.early[1] < early || places.late < late};
#pragma unroll
    for (int i = 0; i < Tile::ROWS / 2; ++i) {
        const int row = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2, half = i / 2 % 2;
        bool sees = seen[half];
        if constexpr (CAUSAL) sees &= places.key[half] <= reach + row / Tile::PACK;
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

// Sums of what a block's keys have of each row, of which each lane keeps its own rows'.
template <typename Tile>
__device__ __forceinline__ void weights(float (&weight)[Tile::OWN], const float (&s)[Tile::ROWS / 2],
                                        const OwnRows<Tile>& own, float* sums, int warp) {
    float sum[Tile::COLUMNS];
    over_keys<Tile>(sum, s, Sum());
    own.put(sums, warp, sum);
    __syncthreads();
    own.get(weight, sums, Sum());
}

// p^T to shared memory as rows of keys; to: this lane's address for the first eight rows, or two eights.
template <typename Tile>
__device__ __forceinline__ u32 powers_at(u32 smem, int warp) {
    const int lane = threadIdx.x % 32;
    u32 to = smem + Tile::P_AT + warp / 4 * Tile::PANEL + (lane / 16 * 8 + lane % 8) * 128 +
             ((warp % 4 * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
    known(to);
    return to;
}
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

// o^T = v^T p^T of this warp's columns, group by group; not waited for.
template <typename Tile>
__device__ __forceinline__ void key_values(float (&o)[Tile::PARTS][Tile::M_TILES][Tile::PART / 2],
                                           const ValueFragments<Tile>& v, u32 p_at) {
    const Descriptor p(p_at);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < Tile::PARTS; ++part)
#pragma unroll
        for (int m = 0; m < Tile::M_TILES; ++m) {
#pragma unroll
            for (int tile = 0; tile < Tile::TILES; ++tile) {
                const u32 at = tile / 4 * Tile::PANEL + part * Tile::PART * 128 + tile % 4 * 32;
                wgmma<bf16, Tile::PART>(o[part][m], v.at[tile][m], p.at(at), tile > 0);
            }
            if (Tile::GROUPS > 1 || m == Tile::M_TILES - 1) wgmma_commit();
        }
}

// No pointer is __restrict__: see sm90_attention. Strides are in elements, those of rows of k and v in bytes. group =
// HQ / HKV. fresh: <= SK, SK - fresh <= 64, resume where that is not negative; ceil(fresh / 8) <= 16 (TILES - 1). scale
// is the op's scale times log2(e).
template <typename TOut, int D, int DV, int ROWS, int TILES, int PACK, bool CAUSAL>
__global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(256, 1)
sm90_attention_keys(const bf16* q, const bf16* k, const bf16* v, const int* length, TOut* out, i64 q_batch, i64 q_head,
                    i64 q_row, i64 k_batch, i64 k_head, i64 v_batch, i64 v_head, i64 out_batch, i64 out_head,
                    i64 out_row, int k_row, int v_row, int group, int sq, int sk, int fresh, int resume, float scale,
                    const float* inv, int settled) {
    using Tile = KeysTile<D, DV, ROWS, TILES, PACK>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), rank = cluster_rank();
    const int batch = blockIdx.z, head = blockIdx.y * PACK, query = blockIdx.x / 8 * (ROWS / PACK);
    const u32 base = shared_address(smem), stats_full = base + Tile::BARRIERS_AT;

    if (threadIdx.x == 0) {
        barrier_init(stats_full, 1), barrier_init(stats_full + 8, 1);
        barrier_init_fence();
        barrier_expect(stats_full, Tile::SPLIT * Tile::STATS);
        barrier_expect(stats_full + 8, Tile::SPLIT * Tile::SOURCE);
    }
    __syncwarp();
    cluster_arrive_relaxed();
    int head_kv = blockIdx.y;
    if (group != PACK) head_kv = head / group;
    q += batch * q_batch + head * q_head;
    k += batch * k_batch + head_kv * k_head, v += batch * v_batch + head_kv * v_head;
    const i64 out_at = batch * out_batch + head * out_head + query * out_row;
    const KeyShare share(rank, fresh, sk);
    const KeyPlaces<Tile> places(k, v, k_row, v_row, share, warp, sk);
    const OwnRows<Tile> own;
    const KeysPeer<Tile> peer(base, warp, rank, own.first);
    const OutRows<Tile> rows(warp, rank, out_at, out_head, out_row, sq - query);
    const u32 powers_to = powers_at<Tile>(base, warp);
    QueryCopy<Tile> queries(base, warp, q, query, sq, q_head, q_row);
    // The low bit is 0, but the compiler does not know: it would move a number that is the same in all lanes to a
    // uniform register, and wait for it.
    const u64 length_at = length ? global_address(length) + (places.late_k & 1) : 0;
    cluster_wait();  // every block of the cluster has its barriers; it would wait for loads, too

    KeyFragments<Tile> keys;
    ValueFragments<Tile> values;
    if (share.end > settled) grid_wait();  // the grids before write some of these keys
    places.load_early(keys, values);
    grid_wait();
    const int valid = static_cast<int>(load_global_if(length_at, sk)) + (FRTC_SABOTAGE == 1);
    queries.load();
    places.load_late(keys, values);
    const float unit = kSame<TOut, e4m3> ? *inv : 1.0f;
    grid_release();
    const int early = min(share.end, valid) - share.first;
    const int late = (resume >= 0 ? share.late_end : min(share.late_end, valid)) - share.late;
    values.arrange_early(early, valid < fresh);
    queries.store();
    keys.settle(sk > 0);
    async_fence();
    __syncthreads();

    float s[ROWS / 2], o[Tile::PARTS][Tile::M_TILES][Tile::PART / 2], top[Tile::OWN], weight[Tile::OWN] = {};
    float* const of_warps = reinterpret_cast<float*>(smem + Tile::TOPS_AT);
    key_scores<Tile>(s, keys, base);
    values.arrange_late(late);
    wgmma_wait<0>();
    hide_keys<CAUSAL>(s, places, early, late, query + sk - sq + (FRTC_SABOTAGE == 1));
    powers<Tile>(s, top, own, of_warps, warp, scale);
    store_powers<Tile>(powers_to, s);
    async_fence();
    __syncthreads();

    key_values<Tile>(o, values, base + Tile::P_AT);
    weights<Tile>(weight, s, own, of_warps + Tile::WARPS * ROWS, warp);
    peer.send_stats(top, weight, own.mine);
    send_values<Tile>(peer, o);
    merge_rows<Tile>(smem, stats_full, warp, rows, out, unit);
}

}  // namespace frtc
