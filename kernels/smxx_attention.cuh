// out = softmax(scale * q k^T, over visible keys) v
//
//   q [B, HQ, SQ, D]   k [B, HKV, SK, D]   v [B, HKV, SK, DV]   out [B, HQ, SQ, DV]   strided views: last axis
//   contiguous, rows 16-byte aligned. The GROUP = HQ / HKV query heads that read one key head are packed into the rows
//   of a tile, query-major: row m is query m / GROUP of head m % GROUP, and all of them meet one copy of the keys.
//
//   visible   key j to query i: (length absent, or j < length, or 0 <= resume <= j), (not causal, or j <= i + SK - SQ),
//             and mask[b, h, i, j] where given. Tiles of keys that no row sees are skipped, so that a prompt budget
//             costs what the prompt uses. Hidden keys may hold anything, NaN too: their rows of v never meet a product.
//             A row that sees no key yields zeros.
//   grid      (row tiles of BM = 16 WM, splits, B * HKV)     block  32 WM WN
//   warps     WM groups of 16 rows times WN groups of BN / WN keys; the WN partial sums are added once, at the end
//   smem      q tile, STAGES tiles of k and of v; at the end [WN, BM, DV] sums in fp32 in the same bytes
//   kSplit    each of gridDim.y splits, or of as many as there are key tiles, takes a run of them and writes fp32 sums,
//             maximum and weight to scratch; the one that arrives last at a row tile adds all of them, in their order:
//             equal inputs, equal bits. `arrived` holds one counter for each row tile of each key head: zero before and
//             after.
//   rounding  scores, softmax and sums in fp32; probabilities are rounded to T for the second product; out once
//   e4m3      times inv, one number for all; or, with ROW = HQ * DV > 0, rounded to bf16 first and then stored with a
//             scale for each token, row_scale [B, SQ, 1]: attention_codes.cuh
//   moves     q and out once, k and v once for each row tile (from L2): 2 HQ SQ SK (D + DV) FLOP on tensor cores
//   tested    tests/kernels/test_smxx_attention.py
#pragma once

// Test builds that must fail: 1 hides one key too few (length, causal), 2 skips the last tile of keys, 3 gives tokens
// the scales of their neighbours, 4 leaves the last head out of a token's maximum.
#ifndef FRTC_SABOTAGE
#define FRTC_SABOTAGE 0
#endif

#include "attention_codes.cuh"
#include "attention_sums.cuh"
#include "numeric.cuh"
#include "ptx.cuh"

namespace frtc {

constexpr int round_up(int n, int step) {
    return ceil_div(n, step) * step;
}

constexpr int power_of_two(int least) {
    int n = 1;
    while (n < least) n *= 2;
    return n;
}

// Sizes of one instance, in elements. A pitch is an odd number of 16-byte chunks: ldmatrix's eight rows hit all banks.
template <int D_, int DV_, int WM_, int WN_, int BN_, int STAGES_>
struct AttentionTile {
    static constexpr int D = D_, DV = DV_, WM = WM_, WN = WN_, BN = BN_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WM * WN, BM = 16 * WM;
    static constexpr int KEYS = BN / WN;            // keys of a tile that one warp takes
    static constexpr int K_STEPS = (D + 15) / 16;   // of the first product; columns from D on are zero
    static constexpr int N_TILES = KEYS / 8;        // score fragments of a warp
    static constexpr int O_TILES = DV / 8;          // sum fragments of a warp
    static constexpr int K_PITCH = round_up(D, 16) + 8, V_PITCH = round_up(DV, 16) + 8, O_PITCH = DV + 8;
    static constexpr int Q_SIZE = BM * K_PITCH, K_SIZE = BN * K_PITCH, V_SIZE = BN * V_PITCH;
    static_assert(D % 8 == 0 && DV % 8 == 0 && KEYS % 16 == 0 && BN % WN == 0 && (STAGES == 1 || STAGES == 2));
};

// The keys that some row of a row tile may see, as a list of BN-key tiles: those of [0, end) that do not lie wholly in
// the hole [length, resume).
template <int BN>
struct KeyTiles {
    int length, resume, end;
    int head, tail, count;  // the list: tiles 0..head-1, then from `tail` on

    __device__ __forceinline__ KeyTiles(int valid, int resume_at, int end_) {
        end = max(end_, 0);
        length = min(max(valid, 0) + (FRTC_SABOTAGE == 1), end);
        resume = resume_at >= 0 ? resume_at : end;
        const int all = (end + BN - 1) / BN;
        head = (length + BN - 1) / BN;
        tail = max(head, min(resume / BN, all));
        count = max(head + all - tail - (FRTC_SABOTAGE == 2), 0);
    }
    __device__ __forceinline__ int start(int i) const { return (i < head ? i : i - head + tail) * BN; }
    __device__ __forceinline__ bool sees(int key) const { return (key < end) & ((key < length) | (key >= resume)); }
    __device__ __forceinline__ bool sees_all(int first) const {
        return first + BN <= end && (first + BN <= length || first >= resume);
    }
};

// How the block copies ROWS x COLS elements, 16 bytes a thread and step. A power of two of threads shares a row, those
// beyond COLS / 8 idle: a thread keeps its columns, and its rows are a constant apart. Addresses must cost next to
// nothing: one warp on each quarter of an SM hides no arithmetic.
template <int ROWS, int COLS, int THREADS>
struct RowCopy {
    static constexpr int CHUNKS = COLS / 8, LANES = power_of_two(CHUNKS), STEP = THREADS / LANES;

    __device__ __forceinline__ static int row() { return threadIdx.x / LANES; }
    __device__ __forceinline__ static int col() { return threadIdx.x % LANES * 8; }

    // copy(skip) for each of this thread's rows, row() + skip
    template <int UNROLL, typename Copy>
    __device__ __forceinline__ static void each(Copy copy) {
        if (CHUNKS < LANES && col() >= COLS) return;
#pragma unroll UNROLL
        for (int i = 0; i < ceil_div(ROWS, STEP); ++i)
            if (ROWS % STEP == 0 || row() + i * STEP < ROWS) copy(i * STEP);
    }
};

// Zeros in columns D.. of the rows of q and k, where D is not a multiple of 16. No load touches them later.
template <typename Tile, typename T>
__device__ __forceinline__ void clear_padding(T* q_tile) {
    if constexpr (Tile::D % 16 != 0) {
        constexpr int ROWS = Tile::BM + Tile::STAGES * Tile::BN;  // k follows q
        for (int row = threadIdx.x; row < ROWS; row += Tile::THREADS)
            *reinterpret_cast<uint4*>(q_tile + row * Tile::K_PITCH + Tile::D) = make_uint4(0, 0, 0, 0);
    }
}

// s += q k^T: 16 rows times KEYS keys of one warp. q_at and k_at are this lane's addresses of the first fragments.
template <typename T, typename Tile>
__device__ __forceinline__ void scores(float (&s)[Tile::N_TILES][4], u32 q_at, u32 k_at) {
#pragma unroll
    for (int step = 0; step < Tile::K_STEPS; ++step) {
        u32 a[4];
        ldmatrix_x4(a, q_at + step * 32);
#pragma unroll
        for (int pair = 0; pair < Tile::N_TILES / 2; ++pair) {
            u32 b[4];
            ldmatrix_x4(b, k_at + (pair * 16 * Tile::K_PITCH + step * 16) * 2);
            mma_m16n8k16<T>(s[2 * pair], a, b[0], b[1]);
            mma_m16n8k16<T>(s[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

// What one lane needs to know of its two rows of scores, g and g + 8 of the warp's 16.
struct RowView {
    int last[2];        // last key that causality lets the row see
    const u8* mask[2];  // the row's line of the mask operand
    i64 mask_step;      // between neighbouring keys: 1, or 0 where the mask is broadcast
};

// Scores of hidden keys become -inf. first: key of s[0][0]. keep: with a mask operand, for each pair of keys a bit mask
// that blanks v's rows of keys that none of the warp's 16 rows sees.
template <bool kMask, int N_TILES, int BN>
__device__ __forceinline__ void hide(float (&s)[N_TILES][4], u32 (&keep)[N_TILES], int first, const KeyTiles<BN>& keys,
                                     const RowView& rows) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        u32 seen = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int key = first + n * 8 + e % 2, r = e / 2;
            bool sees = keys.sees(key) & (key <= rows.last[r]);
            if constexpr (kMask) sees = sees && rows.mask[r][key * rows.mask_step] != 0;
            if (!sees) s[n][e] = __int_as_float(0xff800000);  // -inf
            if (sees) seen |= e % 2 ? 0xffff0000u : 0x0000ffffu;
        }
        if constexpr (kMask) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, step);
            keep[n] = seen;
        }
    }
}

// One step of the online softmax: s becomes exp2(scale (s - top)); sums and weights so far shrink to the new maximum.
template <int N_TILES, int O_TILES>
__device__ __forceinline__ void softmax_step(float (&s)[N_TILES][4], float (&o)[O_TILES][4], float (&top)[2],
                                             float (&weight)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float next = top[r];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) next = fmaxf(next, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        next = warp_max<4>(next);
        const float shrink = exp2_fast((top[r] - next) * scale), shift = next * scale;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            s[n][2 * r] = exp2_fast(fmaf(s[n][2 * r], scale, -shift));
            s[n][2 * r + 1] = exp2_fast(fmaf(s[n][2 * r + 1], scale, -shift));
            sum += s[n][2 * r] + s[n][2 * r + 1];
        }
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) o[n][2 * r] *= shrink, o[n][2 * r + 1] *= shrink;
        weight[r] = weight[r] * shrink + sum;
        top[r] = next;
    }
}

// o += p v. The score fragments of 16 keys are, rounded to T, the A fragment of the second product.
template <typename T, typename Tile, bool kMask>
__device__ __forceinline__ void add_values(float (&o)[Tile::O_TILES][4], const float (&p)[Tile::N_TILES][4],
                                           const u32 (&keep)[Tile::N_TILES], u32 v_at) {
#pragma unroll
    for (int step = 0; step < Tile::N_TILES / 2; ++step) {
        const float(&lo)[4] = p[2 * step];
        const float(&hi)[4] = p[2 * step + 1];
        const u32 a[4] = {pack2<T>(lo[0], lo[1]), pack2<T>(lo[2], lo[3]),  //
                          pack2<T>(hi[0], hi[1]), pack2<T>(hi[2], hi[3])};
#pragma unroll
        for (int pair = 0; pair < (Tile::O_TILES + 1) / 2; ++pair) {
            u32 b[4];
            ldmatrix_x4_trans(b, v_at + (step * 16 * Tile::V_PITCH + pair * 16) * 2);
            if constexpr (kMask) {
#pragma unroll
                for (int i = 0; i < 4; ++i) b[i] &= keep[2 * step + i % 2];
            }
            mma_m16n8k16<T>(o[2 * pair], a, b[0], b[1]);
            if (2 * pair + 1 < Tile::O_TILES) mma_m16n8k16<T>(o[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

// Where one block works.
template <typename Tile>
struct BlockPlace {
    int heads_kv, group, rows;  // rows: packed rows of this key head, GROUP * SQ
    int batch = static_cast<int>(blockIdx.z) / heads_kv, head = static_cast<int>(blockIdx.z) % heads_kv;
    int row0 = static_cast<int>(blockIdx.x) * Tile::BM;
    int lane = static_cast<int>(threadIdx.x) % 32;
    int wm = static_cast<int>(threadIdx.x) / 32 % Tile::WM, wn = static_cast<int>(threadIdx.x) / 32 / Tile::WM;

    __device__ __forceinline__ int query(int m) const { return m / group; }
    __device__ __forceinline__ int query_head(int m) const { return head * group + m % group; }
};

// Query i sees no key from `end` on, nor, where causal, any after i + shift.
template <typename Tile>
__device__ __forceinline__ RowView rows_of_lane(const BlockPlace<Tile>& at, int end, bool causal, int shift,
                                                const u8* mask, i64 mask_head, i64 mask_row, i64 mask_key) {
    RowView view;
    view.mask_step = mask_key;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int m = min(at.row0 + at.wm * 16 + at.lane / 4 + 8 * r, at.rows - 1);
        view.last[r] = causal ? at.query(m) + shift : end - 1;
        view.mask[r] = mask + at.query_head(m) * mask_head + at.query(m) * mask_row;
    }
    return view;
}

// BN rows of k or v from key `start` on; hidden ones become zeros. One cp.async group.
template <int COLS, int PITCH, int THREADS, typename T, int BN>
__device__ __forceinline__ void load_keys(T* to, const T* from, int row_step, const KeyTiles<BN>& keys, int start) {
    using Rows = RowCopy<BN, COLS, THREADS>;
    const int key = start + Rows::row(), row_bytes = row_step * 2;
    const char* const mine = reinterpret_cast<const char*>(from + Rows::col()) + static_cast<i64>(key) * row_bytes;
    const u32 dst = shared_address(to + Rows::row() * PITCH + Rows::col());
    if (keys.sees_all(start)) {
        Rows::template each<64>([&](int skip) {
            cp_async_16(dst + skip * PITCH * 2, mine + static_cast<i64>(skip) * row_bytes);
        });
    } else {
        Rows::template each<4>([&](int skip) {
            const bool sees = keys.sees(key + skip);
            const char* const row = mine + static_cast<i64>(skip) * row_bytes;
            cp_async_16(dst + skip * PITCH * 2, sees ? row : reinterpret_cast<const char*>(from), sees ? 16 : 0);
        });
    }
    cp_async_commit();
}

// The rows of q that the block works on; beyond the last one, that one again: nobody asks for its result.
template <typename Tile, typename T>
__device__ __forceinline__ void load_queries(T* to, const T* q, i64 q_head, i64 q_row, const BlockPlace<Tile>& at) {
    using Rows = RowCopy<Tile::BM, Tile::D, Tile::THREADS>;
    const u32 dst = shared_address(to + Rows::row() * Tile::K_PITCH + Rows::col());
    Rows::template each<4>([&](int skip) {
        const int m = min(at.row0 + Rows::row() + skip, at.rows - 1);
        cp_async_16(dst + skip * Tile::K_PITCH * 2, q + at.query_head(m) * q_head + at.query(m) * q_row + Rows::col());
    });
    cp_async_commit();
}

// Shared-memory addresses of this lane's part of the first fragments of q, k and v: see ldmatrix in ptx.cuh.
template <typename Tile, typename T>
struct FragmentAddress {
    u32 q, k, v;

    __device__ __forceinline__ FragmentAddress(const T* q_tile, const T* k_tile, const T* v_tile,
                                               const BlockPlace<Tile>& at) {
        const int lane = at.lane, key = at.wn * Tile::KEYS;
        q = shared_address(q_tile + (at.wm * 16 + lane % 16) * Tile::K_PITCH + lane / 16 * 8);
        k = shared_address(k_tile + (key + lane / 16 * 8 + lane % 8) * Tile::K_PITCH + lane / 8 % 2 * 8);
        v = shared_address(v_tile + (key + lane % 16) * Tile::V_PITCH + lane / 16 * 8);
    }
};

// The key tiles first..last-1 of the list, for all rows of the block; k and v are those of its key head. full_end: keys
// below it are hidden from a row by the hole or the mask operand only.
template <typename T, typename Tile, bool kMask>
__device__ __forceinline__ void attend(float (&o)[Tile::O_TILES][4], float (&top)[2], float (&weight)[2], T* q_tile,
                                       const T* k, int k_row, const T* v, int v_row, const KeyTiles<Tile::BN>& keys,
                                       int first, int last, int full_end, const RowView& view,
                                       const BlockPlace<Tile>& at, float scale) {
    T* const k_tile = q_tile + Tile::Q_SIZE;
    T* const v_tile = k_tile + Tile::STAGES * Tile::K_SIZE;
    const auto load_k = [&](int i) {
        load_keys<Tile::D, Tile::K_PITCH, Tile::THREADS>(k_tile + (i - first) % Tile::STAGES * Tile::K_SIZE, k, k_row,
                                                         keys, keys.start(i));
    };
    const auto load_v = [&](int i) {
        load_keys<Tile::DV, Tile::V_PITCH, Tile::THREADS>(v_tile + (i - first) % Tile::STAGES * Tile::V_SIZE, v, v_row,
                                                          keys, keys.start(i));
    };
    const FragmentAddress<Tile, T> fragment(q_tile, k_tile, v_tile, at);
    if (first < last) load_k(first), load_v(first);
    for (int i = first; i < last; ++i) {
        const int start = keys.start(i), slot = (i - first) % Tile::STAGES;
        float s[Tile::N_TILES][4] = {};
        u32 keep[Tile::N_TILES];
        // One stage: k and v take turns, k's next tile loads during the second product and v's during the first. Two
        // stages: the next tile of both loads during the whole of this one, and one barrier does.
        cp_async_wait<Tile::STAGES == 1 ? 1 : 0>();
        __syncthreads();
        if (Tile::STAGES == 2 && i + 1 < last) load_k(i + 1), load_v(i + 1);
        scores<T, Tile>(s, fragment.q, fragment.k + slot * Tile::K_SIZE * 2);
        if (Tile::STAGES == 1) {
            __syncthreads();
            i + 1 < last ? load_k(i + 1) : cp_async_commit();  // a group each time: the wait counts them
        }
        if (kMask || !keys.sees_all(start) || start + Tile::BN > full_end)
            hide<kMask>(s, keep, start + at.wn * Tile::KEYS + at.lane % 4 * 2, keys, view);
        softmax_step(s, o, top, weight, scale);
        if (Tile::STAGES == 1) cp_async_wait<1>(), __syncthreads();
        add_values<T, Tile, kMask>(o, s, keep, fragment.v + slot * Tile::V_SIZE * 2);
        if (Tile::STAGES == 1) {
            __syncthreads();
            if (i + 1 < last) load_v(i + 1);
        }
    }
}

// The sums of all warps and, where split, of all `runs` splits that have keys, divided by their weight, times *inv
// where TOut is e4m3, rounded once. False in a block whose row tile another block completes.
template <typename Tile, bool kMask, bool kSplit, typename TOut>
__device__ __forceinline__ bool finish(unsigned char* smem, const float (&o)[Tile::O_TILES][4], const float (&top)[2],
                                       const float (&weight)[2], const BlockPlace<Tile>& at, int runs, float scale,
                                       const float* inv, TOut* out, i64 out_head, i64 out_row, float* part_sums,
                                       float2* part_stats, u32* arrived) {
    constexpr int BM = Tile::BM, WN = Tile::WN, DV = Tile::DV;
    constexpr int OWN = WN == 1 ? 8 : 4;  // a thread's results at once: 8 or 16 loads from shared memory
    float* const sums = reinterpret_cast<float*>(smem);
    float2* const stats = reinterpret_cast<float2*>(sums + WN * BM * Tile::O_PITCH);
    float* const shares = reinterpret_cast<float*>(stats + WN * BM);
    i64* const places = reinterpret_cast<i64*>(shares + WN * BM);  // of the rows in `out`
    const int rows = at.rows - at.row0, row = threadIdx.x;
    const float unit = kSame<TOut, e4m3> ? *inv : 1.0f;
    const bool whole = !kSplit || runs == 1;
    const i64 part_step = static_cast<i64>(gridDim.z) * at.rows;  // rows of one split
    const i64 part0 = static_cast<i64>(blockIdx.z) * at.rows + at.row0;
    const i64 part = blockIdx.y * part_step + part0;
    const auto in_out = [&](int r, int col) { return out + places[r] + col; };
    const auto in_part = [&](int r, int col) { return part_sums + (part + r) * DV + col; };

    __syncthreads();  // all tiles are read; their bytes now hold the sums
    stage_sums<Tile>(sums, stats, o, top, weight, scale);
    __syncthreads();
    if (row < BM) {
        const float2 all = find_shares<BM, WN>(shares + row, stats + row, whole, unit);
        if (!whole && row < rows) part_stats[part + row] = all;
        places[row] = at.query_head(at.row0 + row) * out_head + at.query(at.row0 + row) * out_row;
    }
    __syncthreads();
    if (whole) {
        add_partials<Tile, WN, OWN>(sums, Tile::O_PITCH, BM * Tile::O_PITCH, shares, WN, rows, in_out);
    } else if constexpr (kSplit) {
        add_partials<Tile, WN, OWN>(sums, Tile::O_PITCH, BM * Tile::O_PITCH, shares, WN, rows, in_part);
        u32* const flag = reinterpret_cast<u32*>(stats);
        if (!last_to_arrive(arrived + blockIdx.z * gridDim.x + blockIdx.x, runs, flag)) return false;
        float* const split_shares = sums;  // the block's own sums are done with
        find_split_shares<Tile, 4>(split_shares, part_stats + part0, part_step, runs, rows, unit);
        __syncthreads();
        constexpr int ITEMS = ceil_div(DV, kMask ? 64 : 32);  // as many as registers hold: with masks 8 of 4 ways spill
        add_partials<Tile, 4, ITEMS>(part_sums + part0 * DV, DV, part_step * DV, split_shares, runs, rows, in_out);
    }
    return true;
}

// Strides are in elements: of batch, head, row (and key). part_sums [splits, B * HKV, rows, DV] and part_stats
// [splits, B * HKV, rows] are scratch, null without kSplit; staged and panel_arrived, of panels of `panel` row tiles,
// are null without ROW. scale is the op's scale times log2(e), positive.
// The bound of one block an SM keeps the compiler from spilling a few bytes to fit one block more.
template <typename T, typename TOut, int D, int DV, int WM, int WN, int BN, int STAGES, bool kMask, bool kSplit,
          int ROW>
__global__ void __launch_bounds__(32 * WM * WN, 1)
smxx_attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const u8* mask,
               const int* length, TOut* __restrict__ out, float* part_sums, float2* part_stats,
               u32* arrived, i64 q_batch, i64 q_head, i64 q_row, i64 k_batch, i64 k_head, i64 k_row, i64 v_batch,
               i64 v_head, i64 v_row, i64 mask_batch, i64 mask_head, i64 mask_row, i64 mask_key, i64 out_batch,
               i64 out_head, i64 out_row, int heads_kv, int group, int sq, int sk, int resume, int causal,
               float scale, const float* inv, float* row_scale, bf16* staged, u32* panel_arrived, i64 scale_batch,
               i64 scale_row, int panel) {
    grid_wait(), grid_release();
    using Tile = AttentionTile<D, DV, WM, WN, BN, STAGES>;
    extern __shared__ __align__(16) unsigned char smem[];
    T* const q_tile = reinterpret_cast<T*>(smem);
    const BlockPlace<Tile> at{heads_kv, group, group * sq};
    const int valid = length ? *length : sk;  // first of all: no key can be asked for before it is known

    load_queries(q_tile, q + at.batch * q_batch, q_head, q_row, at);
    clear_padding<Tile>(q_tile);

    // Past the last key that the tile's last query sees nothing is read.
    const int shift = sk - sq + (FRTC_SABOTAGE == 1);
    const int last_query = at.query(min(at.row0 + Tile::BM, at.rows) - 1);
    const KeyTiles<BN> keys(valid, resume, causal ? min(sk, last_query + shift + 1) : sk);
    const int full_end = causal ? at.query(at.row0) + shift + 1 : sk;
    const RowView view = rows_of_lane(at, sk, causal, shift, mask + at.batch * mask_batch, mask_head, mask_row,  //
                                      mask_key);

    // Where there are fewer tiles than splits the last splits have nothing to say, and nobody waits for them.
    const int split = blockIdx.y, runs = kSplit ? max(1, min(keys.count, static_cast<int>(gridDim.y))) : 1;
    if (kSplit && split >= runs) return cp_async_wait<0>();
    float o[Tile::O_TILES][4] = {}, top[2] = {kNoKey, kNoKey}, weight[2] = {};
    attend<T, Tile, kMask>(o, top, weight, q_tile, k + at.batch * k_batch + at.head * k_head, static_cast<int>(k_row),
                           v + at.batch * v_batch + at.head * v_head, static_cast<int>(v_row), keys,
                           split * keys.count / runs, (split + 1) * keys.count / runs, full_end, view, at, scale);
    cp_async_wait<0>();  // where there was no key, the queries may still be on their way into bytes used again below
    if constexpr (ROW == 0) {
        finish<Tile, kMask, kSplit>(smem, o, top, weight, at, runs, scale, inv, out + at.batch * out_batch, out_head,
                                    out_row, part_sums, part_stats, arrived);
    } else {
        bf16* const rows = staged + static_cast<i64>(at.batch) * sq * ROW;
        if (!finish<Tile, kMask, kSplit>(smem, o, top, weight, at, runs, scale, inv, rows, DV, ROW, part_sums,
                                         part_stats, arrived))
            return;
        const Panel tokens(panel_arrived, reinterpret_cast<u32*>(smem), panel, Tile::BM, at.batch, heads_kv, group, sq);
        if (tokens.complete)
            store_tokens<ROW, DV, Tile::THREADS / 32>(rows, out + at.batch * out_batch, out_head, out_row,
                                                      row_scale + at.batch * scale_batch, scale_row, tokens.first,
                                                      tokens.end, sq);
    }
}

}  // namespace frtc
