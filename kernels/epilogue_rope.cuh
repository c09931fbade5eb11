// What linear_rope_qkv does with its fp32 accumulators: heads of q and k turn by the position of their row, and every
// head is stored where its reader wants it.
//
//   x = x_scale * alpha * acc + bias      [M, (heads + 2 kv_heads) D]: q, k, v; each factor or summand may be absent
//   q, k   columns 2i and 2i + 1 of a head are the elements x1 = i and x2 = i + D/2:
//          y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin      cos, sin [M, D/2]
//   v      columns are elements
//   q [heads, M, D], k and v [kv_heads, M, D] with any strides of heads and rows, so that k and v land in a KV cache
//
// D is a multiple of 16, so that the eight columns of a call are four pairs of one head. heads may be 0.
#pragma once

#include "epilogue.cuh"
#include "vector.cuh"

namespace frtc {

template <typename Out, typename Bias, typename Angle, int D, Alpha ALPHA, bool X_SCALE>
struct RopeEpilogue {
    static_assert(D % 16 == 0, "a group of columns lies in one head");
    static constexpr int IN = 8, PAIRS = IN / 2;

    const Bias* bias;
    const Angle *cos, *sin;
    const float *alpha, *x_scale;
    Out *q, *k, *v;
    int rows, columns, heads, turned;        // of the product; heads of q, of q and k
    int ld_cos, ld_sin, ld_x_scale;          // elements from row to row
    int q_head, q_row, k_head, k_row, v_head, v_row;
    float alpha_one;
    bool vectors;

    __device__ __forceinline__ RopeEpilogue(int m, int n, int, const Bias* bias, const Angle* cos, const Angle* sin,
                                            const float* alpha, const float* x_scale, Out* q, Out* k, Out* v, int heads,
                                            int kv_heads, int ld_cos, int ld_sin, int ld_x_scale, int q_head, int q_row,
                                            int k_head, int k_row, int v_head, int v_row)
        : bias(bias), cos(cos), sin(sin), alpha(alpha), x_scale(x_scale), q(q), k(k), v(v), rows(m), columns(n), heads(heads),
          turned(heads + kv_heads), ld_cos(ld_cos), ld_sin(ld_sin), ld_x_scale(ld_x_scale), q_head(q_head), q_row(q_row),
          k_head(k_head), k_row(k_row), v_head(v_head), v_row(v_row), alpha_one(ALPHA == Alpha::one ? *alpha : 1.0f),
          vectors(vectors_ok<IN>(bias, 0) && vectors_ok<PAIRS>(cos, ld_cos) && vectors_ok<PAIRS>(sin, ld_sin) &&
                  (ALPHA != Alpha::each || vectors_ok<IN>(alpha, 0)) && vectors_ok<PAIRS>(q, q_head | q_row) &&
                  vectors_ok<PAIRS>(k, k_head | k_row) && vectors_ok<IN>(v, v_head | v_row)) {}

    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN]) const {
        if (row >= rows || column >= columns) return;
        if (vectors) {
            place<true>(row, column, acc);
        } else {
            place<false>(row, column, acc);
        }
    }

    template <int THREADS, int SHARES = 1>
    __device__ __forceinline__ void finish(unsigned char*, int) const {}

private:
    template <bool VECTORS>
    __device__ __forceinline__ void place(int row, int column, const float (&acc)[IN]) const {
        const int head = column / D, at = column % D;
        const long long r = row;
        float x[IN];
        scaled<VECTORS>(x, acc, row, column);
        if (head >= turned) {
            put<VECTORS>(v + static_cast<long long>(head - turned) * v_head + r * v_row + at, x);
            return;
        }
        Out* const to = (head < heads ? q + static_cast<long long>(head) * q_head + r * q_row
                                      : k + static_cast<long long>(head - heads) * k_head + r * k_row) + at / 2;
#ifdef FRTC_SABOTAGE_NEIGHBOUR_ANGLE
        const long long position = r > 0 ? r - 1 : r;
#else
        const long long position = r;
#endif
        float c[PAIRS], s[PAIRS], first[PAIRS], second[PAIRS];
        get<VECTORS>(c, cos + position * ld_cos + at / 2);
        get<VECTORS>(s, sin + position * ld_sin + at / 2);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
#ifdef FRTC_SABOTAGE_SWAPPED_PAIR
            const float x2 = x[2 * i], x1 = x[2 * i + 1];
#else
            const float x1 = x[2 * i], x2 = x[2 * i + 1];
#endif
            first[i] = x1 * c[i] - x2 * s[i];
            second[i] = x2 * c[i] + x1 * s[i];
        }
        put<VECTORS>(to, first);
        put<VECTORS>(to + D / 2, second);
    }

    template <bool VECTORS>
    __device__ __forceinline__ void scaled(float (&x)[IN], const float (&acc)[IN], int row, int column) const {
        const float of_row = X_SCALE ? x_scale[static_cast<long long>(row) * ld_x_scale] : 1.0f;
        float factor[IN], shift[IN];
        if constexpr (ALPHA == Alpha::each) get<VECTORS>(factor, alpha + column);
        if constexpr (!kSame<Bias, None>) get<VECTORS>(shift, bias + column);
#pragma unroll
        for (int i = 0; i < IN; ++i) {
            x[i] = X_SCALE ? acc[i] * of_row : acc[i];
            if constexpr (ALPHA != Alpha::none) x[i] *= ALPHA == Alpha::each ? factor[i] : alpha_one;
            if constexpr (!kSame<Bias, None>) x[i] += shift[i];
        }
    }

    template <bool VECTORS, int N, typename T>
    __device__ __forceinline__ static void get(float (&out)[N], const T* p) {
        if constexpr (VECTORS) {
            load_f32(out, p);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) out[i] = to_f32(p[i]);
        }
    }

    template <bool VECTORS, int N>
    __device__ __forceinline__ static void put(Out* p, const float (&values)[N]) {
        if constexpr (VECTORS) {
            store_f32(p, values);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) p[i] = from_f32<Out>(values[i]);
        }
    }
};

}  // namespace frtc
