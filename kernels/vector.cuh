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
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

template <typename T>
constexpr bool kPresent = !kSame<T, Absent>;

constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
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

}  // namespace frtc
