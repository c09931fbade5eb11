// out = softmax(scale * q k^T, over visible keys) v, by wgmma
//
//   q [B, HQ, SQ, D]   k [B, HKV, SK, D]   v [B, HKV, SK, DV]   out [B, HQ, SQ, DV]   strided views, the operands' read
//   through tensor maps: last axis contiguous, other strides multiples of 16 bytes. PACK neighbouring query heads that
//   read one key head share a tile of 64 rows: row m is head m % PACK of query m / PACK.
//
//   visible   key j: length absent, or j < length, or 0 <= resume <= j. Tiles of keys that nobody sees are skipped.
//             Hidden keys may hold anything, NaN too: their scores are set and their rows of v are cleared in shared
//             memory. Without any key the result is zero.
//   grid      (tiles of 64 / PACK queries, HQ / PACK, B)     block  256: two warpgroups
//   keys      the warpgroups share the 64 rows and take tiles of BN keys in turn. Each has one slot for k, one for v:
//             the next k comes during softmax and second product, the next v during the first. While one of them is in
//             its softmax the other has the tensor cores. At the end each adds up the sums of half the columns.
//   smem      rows of 128 swizzled bytes: [panels of 64 columns][rows]; q, k and v of each warpgroup; 5 mbarriers
//   rounding  scores, softmax and sums in fp32; probabilities are rounded to T for the second product; out once, in
//             e4m3 times *inv
//   moves     q and out once, k and v once for each row tile (from L2): 2 HQ SQ SK (D + DV) FLOP on tensor cores
//   tested    tests/kernels/test_sm90_attention.py
#pragma once

// Test builds that must fail: 1 hides one key too few, 2 skips the last tile of keys (both in KeyTiles), 5 adds the two
// warpgroups' sums as if their maxima were equal, 6 leaves the hidden rows of v as they are.
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE 0
#endif

#include "sm90.cuh"
#include "smxx_attention.cuh"

namespace frtc {

// Widths that sm90.cuh has of a product of 64 rows.
constexpr int product_width(int columns) {
    for (const int width : {32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256})
        if (width >= columns) return width;
    return 0;
}

// Sizes of one instance, in elements; bytes where they say so.
template <typename T, int D_, int DV_, int BN_>
struct GroupTile {
    static constexpr int D = D_, DV = DV_, BN = BN_, BM = 64, THREADS = 256;
    static constexpr int K_STEPS = ceil_div(D, 16), P_STEPS = BN / 16;
    static constexpr int N_TILES = BN / 8, O_WIDTH = product_width(DV), O_TILES = O_WIDTH / 8;
    static constexpr int KEY_PANELS = ceil_div(D, 64), VALUE_PANELS = ceil_div(DV, 64);
    static constexpr int Q_PANEL = BM * 128, K_PANEL = BN * 128;  // bytes
    static constexpr int Q_BYTES = KEY_PANELS * Q_PANEL, K_BYTES = KEY_PANELS * K_PANEL;
    static constexpr int V_BYTES = VALUE_PANELS * K_PANEL;
    static constexpr int BARRIERS_AT = Q_BYTES + 2 * (K_BYTES + V_BYTES);
    // What the warpgroups hand each other at the end takes the place of their keys and values.
    static constexpr int OUT_TILES = DV / 8, FIRST_HALF = ceil_div(OUT_TILES, 2);
    static_assert(D % 8 == 0 && DV % 8 == 0 && BN % 16 == 0 && product_width(BN) == BN && sizeof(T) == 2);
    static_assert(O_WIDTH <= 64 * VALUE_PANELS && (OUT_TILES + 2) * 128 * 16 <= 2 * (K_BYTES + V_BYTES));
};

// Which warpgroup of the block this is, as a number that the compiler knows to be the same in the whole warp: addresses
// made of it stay in uniform registers, where descriptors and copies want them.
__device__ __forceinline__ int warpgroup() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
}

// Copies of one warpgroup: a box for each panel of 64 columns.
template <int PANELS, int PANEL>
__device__ __forceinline__ void load_panels(u32 to, const TensorMap& map, u32 barrier, int head, int row, int batch) {
    barrier_expect(barrier, PANELS * PANEL);
#pragma unroll
    for (int p = 0; p < PANELS; ++p) tensor_load(to + p * PANEL, map, barrier, p * 64, head, row, batch);
}

// s = q k^T for the keys of one tile.
template <typename T, typename Tile>
__device__ __forceinline__ void group_scores(float (&s)[Tile::N_TILES][4], u32 q_at, u32 k_at) {
    auto& flat = reinterpret_cast<float(&)[Tile::BN / 2]>(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::K_STEPS; ++step) {
        const int panel = step / 4, within = step % 4 * 32;
        wgmma<T, Tile::BN>(flat, descriptor(q_at + panel * Tile::Q_PANEL + within),
                           descriptor(k_at + panel * Tile::K_PANEL + within), step > 0);
    }
    wgmma_commit();
}

// o += p v: scores of 16 keys, rounded to T, are the A fragment of a step of the second product.
template <typename T, typename Tile>
__device__ __forceinline__ void group_values(float (&o)[Tile::O_TILES][4], const float (&p)[Tile::N_TILES][4],
                                             u32 v_at) {
    auto& flat = reinterpret_cast<float(&)[Tile::O_WIDTH / 2]>(o);
    u32 a[Tile::P_STEPS][4];
#pragma unroll
    for (int step = 0; step < Tile::P_STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[step][i] = pack2<T>(p[2 * step + i / 2][i % 2 * 2], p[2 * step + i / 2][i % 2 * 2 + 1]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::P_STEPS; ++step)
        wgmma<T, Tile::O_WIDTH, true>(flat, a[step], descriptor_mn(v_at + step * 16 * 128, Tile::K_PANEL), 1);
    wgmma_commit();
}

// Zeros in the rows of v whose keys nobody sees, by the 128 threads of a warpgroup.
template <typename Tile>
__device__ __forceinline__ void clear_hidden(unsigned char* v, const KeyTiles<Tile::BN>& keys, int start, int thread) {
    for (int row = thread / 8; row < Tile::BN; row += 16) {
        if (keys.sees(start + row)) continue;
#pragma unroll
        for (int p = 0; p < Tile::VALUE_PANELS; ++p)
            *reinterpret_cast<uint4*>(v + p * Tile::K_PANEL + row * 128 + thread % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
}

// Of four lanes that hold two columns each of four tiles of 8: lane t gets all columns of tile t, in order.
__device__ __forceinline__ void gather_tile(u32 (&x)[4], int t) {
    const bool odd = t & 1, high = t & 2;
    const u32 a = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
    const u32 b = __shfl_xor_sync(0xffffffffu, odd ? x[2] : x[3], 1);
    x[0] = odd ? a : x[0], x[1] = odd ? x[1] : a, x[2] = odd ? b : x[2], x[3] = odd ? x[3] : b;
    const u32 c = __shfl_xor_sync(0xffffffffu, high ? x[0] : x[2], 2);
    const u32 d = __shfl_xor_sync(0xffffffffu, high ? x[1] : x[3], 2);
    x[0] = high ? c : x[0], x[1] = high ? d : x[1], x[2] = high ? x[2] : c, x[3] = high ? x[3] : d;
}

// The tiles FIRST..LAST-1 of the results of this lane's two rows; null where the row does not exist.
template <int FIRST, int LAST, typename TOut, int TILES>
__device__ __forceinline__ void store_tiles(TOut* const (&row)[2], const float (&o)[TILES][4], int t) {
    constexpr int GROUPS = (LAST - FIRST) / 4;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int first = FIRST + 4 * group, col = (first + t) * 8;
        u32 x[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&v)[4] = o[first + i];
            if constexpr (kSame<TOut, e4m3>) {
                const u32 low = __nv_cvt_float2_to_fp8x2(make_float2(v[0], v[1]), __NV_SATFINITE, __NV_E4M3);
                const u32 high = __nv_cvt_float2_to_fp8x2(make_float2(v[2], v[3]), __NV_SATFINITE, __NV_E4M3);
                x[0][i] = low | high << 16;
            } else {
                x[0][i] = pack2<TOut>(v[0], v[1]), x[1][i] = pack2<TOut>(v[2], v[3]);
            }
        }
        gather_tile(x[0], t);
        if constexpr (kSame<TOut, e4m3>) {
            const uint2 low = make_uint2(__byte_perm(x[0][0], x[0][1], 0x5410), __byte_perm(x[0][2], x[0][3], 0x5410));
            const uint2 high = make_uint2(__byte_perm(x[0][0], x[0][1], 0x7632), __byte_perm(x[0][2], x[0][3], 0x7632));
            if (row[0]) *reinterpret_cast<uint2*>(row[0] + col) = low;
            if (row[1]) *reinterpret_cast<uint2*>(row[1] + col) = high;
        } else {
            gather_tile(x[1], t);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (row[r]) *reinterpret_cast<uint4*>(row[r] + col) = make_uint4(x[r][0], x[r][1], x[r][2], x[r][3]);
        }
    }
#pragma unroll
    for (int n = FIRST + 4 * GROUPS; n < LAST; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float pair[2] = {o[n][2 * r], o[n][2 * r + 1]};
            if (row[r]) store_f32<2>(row[r] + n * 8 + 2 * t, pair);
        }
}

// The tiles FIRST..LAST-1 of this thread to or from shared memory, 16 bytes a thread and tile.
template <int FIRST, int LAST, int TILES>
__device__ __forceinline__ void hand_over(float4* to, const float (&o)[TILES][4], int thread) {
#pragma unroll
    for (int n = FIRST; n < LAST; ++n) to[n * 128 + thread] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
}

template <int FIRST, int LAST, int TILES>
__device__ __forceinline__ void take_over(float (&o)[TILES][4], const float4* from, const float (&mine)[2],
                                          const float (&other)[2], int thread) {
#pragma unroll
    for (int n = FIRST; n < LAST; ++n) {
        const float4 x = from[n * 128 + thread];
        o[n][0] = o[n][0] * mine[0] + x.x * other[0], o[n][1] = o[n][1] * mine[0] + x.y * other[0];
        o[n][2] = o[n][2] * mine[1] + x.z * other[1], o[n][3] = o[n][3] * mine[1] + x.w * other[1];
    }
}

// Both warpgroups' sums, divided by their weight, times `unit`: each stores half of the columns.
template <typename Tile, typename TOut>
__device__ __forceinline__ void finish_groups(unsigned char* room, float (&o)[Tile::O_TILES][4], const float (&top)[2],
                                              float (&weight)[2], float scale, float unit, TOut* const (&row)[2]) {
    constexpr int HALF = Tile::FIRST_HALF, ALL = Tile::OUT_TILES;
    const int group = warpgroup(), thread = threadIdx.x % 128, t = threadIdx.x % 4;
    float4* const sums = reinterpret_cast<float4*>(room);
    float4* const stats = sums + ALL * 128;
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = warp_sum<4>(weight[r]);
    __syncthreads();  // keys and values are used up
    stats[group * 128 + thread] = make_float4(top[0], top[1], weight[0], weight[1]);
    if (group == 0)
        hand_over<HALF, ALL>(sums, o, thread);
    else
        hand_over<0, HALF>(sums, o, thread);
    __syncthreads();
    const float4 stat = stats[(1 - group) * 128 + thread];
    const float other_top[2] = {stat.x, stat.y}, other_weight[2] = {stat.z, stat.w};
    float mine[2], other[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float all = fmaxf(top[r], other_top[r]);
        mine[r] = exp2_fast((top[r] - all) * scale), other[r] = exp2_fast((other_top[r] - all) * scale);
        if (FRTC_SABOTAGE == 5) mine[r] = other[r] = 1.0f;
        const float total = mine[r] * weight[r] + other[r] * other_weight[r];
        const float factor = total > 0.0f ? __fdividef(unit, total) : 0.0f;
        mine[r] *= factor, other[r] *= factor;
    }
    if (group == 0) {
        take_over<0, HALF>(o, sums, mine, other, thread);
        store_tiles<0, HALF>(row, o, t);
    } else {
        take_over<HALF, ALL>(o, sums, mine, other, thread);
        store_tiles<HALF, ALL>(row, o, t);
    }
}

// No pointer is __restrict__: what it points to may be written until grid_wait() returns, and loads of what nobody
// writes may be moved before it. Strides of out are in elements. group = HQ / HKV. scale is the op's times log2(e).
template <typename T, typename TOut, int D, int DV, int BN, int PACK>
__global__ void __launch_bounds__(256, 1)
sm90_attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
               const __grid_constant__ TensorMap v_map, const int* length, TOut* out, i64 out_batch, i64 out_head,
               i64 out_row, int group, int sq, int sk, int resume, float scale, const float* inv) {
    using Tile = GroupTile<T, D, DV, BN>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const int wg = warpgroup(), thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int batch = blockIdx.z, head = blockIdx.y * PACK, query = blockIdx.x * (64 / PACK);
    int head_kv = blockIdx.y;  // the compiler would put the division behind the wait, on the way to the first copy
    if (group != PACK) head_kv = head / group;
    unsigned char* const v_slot = smem + Tile::Q_BYTES + 2 * Tile::K_BYTES + wg * Tile::V_BYTES;
    const u32 q_at = shared_address(smem), k_at = q_at + Tile::Q_BYTES + wg * Tile::K_BYTES;
    const u32 v_at = shared_address(v_slot);
    const u32 q_full = q_at + Tile::BARRIERS_AT, k_full = q_full + 8 + 16 * wg, v_full = k_full + 8;

    if (threadIdx.x == 0) {
        tensor_map_prefetch(q_map), tensor_map_prefetch(k_map), tensor_map_prefetch(v_map);
#pragma unroll
        for (int i = 0; i < 5; ++i) barrier_init(q_full + 8 * i, 1);
        barrier_init_fence();
    }
    __syncthreads();
    grid_wait();

    if (threadIdx.x == 0) load_panels<Tile::KEY_PANELS, Tile::Q_PANEL>(q_at, q_map, q_full, head, query, batch);
    const KeyTiles<BN> keys(length ? *length : sk, resume, sk);
    const auto load_k = [&](int i) {
        load_panels<Tile::KEY_PANELS, Tile::K_PANEL>(k_at, k_map, k_full, head_kv, keys.start(i), batch);
    };
    const auto load_v = [&](int i) {
        load_panels<Tile::VALUE_PANELS, Tile::K_PANEL>(v_at, v_map, v_full, head_kv, keys.start(i), batch);
    };
    if (thread == 0 && wg < keys.count) load_k(wg), load_v(wg);
    // Not before the wait: a grid after the next one could begin and double up on some SMs: slower than full edges.
    grid_release();
    barrier_wait(q_full, 0);

    const float unit = kSame<TOut, e4m3> ? *inv : 1.0f;
    RowView all_keys;
    all_keys.last[0] = all_keys.last[1] = sk - 1;
    float o[Tile::O_TILES][4] = {}, top[2] = {kNoKey, kNoKey}, weight[2] = {};
    u32 phase = 0;
    for (int i = wg; i < keys.count; i += 2, phase ^= 1) {
        float s[Tile::N_TILES][4];
        u32 keep[Tile::N_TILES];
        const int start = keys.start(i);
        const bool whole = keys.sees_all(start);
        barrier_wait(k_full, phase);
        group_scores<T, Tile>(s, q_at, k_at);
        wgmma_wait<0>();
        named_barrier(1 + wg, 128);  // all four warps are done with k
        if (thread == 0 && i + 2 < keys.count) load_k(i + 2);
        if (!whole) hide<false>(s, keep, start + lane % 4 * 2, keys, all_keys);
        softmax_step(s, o, top, weight, scale);
        barrier_wait(v_full, phase);
        if (!whole && FRTC_SABOTAGE != 6) {
            clear_hidden<Tile>(v_slot, keys, start, thread);
            async_fence();
            named_barrier(1 + wg, 128);
        }
        group_values<T, Tile>(o, s, v_at);
        wgmma_wait<0>();
        named_barrier(1 + wg, 128);
        if (thread == 0 && i + 2 < keys.count) load_v(i + 2);
    }

    TOut* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int m = thread / 32 * 16 + lane / 4 + 8 * r, at = query + m / PACK;
        row[r] = at < sq ? out + batch * out_batch + (head + m % PACK) * out_head + at * out_row : nullptr;
    }
    finish_groups<Tile>(smem + Tile::Q_BYTES, o, top, weight, scale, unit, row);
}

}  // namespace frtc
