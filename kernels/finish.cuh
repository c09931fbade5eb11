// The finish of a product: what needs whole rows of it. A product's blocks store tiles; the one that stores the last tile
// of a panel of BM rows makes of each row s of the panel
//
//   y = s, or its norm (smxx_norm.cuh), stored as it is; in e4m3 as y * inv, one number for all rows; or, kPerRow, as
//   y * (448 / m) with m the largest magnitude of the row and m / 448 in scale
//
//   s      [M, N] S: bf16, f16; as the epilogue stored it, rows at multiples of 16 bytes
//   w, b   [N]       y [M, N] S or e4m3       scale [M] fp32     each with a stride from row to row and batch to batch
//   order  every block adds 1 to its panel's counter behind its stores (release); the one that completes gridDim.y sees
//          them all (acquire) and reads them in L2. Blocks that `rows` sends home count in no panel; of the shares of
//          split K only the one that stores counts. A counter is zero before and after
//   rows   one warp a row, two rows of a warp at a time, as many on their way as fit: cp.async from L2 into the memory of
//          the ring, past L1. Statistics in fp32 in a fixed order, the variance from centred values
//   w, b   go to shared memory in every block while it waits for its count: in the last one they are then at hand
//   moves  2 N bytes a row from L2 through one SM, and its arithmetic: about 0.1 clocks an element. That is why tall
//          panels are left to launches of their own (smxx_finish_gemm.py)
//   SPREAD  every block of a panel waits until all of them have stored, then each finishes some rows: one by all of its
//          threads, or more, a row a warp. All blocks of the launch must be on SMs at once. The counter counts them again
//          as they go on; the last one makes it zero
#pragma once

#include "epilogue.cuh"
#include "ptx.cuh"
#include "smxx_norm.cuh"

namespace frtc {

template <Norm KIND_, typename W_, typename B_>
struct NormOf {
    static constexpr Norm KIND = KIND_;
    using W = W_;
    using B = B_;
};
struct NoNorm : NormOf<Norm::rms, Absent, Absent> {};  // y = s

// The rows of a product and what is made of them; one for all blocks of a batch.
template <int N, typename S, typename Y, bool kPerRow, typename NORM>
struct RowFinish {
    using W = typename NORM::W;
    using B = typename NORM::B;

    static constexpr bool NORMED = !kSame<NORM, NoNorm>, CENTERED = NORMED && NORM::KIND == Norm::layer;
    static constexpr bool SCALED = kSame<Y, e4m3>;
    static constexpr int VEC = 8, GROUPS = ceil_div(N, VEC), ROW_BYTES = GROUPS * 16;
    static constexpr int W_BYTES = kPresent<W> ? GROUPS * VEC * sizeof(W) : 0;
    static constexpr int B_BYTES = kPresent<B> ? GROUPS * VEC * sizeof(B) : 0;
    static_assert(sizeof(S) == 2 && (SCALED || !kPerRow), "16-bit rows; only e4m3 has scales");

    const S* s;
    const W* w;
    const B* b;
    Y* y;
    float* scale;
    int rows, ld_s, ld_y, ld_scale;
    float inv, eps, offset;

    // Starts the copy of w and b, by the whole block, to where panel() finds them behind a wait and a barrier.
    template <int THREADS>
    __device__ __forceinline__ void prepare(u8* smem) const {
        if constexpr (kPresent<W>) fetch<THREADS>(reinterpret_cast<W*>(smem), w, threadIdx.x);
        if constexpr (kPresent<B>) fetch<THREADS>(reinterpret_cast<B*>(smem + W_BYTES), b, threadIdx.x);
        cp_async_commit();
    }

    // Every step-th of `count` rows from row0 on, beginning with `first`, by a warp; TOGETHER of them at a time. The SMEM
    // bytes of shared memory, which begin with w and b, are shared by the warps.
    template <int THREADS, int SMEM, int TOGETHER>
    __device__ __forceinline__ void panel(u8* smem, int row0, int count, int first, int step) const {
        constexpr int WARPS = THREADS / 32, FIT = (SMEM - W_BYTES - B_BYTES) / WARPS / ROW_BYTES;
        constexpr int R = FIT < TOGETHER ? 1 : TOGETHER, SLOTS = FIT / R * R;
        static_assert(FIT > 0, "a warp has room for a row");
        u8* const own = smem + W_BYTES + B_BYTES + threadIdx.x / 32 * (SLOTS * ROW_BYTES);
        for (; first < count; first += step * SLOTS) {
            const int mine = min(SLOTS, (count - first + step - 1) / step);
            for (int i = 0; i < mine; ++i) {
                const i64 row = row0 + first + i * step;
                fetch<32>(reinterpret_cast<S*>(own + i * ROW_BYTES), s + row * ld_s, lane());
            }
            cp_async_commit();
            cp_async_wait<0>();
            __syncwarp();
            for (int i = 0; i < mine; i += R)
                make<R>(smem, reinterpret_cast<const S*>(own + i * ROW_BYTES), row0 + first + i * step, step, mine - i);
            __syncwarp();  // all lanes have read what the next rows overwrite
        }
    }

    // One row, by THREADS threads; w and b lie in `vectors`. Read past L1: other blocks wrote it.
    template <int THREADS>
    __device__ __forceinline__ void whole_row(const u8* vectors, int row) const {
        constexpr int ITEMS = ceil_div(GROUPS, THREADS);
        __shared__ float partial[2][THREADS / 32];
        __shared__ unsigned int tops[THREADS / 32];
        float v[ITEMS][VEC];
        const S* const from = s + static_cast<i64>(row) * ld_s;
        const auto group = [](int i) { return static_cast<int>(threadIdx.x) + i * THREADS; };
        const auto count = [&](int i) { return N - group(i) * VEC; };  // of elements that exist
        float sum = 0.0f, squares = 0.0f, out = inv;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (aligned<VEC>(from)) {
                const uint4 eight = group(i) < GROUPS ? __ldcg(reinterpret_cast<const uint4*>(from) + group(i)) : uint4{};
                load_f32(v[i], reinterpret_cast<const S*>(&eight));
            } else {
#pragma unroll
                for (int j = 0; j < VEC; ++j) v[i][j] = j < count(i) ? to_f32(__ldcg(from + group(i) * VEC + j)) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < VEC; ++j) sum += v[i][j] = j < count(i) ? v[i][j] : 0.0f;
        }
        if constexpr (NORMED) {
            const float mean = CENTERED ? row_sum<THREADS>(sum, partial[0]) / N : 0.0f;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    if (CENTERED && j < count(i)) v[i][j] -= mean;
                    squares += v[i][j] * v[i][j];
                }
            }
            const float unit = rsqrtf(row_sum<THREADS>(squares, partial[1]) / N + eps);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int at = min(group(i), GROUPS - 1) * VEC;
                float factor[VEC], shift[VEC];
                if constexpr (kPresent<W>) load_f32(factor, reinterpret_cast<const W*>(vectors) + at);
                if constexpr (kPresent<B>) load_f32(shift, reinterpret_cast<const B*>(vectors + W_BYTES) + at);
#pragma unroll
                for (int j = 0; j < VEC; ++j) v[i][j] *= unit;
                affine<NORM::KIND, W, B>(v[i], factor, shift, offset);
            }
        }
        if constexpr (kPerRow) {
            unsigned int top = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) top = max(top, j < count(i) ? magnitude(v[i][j]) : 0u);
            }
            const RowScale found(row_top<THREADS>(top, tops));
#ifdef FRTC_SABOTAGE_NEIGHBOUR_SCALE
            const int named = (row + 1) % rows;
#else
            const int named = row;
#endif
            if (threadIdx.x == 0) scale[static_cast<i64>(named) * ld_scale] = found.scale;
            out = found.factor;
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if constexpr (SCALED) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) v[i][j] *= out;
            }
            if (group(i) < GROUPS) store_some<VEC>(y + static_cast<i64>(row) * ld_y + group(i) * VEC, v[i], count(i));
        }
    }

private:
    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

    // Elements from group g to the end of the row; a constant where every group is full.
    __device__ __forceinline__ static int left(int g) { return N % VEC == 0 ? VEC : N - g * VEC; }

    // Starts the copy of N elements by THREADS threads; zeros behind their end. Past L1, as all that was just written.
    template <int THREADS, typename T>
    __device__ __forceinline__ static void fetch(T* to, const T* from, int thread) {
        constexpr int STEP = kVec<T>;
        if (aligned<STEP>(from)) {
            for (int i = thread * STEP; i < GROUPS * VEC; i += THREADS * STEP)
                cp_async_16(shared_address(to + i), i < N ? from + i : from, max(0, min(N - i, STEP)) * sizeof(T));
        } else {
            for (int i = thread; i < GROUPS * VEC; i += THREADS) to[i] = i < N ? __ldcg(from + i) : from_f32<T>(0.0f);
        }
    }

    // y of R rows, `step` rows apart, that lie one behind the other in shared memory; the first `live` of them exist.
    template <int R>
    __device__ __forceinline__ void make(const u8* vectors, const S* at, int row, int step, int live) const {
        float mean[R] = {}, unit[R], out[R];
        if constexpr (NORMED) {
            if constexpr (CENTERED) means(mean, at);
            deviations(unit, mean, at);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) out[r] = inv;
        if constexpr (kPerRow) {
            unsigned int top[R] = {};
            each(vectors, at, mean, unit, [&](int g, int r, float(&v)[VEC]) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) top[r] = max(top[r], j < left(g) ? magnitude(v[j]) : 0u);
            });
#pragma unroll
            for (int r = 0; r < R; ++r) out[r] = of_row(top[r], row + r * step, r < live);
        }
        each(vectors, at, mean, unit, [&](int g, int r, float(&v)[VEC]) {
            if constexpr (SCALED) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) v[j] *= out[r];
            }
            if (r < live) store_some<VEC>(y + static_cast<i64>(row + r * step) * ld_y + g * VEC, v, left(g));
        });
    }

    // The factor of a row whose largest magnitude is `top`; its scale is stored.
    __device__ __forceinline__ float of_row(unsigned int top, int row, bool exists) const {
        const RowScale found(row_top<32>(top, nullptr));
#ifdef FRTC_SABOTAGE_NEIGHBOUR_SCALE
        row = (row + 1) % rows;
#endif
        if (exists && lane() == 0) scale[static_cast<i64>(row) * ld_scale] = found.scale;
        return found.factor;
    }

    template <int R>
    __device__ __forceinline__ static void means(float (&mean)[R], const S* at) {
#pragma unroll(2 / R)
        for (int g = lane(); g < GROUPS; g += 32) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float v[VEC];
                load_f32(v, at + (r * GROUPS + g) * VEC);
#pragma unroll
                for (int j = 0; j < VEC; ++j) mean[r] += v[j];
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) mean[r] = warp_sum(mean[r]) / N;
    }

    // 1 / sqrt(mean((s - mean)^2) + eps)
    template <int R>
    __device__ __forceinline__ void deviations(float (&unit)[R], const float (&mean)[R], const S* at) const {
        float squares[R] = {};
#pragma unroll(2 / R)
        for (int g = lane(); g < GROUPS; g += 32) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float v[VEC];
                load_f32(v, at + (r * GROUPS + g) * VEC);
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    if constexpr (CENTERED) v[j] = j < left(g) ? v[j] - mean[r] : 0.0f;
                    squares[r] += v[j] * v[j];
                }
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) unit[r] = rsqrtf(warp_sum(squares[r]) / N + eps);
    }

    // use(g, r, v) for this lane's groups of all rows: v is what y is before it is scaled.
    template <int R, typename USE>
    __device__ __forceinline__ void each(const u8* vectors, const S* at, const float (&mean)[R], const float (&unit)[R],
                                         const USE& use) const {
#pragma unroll(2 / R)
        for (int g = lane(); g < GROUPS; g += 32) {
            float factor[VEC], shift[VEC];
            if constexpr (kPresent<W>) load_f32(factor, reinterpret_cast<const W*>(vectors) + g * VEC);
            if constexpr (kPresent<B>) load_f32(shift, reinterpret_cast<const B*>(vectors + W_BYTES) + g * VEC);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float v[VEC];
                load_f32(v, at + (r * GROUPS + g) * VEC);
                if constexpr (NORMED) {
#pragma unroll
                    for (int j = 0; j < VEC; ++j) v[j] = (CENTERED ? v[j] - mean[r] : v[j]) * unit[r];
                    affine<NORM::KIND, W, B>(v, factor, shift, offset);
                }
                use(g, r, v);
            }
        }
    }
};

}  // namespace frtc
