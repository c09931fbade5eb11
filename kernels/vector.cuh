// Groups of neighbouring elements at any alignment and with ragged ends.
//
// Rows start at multiples of 16 bytes in arena and weights, but a view may start anywhere: each access looks at its
// address and takes the wide path where it can. Groups have N elements, a power of two.
#pragma once

#include "numeric.cuh"

namespace frtc {

// The type of an operand that a site does not have; its pointer is null.
struct Absent {};

template <typename A, typename B>
inline constexpr bool kSame = false;
template <typename A>
inline constexpr bool kSame<A, A> = true;

template <typename T>
inline constexpr bool kPresent = !kSame<T, Absent>;

constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

// One element into register type R (float, int, long long, bool), and back with one rounding.
template <typename R, typename T>
__device__ __forceinline__ R as_register(T x) {
    if constexpr (kSame<R, float>)
        return to_f32(x);
    else
        return static_cast<R>(x);
}

template <typename T, typename R>
__device__ __forceinline__ T as_stored(R x) {
    if constexpr (kSame<T, bf16> || kSame<T, f16> || kSame<T, e4m3>)
        return from_f32<T>(static_cast<float>(x));
    else
        return static_cast<T>(x);
}

// Whether N elements at `p` may be accessed as whole vectors of up to 16 bytes.
template <int N, typename T>
__device__ __forceinline__ bool aligned(const T* p) {
    constexpr int BYTES = N * static_cast<int>(sizeof(T)) < 16 ? N * static_cast<int>(sizeof(T)) : 16;
    return (reinterpret_cast<unsigned long long>(p) & (BYTES - 1)) == 0;
}

// N elements from `p`, of which `count` exist (it may be more than N, or negative); the others read as 0.
template <int N, typename T>
__device__ __forceinline__ void load_some(float (&out)[N], const T* p, int count) {
    if (count >= N && aligned<N>(p)) {
        load_f32<N>(out, p);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) out[j] = j < count ? to_f32(p[j]) : 0.0f;
    }
}

template <int N, typename T>
__device__ __forceinline__ void store_some(T* p, const float (&values)[N], int count) {
    if (count >= N && aligned<N>(p)) {
        store_f32<N>(p, values);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (j < count) p[j] = from_f32<T>(values[j]);
    }
}

// N elements as they are, of any type.
template <int N, typename T>
__device__ __forceinline__ void move_some(T* to, const T* from, int count) {
    constexpr int STEP = N < kVec<T> ? N : kVec<T>;
    if (count >= N && aligned<N>(to) && aligned<N>(from)) {
#pragma unroll
        for (int j = 0; j < N; j += STEP)
            *reinterpret_cast<Vec<T, STEP>*>(to + j) = *reinterpret_cast<const Vec<T, STEP>*>(from + j);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (j < count) to[j] = from[j];
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// A thread's share of one row of N elements: ITEMS groups of VEC, LANES groups apart. LANES is a power of two up to 32,
// and then ROWS rows share a block, or a multiple of 32 with a block for each row.
template <int N, int LANES, int ROWS, int VEC>
struct Share {
    static_assert(ROWS == 1 || LANES <= 32, "rows share a block only where a warp holds them");
    static constexpr int ITEMS = ceil_div(N, LANES * VEC);
    static constexpr bool RAGGED = N != ITEMS * LANES * VEC;
    static constexpr int WARPS = LANES > 32 ? LANES / 32 : 1;

    int lane;
    bool live;  // idle rows of the last block repeat its last row: all threads take part in the sums
    long long row;

    __device__ __forceinline__ explicit Share(int rows) {
        const int asked = blockIdx.x * ROWS + threadIdx.x / LANES;
        lane = threadIdx.x % LANES;
        live = ROWS == 1 || asked < rows;
        row = live ? asked : rows - 1;
    }

    __device__ __forceinline__ int column(int item) const { return (item * LANES + lane) * VEC; }

    // Elements from the group's column to the end of the row; a constant where every group is full.
    __device__ __forceinline__ int left(int item) const { return RAGGED ? N - column(item) : VEC; }
};

// Over the LANES threads of a row, in a fixed order: a power of two up to 32, or the whole block. `partial` holds one
// float per warp and is not used again before the next barrier.
template <int LANES>
__device__ __forceinline__ float row_sum(float x, float* partial) {
    x = warp_sum<(LANES < 32 ? LANES : 32)>(x);
    if constexpr (LANES > 32) {
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0.0f;
#pragma unroll
        for (int i = 0; i < LANES / 32; ++i) x += partial[i];
    }
    return x;
}

template <int LANES>
__device__ __forceinline__ float row_max(float x, float* partial) {
    x = warp_max<(LANES < 32 ? LANES : 32)>(x);
    if constexpr (LANES > 32) {
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
        __syncthreads();
        x = partial[0];
#pragma unroll
        for (int i = 1; i < LANES / 32; ++i) x = fmaxf(x, partial[i]);
    }
    return x;
}

// ---- rows that find their own scale ---------------------------------------------------------------------------------

// Bits of |x|: they order like the magnitudes, and NaN is the largest of all, so that a maximum of them keeps it.
__device__ __forceinline__ unsigned int magnitude(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}

// The largest magnitude over the LANES threads of a row: see row_sum.
template <int LANES>
__device__ __forceinline__ unsigned int row_top(unsigned int x, unsigned int* partial) {
#pragma unroll
    for (int step = (LANES < 32 ? LANES : 32) / 2; step > 0; step /= 2)
        x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
    if constexpr (LANES > 32) {
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < LANES / 32; ++i) x = max(x, partial[i]);
    }
    return x;
}

// A row of largest magnitude m, 1e-30 at the least, is stored in e4m3 times 448 / m; m / 448 is its scale.
struct RowScale {
    float factor, scale;

    __device__ __forceinline__ explicit RowScale(unsigned int top) {
        const float m = __uint_as_float(max(top, __float_as_uint(1e-30f)));
        factor = __fdiv_rn(448.0f, m);
        scale = __fdiv_rn(m, 448.0f);
    }
};

}  // namespace frtc
