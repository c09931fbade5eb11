// Rotary position embedding: pairs (a, b) of a row become (a cos - b sin, b cos + a sin).
//
//   half         the pair of element i is i + D/2         interleaved  the pair of element 2i is 2i + 1
//   rope         x, y [batch, H, S, D]; cos, sin [batch, H, S, D/2], all with any steps (0: repeated), last axis dense
//   rope_qkv     x [S, (HQ + 2 HKV) D] -> q [HQ, S, D], k and v [HKV, S, D] with any steps: q and k rotated, v moved,
//                so that k and v land in a slice of a KV cache in the same launch
//   grid   (groups of VEC pairs of all rows, heads, batch)      moves 2 elements and reads 1 angle an element
//   rope: y may be the same view as x, a thread owns both elements of its pairs
#pragma once

#include "ptx.cuh"
#include "vector.cuh"

namespace frtc {

// VEC pairs of one row, from pair `at` on.
template <bool INTERLEAVED, int D, int VEC, typename X, typename C, typename Y>
__device__ __forceinline__ void rotate(const X* x, const C* cos, const C* sin, Y* y, int at) {
    float c[VEC], s[VEC], a[VEC], b[VEC];
    load_some<VEC>(c, cos + at, VEC);
    load_some<VEC>(s, sin + at, VEC);
#ifdef FRTC_SABOTAGE_NEXT_ANGLE
    load_some<VEC>(s, sin + (at + VEC) % (D / 2), VEC);
#endif
    if constexpr (INTERLEAVED) {
        float both[2 * VEC];
        load_some<2 * VEC>(both, x + 2 * at, 2 * VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float first = both[2 * j], second = both[2 * j + 1];
            both[2 * j] = first * c[j] - second * s[j];
            both[2 * j + 1] = second * c[j] + first * s[j];
        }
        store_some<2 * VEC>(y + 2 * at, both, 2 * VEC);
    } else {
        load_some<VEC>(a, x + at, VEC);
        load_some<VEC>(b, x + D / 2 + at, VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float first = a[j], second = b[j];
            a[j] = first * c[j] - second * s[j];
            b[j] = second * c[j] + first * s[j];
        }
        store_some<VEC>(y + at, a, VEC);
        store_some<VEC>(y + D / 2 + at, b, VEC);
    }
}

template <bool INTERLEAVED, int D, int VEC, int THREADS, typename X, typename C, typename Y>
__global__ void __launch_bounds__(THREADS)
    rope(const X* x, const C* cos, const C* sin, Y* y, int rows, int x_batch, int x_head, int x_row, int c_batch,
         int c_head, int c_row, int s_batch, int s_head, int s_row, int y_batch, int y_head, int y_row) {
    grid_wait(), grid_release();
    constexpr int GROUPS = D / 2 / VEC;
    const int thread = blockIdx.x * THREADS + threadIdx.x;
    const long long row = thread / GROUPS, head = blockIdx.y, batch = blockIdx.z;
    if (row >= rows) return;
    rotate<INTERLEAVED, D, VEC>(x + batch * x_batch + head * x_head + row * x_row,
                                cos + batch * c_batch + head * c_head + row * c_row,
                                sin + batch * s_batch + head * s_head + row * s_row,
                                y + batch * y_batch + head * y_head + row * y_row, thread % GROUPS * VEC);
}

template <bool INTERLEAVED, int D, int VEC, int THREADS, typename X, typename C>
__global__ void __launch_bounds__(THREADS)
    rope_qkv(const X* x, const C* cos, const C* sin, X* q, X* k, X* v, int rows, int q_heads, int kv_heads, int x_row,
             int c_row, int s_row, int q_head, int q_row, int k_head, int k_row, int v_head, int v_row) {
    grid_wait(), grid_release();
    constexpr int GROUPS = D / 2 / VEC;
    const int thread = blockIdx.x * THREADS + threadIdx.x;
    const int at = thread % GROUPS * VEC;
    const long long row = thread / GROUPS;
    if (row >= rows) return;
    const X* from = x + row * x_row + blockIdx.y * D;
    const int head = blockIdx.y;
    if (head < q_heads + kv_heads) {
        const bool is_q = head < q_heads;
        X* to = is_q ? q + head * static_cast<long long>(q_head) + row * q_row
                     : k + (head - q_heads) * static_cast<long long>(k_head) + row * k_row;
        rotate<INTERLEAVED, D, VEC>(from, cos + row * c_row, sin + row * s_row, to, at);
    } else {
        X* to = v + (head - q_heads - kv_heads) * static_cast<long long>(v_head) + row * v_row;
        move_some<VEC>(to + at, from + at, VEC);
        move_some<VEC>(to + D / 2 + at, from + D / 2 + at, VEC);
    }
}

}  // namespace frtc
