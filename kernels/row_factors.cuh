// Factors of the rows of a product, which its accumulators meet before all else of an epilogue.
//
//   NoFactors      absent
//   GivenFactors   x_scale [M, 1], fp32
//   MomentFactors  1 / sqrt(v + eps): x is a value before its norm, and the product makes up for it. x_scale [M, P] are
//                  the sums of squares of each 32 of the K elements of its rows, P = ceil(K / 32), and v is their mean;
//                  LAYER: x_scale [M, 2 P] are sum and sum of squares in turn, and v is the variance
//
// Factors of moments are found by 128 threads for the rows that these store, or by a warp for the one that it stores, and wait
// in shared memory.
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

// FOUND: ask() and settle(), or find(), and the place in `origin` come before of(); or ask_row() and settle_row(). Held: what is
// asked for ahead.
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
    // Lanes that take a row: few, so that rows of most policies need few registers and few sums; all, where rows are long.
    static constexpr int LANES = Kind::COUNT <= 40 * VECTOR ? 4 : 32, AT_ONCE = 128 / LANES;
    static constexpr int LOADS = ceil_div(Kind::COUNT / VECTOR, LANES), ROW_LOADS = ceil_div(Kind::COUNT / VECTOR, 32);
    static constexpr int MOST = 384;  // rows of a block's warpgroups
    struct Held {};
    const float* moments;
    int ld, rows;
    float eps;
    int origin;  // place of row 0's factor in memory(), if it had one

    __device__ __forceinline__ RowFactors(const float* moments, int ld, int rows, float eps)
        : moments(moments), ld(ld), rows(rows), eps(eps) {}
    __device__ __forceinline__ Held hold(int) const { return {}; }
    __device__ __forceinline__ float of(int row, const Held&) const {
        const int at = origin + row;
        return memory()[kSabotage == Sabotage::neighbour_scale && at % 64 ? at - 1 : at];
    }

    // Whether moments of ROWS rows fit in registers beside accumulators.
    template <int ROWS>
    static constexpr bool AHEAD = ROWS / AT_ONCE * LOADS * VECTOR <= 48;

    // Moments of ROWS rows, in the registers of 128 threads.
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
            load<LANES>(asked.part[pass], min(from + pass * AT_ONCE + own, rows - 1), lane);
        }
        return asked;
    }

    // Their factors, for all threads of the warpgroup.
    template <int ROWS>
    __device__ __forceinline__ void settle(const Asked<ROWS>& asked, int group) const {
        write(asked, group * ROWS);
        named_barrier(1 + group, 128);
    }

    // Both, at once, some rows after the other.
    template <int ROWS>
    __device__ __forceinline__ void find(int from, int group) const {
        named_barrier(1 + group, 128);  // nobody reads those of the last tile any more
#pragma unroll 1
        for (int row = 0; row < ROWS; row += AT_ONCE) write(ask<AT_ONCE>(from + row), group * ROWS + row);
        named_barrier(1 + group, 128);
    }

    // Moments of one row, in the registers of a warp.
    struct AskedRow {
        Vec<float, VECTOR> part[ROW_LOADS];
    };
    __device__ __forceinline__ AskedRow ask_row(int row) const {
        AskedRow asked;
        load<32>(asked.part, kSabotage == Sabotage::neighbour_scale ? max(row - 1, 0) : row, threadIdx.x % 32);
        return asked;
    }

    // Its factor, for all threads of the warp.
    __device__ __forceinline__ void settle_row(const AskedRow& asked, int row) {
        const int warp = threadIdx.x / 32;
        const float factor = factor_of<32>(asked.part, threadIdx.x % 32);
        if (threadIdx.x % 32 == 0) memory()[warp] = factor;
        __syncwarp();
        origin = warp - row;
    }

private:
    __device__ __forceinline__ static float* memory() {
        __shared__ float factors[MOST];
        return factors;
    }

    template <int ROWS>
    __device__ __forceinline__ void write(const Asked<ROWS>& asked, int at) const {
        const int lane = threadIdx.x % LANES, own = threadIdx.x % 128 / LANES;
#pragma unroll
        for (int pass = 0; pass < ROWS / AT_ONCE; ++pass) {
            const float factor = factor_of<LANES>(asked.part[pass], lane);
            if (lane == 0) memory()[at + pass * AT_ONCE + own] = factor;
        }
    }

    // What one of so many lanes takes of a row's moments: vectors in turn.
    template <int OF, int N>
    __device__ __forceinline__ void load(Vec<float, VECTOR> (&part)[N], long long row, int lane) const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = (i * OF + lane) * VECTOR;
            part[i] = {};
            if (at < Kind::COUNT) part[i] = *reinterpret_cast<const Vec<float, VECTOR>*>(moments + row * ld + at);
        }
    }

    // Of a row whose moments so many lanes have.
    template <int OF, int N>
    __device__ __forceinline__ float factor_of(const Vec<float, VECTOR> (&part)[N], int lane) const {
        float sums[Kind::PARTS] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const bool last = (i * OF + lane + 1) * VECTOR >= Kind::COUNT;
                if (kSabotage != Sabotage::last_moment || !last) sums[j % Kind::PARTS] += part[i].at[j];
            }
        }
#pragma unroll
        for (float& sum : sums) sum = warp_sum<OF>(sum);
        const float square = sums[Kind::PARTS - 1] / K, mean = LAYER ? sums[0] / K : 0.0f;
        return rsqrtf(fmaxf(square - mean * mean, 0.0f) + eps);
    }
};

}  // namespace frtc
