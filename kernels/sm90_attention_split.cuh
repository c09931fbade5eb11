// out = softmax(scale * q k^T, over visible keys) v, for few queries: a cluster of SPLIT blocks shares a tile of rows
//
//   q [B, HQ, SQ, D]   k [B, HKV, SK, D]   v [B, HKV, SK, DV]   out [B, HQ, SQ, DV]   bf16 views as in
//   sm90_attention.cuh, D and DV multiples of 64. Row m of a tile of ROWS is head m % PACK of query m / PACK.
//
//   visible   as in sm90_attention.cuh; CAUSAL: query i of those no key behind i + SK - SQ; without any key the result is zero
//   keys      block r takes keys r KEYS .. r KEYS + KEYS - 1, all at once: k and v are asked for as soon as the grids
//             before are complete, or at once where these are among the first `settled` rows, which they do not write;
//             before the number of valid keys is known. Which block has which keys does not depend
//             on that number: evening out what a hole leaves would cost the latency of reading it, more than it saves.
//   grid      (SPLIT * tiles of ROWS / PACK queries, HQ / PACK, B), clusters of SPLIT     block  128: one warpgroup
//   products  of 64 rows, of which ROWS count: the code runs once, fewer instructions matter more than idle rows
//   sums      Row m of a tile belongs to block m % SPLIT of the cluster. The others send their sums in bf16, packets of
//             16 bytes for each 8 columns, with maximum and weight in fp32; it adds them in the order of blocks. The
//             network between SMs takes 12 bytes a clock: the second product is made 64 columns at a time, which are
//             sent while the next are computed.
//   smem      [panels of 64 columns][rows of 128 swizzled bytes] of q, k, v; received sums; a barrier for each panel of
//             k, one for v, one for maxima and weights, one for sums. Rows ROWS .. 63 of a product are whatever
//             follows: nobody reads them.
//   rounding  scores, softmax, sums of a block in fp32; probabilities and a block's sums to bf16; out once, in e4m3
//             times *inv
//   tested    tests/kernels/test_sm90_attention_split.py
#pragma once

// Test builds that must fail: 1 hides one key too few (in KeyTiles), 2 leaves out the sums of the last block, 5 adds
// sums as if their maxima were equal, 6 leaves the hidden rows of v as they are, 7 lets each query see the key behind its last.
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE 0
#endif

#include "sm90_attention.cuh"

namespace frtc {

// Sizes of one instance, in elements; bytes where they say so.
template <int D_, int DV_, int KEYS, int ROWS_, int SPLIT_>
struct SplitTile {
    static constexpr int D = D_, DV = DV_, BN = KEYS, ROWS = ROWS_, SPLIT = SPLIT_, THREADS = 128;
    static constexpr int KEY_PANELS = D / 64, VALUE_PANELS = DV / 64, P_STEPS = BN / 16, N_TILES = BN / 8;
    static constexpr int PARTS = DV / 64, WIDTH = DV / PARTS, PART_TILES = WIDTH / 8;
    static constexpr int Q_PANEL = ROWS * 128, K_PANEL = BN * 128;  // bytes
    static constexpr int K_AT = KEY_PANELS * Q_PANEL, V_AT = K_AT + KEY_PANELS * K_PANEL;
    static constexpr int RECEIVED_AT = V_AT + VALUE_PANELS * K_PANEL;
    // From each block: OWN rows of DV sums, then (maximum, weight) of two rows eight apart in 16 bytes.
    static constexpr int OWN = ROWS / SPLIT, STATS_AT = OWN * DV * 2, SOURCE = STATS_AT + OWN * 8;
    static constexpr int BARRIERS_AT = RECEIVED_AT + SPLIT * SOURCE;
    static constexpr int STATS_BARRIER_AT = BARRIERS_AT + 8 * (KEY_PANELS + 1);
    static constexpr int PACKETS = OWN * DV / 8, ROUNDS = ceil_div(PACKETS, THREADS);
    static_assert(D % 64 == 0 && DV % 64 == 0 && product_width(BN) == BN);
    static_assert(ROWS % 16 == 0 && ROWS <= 64 && 8 % SPLIT == 0 && PACKETS % 32 == 0);
    static_assert((KEY_PANELS + VALUE_PANELS) * BN >= 64 - ROWS, "the last panel of q is read as if it had 64 rows");
};

// The value is known here, not only where it is used.
__device__ __forceinline__ void pin(u32& x) {
    asm volatile("" : "+r"(x));
}

// Which keys this lane's scores are of that somebody sees: bit 2 (n % 16) + e for score n, e of a row. Found while keys
// are on their way; then two instructions a score instead of six.
template <int N_TILES>
struct SeenKeys {
    u32 bits[ceil_div(N_TILES, 16)] = {};

    template <int BN>
    __device__ __forceinline__ SeenKeys(const KeyTiles<BN>& keys, int first) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                bits[n / 16] |= static_cast<u32>(keys.sees(first + n * 8 + e)) << (n % 16 * 2 + e);
#pragma unroll
        for (u32& word : bits) pin(word);
    }

    __device__ __forceinline__ void hide_others(float (&s)[N_TILES][4]) const {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!(bits[n / 16] >> (n % 16 * 2 + e % 2) & 1)) s[n][e] = __int_as_float(0xff800000);  // -inf
    }
};

// Hides keys behind each row's last one. last: the last key that the tile's first query sees.
template <int N_TILES, int PACK>
__device__ __forceinline__ void hide_later(float (&s)[N_TILES][4], int start, int last) {
    if (start + N_TILES * 8 - 1 <= last) return;  // every row sees all keys of the block
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, first = start + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int most = last + (row + 8 * r) / PACK - first + (FRTC_SABOTAGE == 7);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (n * 8 + e > most) s[n][2 * r + e] = __int_as_float(0xff800000);  // -inf
    }
}

// s becomes exp2(scale (s - top)), of two rows; weight: this lane's part of their sums.
template <int N_TILES>
__device__ __forceinline__ void softmax_once(float (&s)[N_TILES][4], float (&top)[2], float (&weight)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float most[2] = {kNoKey, kNoKey};
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) most[n % 2] = fmaxf(most[n % 2], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top[r] = warp_max<4>(fmaxf(most[0], most[1]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float shift = top[r] * scale;
        float sum[2] = {};
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                s[n][2 * r + e] = exp2_fast(fmaf(s[n][2 * r + e], scale, -shift));
                sum[e] += s[n][2 * r + e];
            }
        weight[r] = sum[0] + sum[1];
    }
}

// Where a lane sends the sums of its rows g and g + 8 of its warp's 16: to one block, 8 % SPLIT is 0.
template <typename Tile>
struct Peer {
    u32 sums, stats, barriers;

    __device__ __forceinline__ Peer(u32 smem, int rank) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const u32 from = cluster_address(smem, g % Tile::SPLIT) + Tile::RECEIVED_AT + rank * Tile::SOURCE;
        sums = from + (warp * 16 / Tile::SPLIT + g / Tile::SPLIT) * Tile::DV * 2 + t * 16;
        stats = from + Tile::STATS_AT + (warp * 8 + g) / Tile::SPLIT * 16;
        barriers = cluster_address(smem, g % Tile::SPLIT) + Tile::STATS_BARRIER_AT;
        pin(sums), pin(stats), pin(barriers);
    }

    __device__ __forceinline__ void send_stats(const float (&top)[2], const float (&weight)[2]) const {
        if (threadIdx.x % 4 == 0) store_async(stats, barriers, top[0], weight[0], top[1], weight[1]);
    }

    // One part of the columns. Packet 4 j + t of a row has columns 32 j + 8 i + 2 t + {0, 1} for i = 0 .. 3.
    __device__ __forceinline__ void send(const float (&o)[Tile::PART_TILES][4], int part) const {
#pragma unroll
        for (int j = 0; j < Tile::PART_TILES / 4; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[i] = __uint_as_float(pack2<bf16>(o[4 * j + i][2 * h], o[4 * j + i][2 * h + 1]));
                const int at = h * 8 / Tile::SPLIT * Tile::DV * 2 + (part * Tile::WIDTH / 32 + j) * 64;
                store_async(sums + at, barriers + 8, x[0], x[1], x[2], x[3]);
            }
    }
};

// What each block's sums of row m count in the total, and the result's unit over the total's weight.
template <typename Tile>
struct Shares {
    float of[Tile::SPLIT], factor;

    __device__ __forceinline__ Shares(const unsigned char* received, int m, float scale, float unit) {
        const int at = Tile::STATS_AT + (m / 16 * 8 + m % 8) / Tile::SPLIT * 16 + m / 8 % 2 * 8;
        float2 stat[Tile::SPLIT];
        float top = kNoKey, total = 0.0f;
#pragma unroll
        for (int r = 0; r < Tile::SPLIT; ++r) {
            stat[r] = *reinterpret_cast<const float2*>(received + r * Tile::SOURCE + at);
            top = fmaxf(top, stat[r].x);
        }
#pragma unroll
        for (int r = 0; r < Tile::SPLIT; ++r) {
            of[r] = FRTC_SABOTAGE == 5 ? 1.0f : exp2_fast((stat[r].x - top) * scale);
            if (FRTC_SABOTAGE == 2 && r == Tile::SPLIT - 1) of[r] = 0.0f;
            total = fmaf(of[r], stat[r].y, total);
        }
        factor = total > 0.0f ? __fdividef(unit, total) : 0.0f;
    }
};

// One packet of this block's rows, of all blocks, to out.
template <typename Tile, typename TOut>
__device__ __forceinline__ void merge_packet(const unsigned char* sums, const Shares<Tile>& shares, TOut* to,
                                             bool exists) {
    float all[8] = {};
#pragma unroll
    for (int r = 0; r < Tile::SPLIT; ++r) {
        const uint4 packet = *reinterpret_cast<const uint4*>(sums + r * Tile::SOURCE);
        const u32 pairs[4] = {packet.x, packet.y, packet.z, packet.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = unpack_bf16(pairs[i]);
            all[2 * i] = fmaf(shares.of[r], two.x, all[2 * i]);
            all[2 * i + 1] = fmaf(shares.of[r], two.y, all[2 * i + 1]);
        }
    }
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float first = all[2 * i] * shares.factor, second = all[2 * i + 1] * shares.factor;
        if constexpr (kSame<TOut, e4m3>)
            x[i] = __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
        else
            x[i] = pack2<TOut>(first, second);
    }
    gather_tile(x, threadIdx.x % 4);
    if (!exists) return;
    if constexpr (kSame<TOut, e4m3>)
        *reinterpret_cast<uint2*>(to) = make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
    else
        *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
}

// s = q k^T, panel by panel as they arrive.
template <typename Tile>
__device__ __forceinline__ void split_scores(float (&s)[Tile::N_TILES][4], u32 smem) {
    auto& flat = reinterpret_cast<float(&)[Tile::BN / 2]>(s);
#pragma unroll
    for (int panel = 0; panel < Tile::KEY_PANELS; ++panel) {
        barrier_wait(smem + Tile::BARRIERS_AT + 8 * panel, 0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma<bf16, Tile::BN>(flat, descriptor(smem + panel * Tile::Q_PANEL + step * 32),
                                  descriptor(smem + Tile::K_AT + panel * Tile::K_PANEL + step * 32), panel + step > 0);
        wgmma_commit();
    }
    wgmma_wait<0>();
}

// o = p v, one group of products for each panel of columns; not waited for. a: p as fragments.
template <typename Tile>
__device__ __forceinline__ void split_values(float (&o)[Tile::PARTS][Tile::PART_TILES][4], u32 (&a)[Tile::P_STEPS][4],
                                             const float (&p)[Tile::N_TILES][4], u32 v_at) {
#pragma unroll
    for (int step = 0; step < Tile::P_STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[step][i] = pack2<bf16>(p[2 * step + i / 2][i % 2 * 2], p[2 * step + i / 2][i % 2 * 2 + 1]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < Tile::PARTS; ++part) {
        auto& flat = reinterpret_cast<float(&)[Tile::WIDTH / 2]>(o[part]);
        const u32 at = v_at + part * Tile::K_PANEL;
#pragma unroll
        for (int step = 0; step < Tile::P_STEPS; ++step)
            wgmma<bf16, Tile::WIDTH, true>(flat, a[step], descriptor_mn(at + step * 16 * 128, Tile::K_PANEL), step > 0);
        wgmma_commit();
    }
}

// Sends each part of the sums when its products are done.
template <typename Tile, int PART = 0>
__device__ __forceinline__ void send_parts(const Peer<Tile>& peer, const float (&o)[Tile::PARTS][Tile::PART_TILES][4],
                                           bool has_rows) {
    wgmma_wait<Tile::PARTS - 1 - PART>();
    if (has_rows) peer.send(o[PART], PART);
    if constexpr (PART + 1 < Tile::PARTS) send_parts<Tile, PART + 1>(peer, o, has_rows);
}

// No pointer is __restrict__: see sm90_attention. Strides of out are in elements. group = HQ / HKV. scale is the op's
// scale times log2(e).
template <typename TOut, int D, int DV, int KEYS, int ROWS, int SPLIT, int PACK, bool CAUSAL>
__global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(128, 1)
sm90_attention_split(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                     const __grid_constant__ TensorMap v_map, const int* length, TOut* out, i64 out_batch, i64 out_head,
                     i64 out_row, int group, int sq, int sk, int resume, float scale, const float* inv, int settled) {
    using Tile = SplitTile<D, DV, KEYS, ROWS, SPLIT>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    const int batch = blockIdx.z, head = blockIdx.y * PACK, query = blockIdx.x / SPLIT * (ROWS / PACK);
    const int rank = cluster_rank(), start = rank * KEYS;
    const u32 base = shared_address(smem), panel_full = base + Tile::BARRIERS_AT;
    const u32 v_full = panel_full + 8 * Tile::KEY_PANELS, stats_full = base + Tile::STATS_BARRIER_AT;

    if (threadIdx.x == 0) {
        tensor_map_prefetch(q_map), tensor_map_prefetch(k_map), tensor_map_prefetch(v_map);
#pragma unroll
        for (int i = 0; i < Tile::KEY_PANELS; ++i) barrier_init(panel_full + 8 * i, 1);
        barrier_init(v_full, Tile::VALUE_PANELS), barrier_init(stats_full, 1), barrier_init(stats_full + 8, 1);
        barrier_init_fence();
        barrier_expect(stats_full, ROWS * 8), barrier_expect(stats_full + 8, ROWS * DV * 2);
    }
    __syncwarp();
    cluster_arrive_relaxed();
    const Peer<Tile> peer(base, rank);
    int head_kv = blockIdx.y;  // the compiler would put the division behind the wait, on the way to the first copy
    if (group != PACK) head_kv = head / group;
    cluster_wait();  // every block of the cluster has its barriers
    const u32 full = panel_full + 8 * warp;
    const auto load_keys = [&] {
        if (warp < Tile::KEY_PANELS)
            tensor_load(base + Tile::K_AT + warp * Tile::K_PANEL, k_map, full, warp * 64, head_kv, start, batch);
        if (warp < Tile::VALUE_PANELS)
            tensor_load(base + Tile::V_AT + warp * Tile::K_PANEL, v_map, v_full, warp * 64, head_kv, start, batch);
    };
    const bool ahead = start + KEYS <= settled;  // keys that the grids before do not write
    if (lane == 0) {
        if (warp < Tile::KEY_PANELS) barrier_expect(full, Tile::Q_PANEL + Tile::K_PANEL);
        if (warp < Tile::VALUE_PANELS) barrier_expect(v_full, Tile::K_PANEL);
        if (ahead) load_keys();
    }
    grid_wait();
    if (lane == 0) {
        if (warp < Tile::KEY_PANELS)
            tensor_load(base + warp * Tile::Q_PANEL, q_map, full, warp * 64, head, query, batch);
        if (!ahead) load_keys();
    }
    grid_release();
    const KeyTiles<KEYS> keys(length ? *length : sk, resume, sk);
    const float unit = kSame<TOut, e4m3> ? *inv : 1.0f;
    const SeenKeys<Tile::N_TILES> seen(keys, start + lane % 4 * 2);
    const bool hole = max(keys.length, start) < min(keys.resume, start + KEYS);  // rows past the end came as zeros

    float s[Tile::N_TILES][4], o[Tile::PARTS][Tile::PART_TILES][4], top[2], weight[2];
    u32 a[Tile::P_STEPS][4];
    split_scores<Tile>(s, base);
    if (!keys.sees_all(start)) seen.hide_others(s);
    if constexpr (CAUSAL) hide_later<Tile::N_TILES, PACK>(s, start, query + sk - sq);
    softmax_once(s, top, weight, scale);
    barrier_wait(v_full, 0);
    if (hole && FRTC_SABOTAGE != 6) {
        clear_hidden<Tile>(smem + Tile::V_AT, keys, start, threadIdx.x);
        async_fence();
        __syncthreads();
    }
    split_values<Tile>(o, a, s, base + Tile::V_AT);
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = warp_sum<4>(weight[r]);
    if (warp * 16 < ROWS) peer.send_stats(top, weight);
    send_parts<Tile>(peer, o, warp * 16 < ROWS);

    const unsigned char* const received = smem + Tile::RECEIVED_AT;
    barrier_wait(stats_full, 0);
#pragma unroll
    for (int round = 0; round < Tile::ROUNDS; ++round) {
        if (round * Tile::THREADS + warp * 32 >= Tile::PACKETS) break;  // a whole warp has packets, or none
        const int packet = round * Tile::THREADS + threadIdx.x, column = packet % (DV / 8) / 4 * 32 + packet % 4 * 8;
        const int row = packet / (DV / 8) * SPLIT + rank, at = query + row / PACK;
        const Shares<Tile> shares(received, row, scale, unit);
        TOut* const to = out + batch * out_batch + (head + row % PACK) * out_head + at * out_row + column;
        if (round == 0) barrier_wait(stats_full + 8, 0);
        merge_packet<Tile>(received + packet * 16, shares, to, at < sq);
    }
}

}  // namespace frtc
