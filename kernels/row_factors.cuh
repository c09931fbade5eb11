// Factors of the rows of a product, which its accumulators meet before all else of an epilogue.
//
//   NoFactors      absent
//   GivenFactors   x_scale [M, 1], fp32
//   MomentFactors  1 / sqrt(v + eps): x is a value before its norm, and the product makes up for it. x_scale [M, P] are
//                  the sums of squares of each 32 of the K elements of its rows, P = ceil(K / 32), and v is their mean;
//                  LAYER: x_scale [M, 2 P] are sum and sum of squares in turn, and v is the variance
//
// Factors of moments are found by 128 threads for the rows that these store, and wait in shared memory.
#pragma once

#include "ptx.cuh"
#include "sabotage.cuh"
#include "vector.cuh"

namespace frtc {

struct NoFactors {};
struct GivenFactors {};
// VECTOR: moments that one load brings; rows begin at multiples of them.
template <int K_, bool LAYER_, int VECTOR_>
struct MomentFactors {
    static constexpr int K = K_, VECTOR = VECTOR_, PARTS = LAYER_ ? 2 : 1, COUNT = PARTS * ceil_div(K, 32);
    static constexpr bool LAYER = LAYER_;
    static_assert(COUNT % VECTOR == 0 && VECTOR % PARTS == 0, "loads are whole, and a sum lies beside its squares");
};

// FOUND: ask() and settle(), or find(), come before of(). Held: what is asked for ahead.
template <typename KIND>
struct RowFactors;

template <>
struct RowFactors<NoFactors> {
    static constexpr bool FOUND = false;
    struct Held {};
    __device__ __forceinline__ RowFactors(const float*, int, int, float) {}
    __device__ __forceinline__ Held hold(int) const { return {}; }
    __device__ __forceinline__ float of(int, const Held&) const { return 1.0f; }
};

template <>
struct RowFactors<GivenFactors> {
    static constexpr bool FOUND = false;
    struct Held {
        float factor;
    };
    const float* x_scale;
    int ld;

    __device__ __forceinline__ RowFactors(const float* x_scale, int ld, int, float) : x_scale(x_scale), ld(ld) {}
    __device__ __forceinline__ Held hold(int row) const {
        if (kSabotage == Sabotage::neighbour_scale) row = max(row - 1, 0);
        return {x_scale[static_cast<long long>(row) * ld]};
    }
    __device__ __forceinline__ float of(int, const Held& held) const { return held.factor; }
};

template <int K, bool LAYER, int VECTOR>
struct RowFactors<MomentFactors<K, LAYER, VECTOR>> {
    using Kind = MomentFactors<K, LAYER, VECTOR>;
    static constexpr bool FOUND = true;
    static constexpr int LANES = 4, AT_ONCE = 128 / LANES, LOADS = ceil_div(Kind::COUNT / VECTOR, LANES);
    struct Held {};
    const float* moments;
    int ld, rows;
    float eps;
    const float* found = nullptr;  // in shared memory, from row `first` on
    int first = 0;

    __device__ __forceinline__ RowFactors(const float* moments, int ld, int rows, float eps)
        : moments(moments), ld(ld), rows(rows), eps(eps) {}
    __device__ __forceinline__ Held hold(int) const { return {}; }
    __device__ __forceinline__ float of(int row, const Held&) const {
        if (kSabotage == Sabotage::neighbour_scale) row = max(row - 1, first);
        return found[row - first];
    }

    // Moments of ROWS rows, in the registers of 128 threads: four lanes take a row.
    template <int ROWS>
    struct Asked {
        static_assert(ROWS % AT_ONCE == 0, "whole passes");
        Vec<float, VECTOR> part[ROWS / AT_ONCE][LOADS];
    };

    // Of the rows from `from` on.
    template <int ROWS>
    __device__ __forceinline__ Asked<ROWS> ask(int from) const {
        const int lane = threadIdx.x % LANES, own = threadIdx.x % 128 / LANES;
        Asked<ROWS> asked;
#pragma unroll
        for (int pass = 0; pass < ROWS / AT_ONCE; ++pass) {
            const long long row = min(from + pass * AT_ONCE + own, rows - 1);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int at = (i * LANES + lane) * VECTOR;
                asked.part[pass][i] = {};
                if (at < Kind::COUNT) asked.part[pass][i] = *reinterpret_cast<const Vec<float, VECTOR>*>(moments + row * ld + at);
            }
        }
        return asked;
    }

    // Their factors into `memory`, for all threads that meet at the named barrier.
    template <int ROWS>
    __device__ __forceinline__ void settle(const Asked<ROWS>& asked, float* memory, int from, int barrier) {
        write(asked, memory);
        found = memory, first = from;
        named_barrier(barrier, 128);
    }

    // Both, at once, for rows whose moments would not fit in registers beside accumulators; nothing where they are there.
    template <int ROWS>
    __device__ __forceinline__ void find(float* memory, int from, int barrier) {
        constexpr int SOME = 2 * AT_ONCE;
        if (found && from == first) return;
        named_barrier(barrier, 128);  // nobody reads those of the last tile any more
        for (int row = 0; row < ROWS; row += SOME) write(ask<SOME>(from + row), memory + row);
        found = memory, first = from;
        named_barrier(barrier, 128);
    }

private:
    template <int ROWS>
    __device__ __forceinline__ void write(const Asked<ROWS>& asked, float* memory) const {
        const int lane = threadIdx.x % LANES, own = threadIdx.x % 128 / LANES;
#pragma unroll
        for (int pass = 0; pass < ROWS / AT_ONCE; ++pass) {
            const float factor = factor_of(asked.part[pass], lane);
            if (lane == 0) memory[pass * AT_ONCE + own] = factor;
        }
    }

    // Of a row whose moments the lanes have.
    __device__ __forceinline__ float factor_of(const Vec<float, VECTOR> (&part)[LOADS], int lane) const {
        float sums[Kind::PARTS] = {};
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const bool last = (i * LANES + lane) * VECTOR + j >= Kind::COUNT - Kind::PARTS;
                if (kSabotage != Sabotage::last_moment || !last) sums[j % Kind::PARTS] += part[i].at[j];
            }
        }
#pragma unroll
        for (float& sum : sums) sum = warp_sum<LANES>(sum);
        const float square = sums[Kind::PARTS - 1] / K, mean = LAYER ? sums[0] / K : 0.0f;
        return rsqrtf(fmaxf(square - mean * mean, 0.0f) + eps);
    }
};

}  // namespace frtc
