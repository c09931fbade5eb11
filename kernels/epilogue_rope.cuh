// What linear_rope_qkv does with its fp32 accumulators: heads of q and k turn by the position of their row, and every
// head is stored where its reader wants it.
//
//   x = factor * alpha * acc + bias       [M, (heads + 2 kv_heads) D]: q, k, v; factor of the row; each may be absent
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

template <typename Out, typename Bias, typename Angle, int D, Alpha ALPHA, typename FACTORS, bool WHOLE_>
struct RopeEpilogue {
    static_assert(D % 16 == 0, "a group of columns lies in one head");
    static constexpr int IN = 8, PAIRS = IN / 2;
    static constexpr bool WHOLE = WHOLE_, FOUND = RowFactors<FACTORS>::FOUND;  // whole: heads are groups of 16 columns

    const Bias* bias;
    const Angle *cos, *sin;
    const float* alpha;
    RowFactors<FACTORS> factors;
    Out *q, *k, *v;
    int rows, columns, heads, turned;  // of the product; heads of q, of q and k
    int ld_cos, ld_sin;                // elements from row to row
    int q_head, q_row, k_head, k_row, v_head, v_row;
    float alpha_one;
    bool vectors;

    __device__ __forceinline__ RopeEpilogue(int m, int n, int, const Bias* bias, const Angle* cos, const Angle* sin,
                                            const float* alpha, const float* x_scale, Out* q, Out* k, Out* v, int heads,
                                            int kv_heads, int ld_cos, int ld_sin, int ld_x_scale, int q_head, int q_row,
                                            int k_head, int k_row, int v_head, int v_row, float eps = 0.0f)
        : bias(bias), cos(cos), sin(sin), alpha(alpha), factors(x_scale, ld_x_scale, m, eps), q(q), k(k), v(v), rows(m),
          columns(n), heads(heads), turned(heads + kv_heads), ld_cos(ld_cos), ld_sin(ld_sin), q_head(q_head), q_row(q_row),
          k_head(k_head), k_row(k_row), v_head(v_head), v_row(v_row), alpha_one(ALPHA == Alpha::one ? *alpha : 1.0f),
          vectors(WHOLE || (vectors_ok<IN>(bias, 0) && vectors_ok<PAIRS>(cos, ld_cos) && vectors_ok<PAIRS>(sin, ld_sin) &&
                            (ALPHA != Alpha::each || vectors_ok<IN>(alpha, 0)) && vectors_ok<PAIRS>(q, q_head | q_row) &&
                            vectors_ok<PAIRS>(k, k_head | k_row) && vectors_ok<IN>(v, v_head | v_row))) {}

    struct Columns {
        Held<float, ALPHA == Alpha::each ? IN : 0> alpha;
        Held<Bias, kSame<Bias, None> ? 0 : IN> bias;
    };
    struct Row {
        Held<Angle, PAIRS> cos, sin;
        typename RowFactors<FACTORS>::Held factor;
    };

    __device__ __forceinline__ bool whole() const { return vectors; }
    __device__ __forceinline__ bool exists(int row, int column) const { return row < rows && column < columns; }

    template <bool VECTORS>
    __device__ __forceinline__ Columns columns_at(int column) const {
        Columns found = {};
        if constexpr (VECTORS) {
            column = min(column, columns - IN);
        } else if (column >= columns) {
            return found;
        }
        hold<VECTORS>(found.alpha, alpha, column, columns - column);
        hold<VECTORS>(found.bias, bias, column, columns - column);
        return found;
    }

    template <bool VECTORS>
    __device__ __forceinline__ Row row_at(int row, int column) const {
        Row found = {};
        if constexpr (VECTORS) {
            row = min(row, rows - 1);  // of v: angles of another head, not used
        } else if (row >= rows || column >= columns) {
            return found;
        }
        found.factor = factors.hold(row);
        if (!VECTORS && column / D >= turned) return found;
#ifdef FRTC_SABOTAGE_NEIGHBOUR_ANGLE
        const long long position = row > 0 ? row - 1 : row;
#else
        const long long position = row;
#endif
        hold<VECTORS>(found.cos, cos, position * ld_cos + column % D / 2, PAIRS);
        hold<VECTORS>(found.sin, sin, position * ld_sin + column % D / 2, PAIRS);
        return found;
    }

    template <bool VECTORS>
    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN], const Columns& of_columns,
                                          const Row& of_row) const {
        const bool stored = exists(row, column);
        if (!VECTORS && !stored) return;
        const int head = column / D, at = column % D;
        const long long r = row;
        const float factor = factors.of(row, of_row.factor);
        float x[IN];
#pragma unroll
        for (int i = 0; i < IN; ++i) {
            x[i] = acc[i] * factor;
            if constexpr (ALPHA == Alpha::each) x[i] *= of_columns.alpha.at[i];
            if constexpr (ALPHA == Alpha::one) x[i] *= alpha_one;
            if constexpr (!kSame<Bias, None>) x[i] += to_f32(of_columns.bias.at[i]);
        }
        if (head >= turned) {
            if (stored) put<VECTORS>(v + static_cast<long long>(head - turned) * v_head + r * v_row + at, x);
            return;
        }
        Out* const to = (head < heads ? q + static_cast<long long>(head) * q_head + r * q_row
                                      : k + static_cast<long long>(head - heads) * k_head + r * k_row) + at / 2;
        float first[PAIRS], second[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
#ifdef FRTC_SABOTAGE_SWAPPED_PAIR
            const float x2 = x[2 * i], x1 = x[2 * i + 1];
#else
            const float x1 = x[2 * i], x2 = x[2 * i + 1];
#endif
            const float c = to_f32(of_row.cos.at[i]), s = to_f32(of_row.sin.at[i]);
            first[i] = x1 * c - x2 * s;
            second[i] = x2 * c + x1 * s;
        }
        if (stored) put<VECTORS>(to, first), put<VECTORS>(to + D / 2, second);
    }

    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN]) const {
        if (WHOLE || vectors) {
            store<true>(row, column, acc, columns_at<true>(column), row_at<true>(row, column));
        } else {
            store<false>(row, column, acc, columns_at<false>(column), row_at<false>(row, column));
        }
    }

    template <int THREADS, int SHARES = 1>
    __device__ __forceinline__ void finish(unsigned char*, int) const {}

private:
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
