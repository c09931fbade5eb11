// What a product of matrices does with its fp32 accumulators before the one rounding of the result.
//
//   linear         y = residual + gate * act(acc + bias)      bias [N], gate [N] or [M, N], residual [M, N]
//   gated_linear   y[:, i] = act(acc[:, 2i]) * acc[:, 2i+1]   rows of w interleaved gate, up; bias [2F] added before
//   with scales    acc *= row factors (row_factors.cuh), then acc *= alpha ([N] or one), fp32, before all else
//   e4m3 results   round(y * inv), saturating at 448; inv is one fp32 number
//
// Every absent operand has the type None and costs nothing. Operand types are free; arithmetic is in fp32.
//
// A mainloop knows an epilogue by this and no more, so that another class with the same members serves as well:
//   EPILOGUE(M, N, batch, arguments...)  sizes of the product, which of its batches, and the kernel's last parameters: the
//                                        pack that Product.arguments() lists and the kernel's template-id spells out
//   IN = 8                               accumulators that one call takes
//   store(row, column, acc[IN])          of columns column .. column + 7, a multiple of 8; rows and columns beyond the edges
//                                        come too, and are not to be stored
//   exists(row, column)                  whether store() would store
//   columns_at, row_at, store(..., Columns, Row)   the same in parts, for mainloops that ask for operands ahead of their use:
//                                        Columns of eight columns, Row of eight columns of a row. VECTORS: whole() says
//                                        that groups of eight columns exist or do not, and can be moved as vectors; WHOLE
//                                        that this is known when it is compiled
//   finish<THREADS, SHARES>(smem, m0)    by THREADS threads of the block, from 0 on, once, behind their last store: rows from
//                                        m0 on of this column of tiles are stored, or one of SHARES shares of them. Other
//                                        threads have ended or are about to. The block's dynamic shared memory is free,
//                                        behind a barrier. Blocks that store nothing (early shares of split K) do not come
//   BLOCKS                               may be absent: __launch_bounds__'s least number of blocks on an SM
//   FOUND                                may be absent: where it is true, the factors of rows are found before they are stored
//                                        (row_factors.cuh), by those threads that store them, behind grid_wait()
//   TOGETHER                             may be absent: where it is true, four neighbouring lanes store 32 neighbouring columns
//                                        of a row, eight each, all lanes of a warp at once (moments.cuh)
#pragma once

#include "numeric.cuh"
#include "row_factors.cuh"
#include "sabotage.cuh"
#include "vector.cuh"

namespace frtc {

struct None {};

// 0 leaves it to ptxas, which spills now and then so that one more block fits.
template <typename EPILOGUE>
constexpr int least_blocks() {
    if constexpr (requires { EPILOGUE::BLOCKS; }) return EPILOGUE::BLOCKS;
    return 0;
}

// Whether an epilogue finds factors of rows before it stores them.
template <typename EPILOGUE>
constexpr bool finds_factors() {
    if constexpr (requires { EPILOGUE::FOUND; }) return EPILOGUE::FOUND;
    return false;
}

// Whether an epilogue stores 32 columns of a row at once.
template <typename EPILOGUE>
constexpr bool stores_together() {
    if constexpr (requires { EPILOGUE::TOGETHER; }) return EPILOGUE::TOGETHER;
    return false;
}

// Whether groups of N elements in rows of stride `ld` can be moved as vectors.
template <int N, typename T>
__device__ __forceinline__ bool vectors_ok(const T* p, int ld) {
    constexpr unsigned long long BYTES = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
    return (reinterpret_cast<unsigned long long>(p) | (static_cast<unsigned int>(ld) * sizeof(T))) % BYTES == 0;
}
template <int N>
__device__ __forceinline__ bool vectors_ok(const None*, int) {
    return true;
}

// N elements of an operand in registers, as they are stored; none where N is 0.
template <typename T, int N>
struct alignas(N == 0 ? 1 : N * sizeof(T) < 16 ? N * sizeof(T) : 16) Held {
    T at[N];
};
template <typename T>
struct Held<T, 0> {};

// N elements from p + at, of which `left` exist. VECTORS: all do, at multiples of 16 bytes or of their own size.
template <bool VECTORS, int N, typename T>
__device__ __forceinline__ void hold(Held<T, N>& held, const T* p, long long at, int left) {
    if constexpr (VECTORS && N > 0) {
        constexpr int STEP = N < kVec<T> ? N : kVec<T>;
#pragma unroll
        for (int i = 0; i < N; i += STEP) {
            *reinterpret_cast<Vec<T, STEP>*>(held.at + i) = *reinterpret_cast<const Vec<T, STEP>*>(p + at + i);
        }
    } else if constexpr (N > 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) held.at[i] = i < left ? p[at + i] : T{};
    }
}

// Factors of the columns of the product: absent, one number, one for each column.
enum class Alpha { none, one, each };

template <typename Out, typename Bias, typename Residual, typename Gate, Act ACT, bool GATED, Alpha ALPHA = Alpha::none,
          typename FACTORS = NoFactors, bool WHOLE_ = false>
struct Epilogue {
    static constexpr int IN = 8;                  // accumulators of one row per call
    static constexpr int OUT = GATED ? 4 : 8;     // results of one row per call
    static constexpr bool SCALED_OUT = sizeof(Out) == 1, WHOLE = WHOLE_, FOUND = RowFactors<FACTORS>::FOUND;

    const Bias* bias;
    const Residual* residual;  // may alias y: each element that is used is read by the thread that writes it
    const Gate* gate;
    const float* alpha;
    RowFactors<FACTORS> factors;
    Out* y;
    int rows, columns, accumulators;  // of y, and columns of the product
    int ld_residual, ld_gate, ld_y;   // elements; 0: one row for all
    float alpha_one, inv;
    bool vectors;

    __device__ __forceinline__ Epilogue(int m, int n, int batch, const Bias* bias, const Residual* residual, const Gate* gate,
                                        const float* alpha, const float* x_scale, const float* inv, Out* y, int ld_residual,
                                        int ld_gate, int ld_x_scale, int ld_y, long long batch_residual, long long batch_gate,
                                        long long batch_x_scale, long long batch_y, float eps = 0.0f)
        : bias(bias), residual(at(residual, batch * batch_residual)), gate(at(gate, batch * batch_gate)), alpha(alpha),
          factors(x_scale + batch * batch_x_scale, ld_x_scale, m, eps), y(y + batch * batch_y), rows(m),
          columns(GATED ? n / 2 : n), accumulators(n), ld_residual(ld_residual), ld_gate(ld_gate), ld_y(ld_y),
          alpha_one(ALPHA == Alpha::one ? *alpha : 1.0f), inv(SCALED_OUT ? *inv : 1.0f),
          vectors(WHOLE || (vectors_ok<IN>(bias, 0) && vectors_ok<OUT>(this->residual, ld_residual) &&
                            vectors_ok<OUT>(this->gate, ld_gate) && vectors_ok<OUT>(this->y, ld_y) &&
                            (ALPHA != Alpha::each || vectors_ok<IN>(alpha, 0)))) {}

    struct Columns {
        Held<float, ALPHA == Alpha::each ? IN : 0> alpha;
        Held<Bias, kSame<Bias, None> ? 0 : IN> bias;
    };
    struct Row {
        Held<Residual, kSame<Residual, None> ? 0 : OUT> residual;
        Held<Gate, kSame<Gate, None> ? 0 : OUT> gate;
        typename RowFactors<FACTORS>::Held factor;
    };

    __device__ __forceinline__ bool whole() const { return WHOLE || (vectors && accumulators % IN == 0); }

    __device__ __forceinline__ bool exists(int row, int column) const { return row < rows && column < accumulators; }

    // VECTORS: what lies beyond the edges is read from inside them, and not stored. Without a branch around each group the
    // instructions of several run side by side.
    template <bool VECTORS>
    __device__ __forceinline__ Columns columns_at(int column) const {
        Columns found;
        if constexpr (VECTORS) column = min(column, accumulators - IN);
        hold<VECTORS>(found.alpha, alpha, column, accumulators - column);
        hold<VECTORS>(found.bias, bias, column, accumulators - column);
        return found;
    }

    template <bool VECTORS>
    __device__ __forceinline__ Row row_at(int row, int column) const {
        Row found = {};
        if constexpr (VECTORS) {
            row = min(row, rows - 1), column = min(column, accumulators - IN);
        } else if (row >= rows) {
            return found;
        }
        const int left = columns - column;
        const int gate_row = kSabotage == Sabotage::neighbour_gate && row > 0 ? row - 1 : row;
        hold<VECTORS>(found.residual, residual, static_cast<long long>(row) * ld_residual + column, left);
        hold<VECTORS>(found.gate, gate, static_cast<long long>(gate_row) * ld_gate + column, left);
        found.factor = factors.hold(row);
        return found;
    }

    template <bool VECTORS>
    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN], const Columns& of_columns,
                                          const Row& of_row) const {
        const int first = GATED ? column / 2 : column;
        const bool stored = exists(row, column);
        if (!VECTORS && !stored) return;
        float result[OUT];
        results(result, row, acc, of_columns, of_row);
        Out* const to = y + static_cast<long long>(row) * ld_y + first;
        if constexpr (VECTORS) {
            if (stored) store_f32(to, result);
        } else {
#pragma unroll
            for (int i = 0; i < OUT; ++i) {
                if (first + i < columns) to[i] = from_f32<Out>(result[i]);
            }
        }
    }

    // What store() rounds.
    __device__ __forceinline__ void results(float (&result)[OUT], int row, const float (&acc)[IN], const Columns& of_columns,
                                            const Row& of_row) const {
        const float factor = factors.of(row, of_row.factor);
        float v[IN];
#pragma unroll
        for (int i = 0; i < IN; ++i) {
            v[i] = acc[i] * factor;
            if constexpr (ALPHA == Alpha::each) v[i] *= of_columns.alpha.at[i];
            if constexpr (ALPHA == Alpha::one) v[i] *= alpha_one;
            if constexpr (!kSame<Bias, None>) v[i] += to_f32(of_columns.bias.at[i]);
        }
#pragma unroll
        for (int i = 0; i < OUT; ++i) {
            if constexpr (GATED) {
                result[i] = activate<ACT, Out>(v[2 * i]) * v[2 * i + 1];
            } else {
                result[i] = activate<ACT, Out>(v[i]);
                if constexpr (!kSame<Gate, None>) result[i] *= to_f32(of_row.gate.at[i]);
                if constexpr (!kSame<Residual, None>) result[i] += to_f32(of_row.residual.at[i]);
            }
            if constexpr (SCALED_OUT) result[i] *= inv;
        }
    }

    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN]) const {
        if (WHOLE || (vectors && column + IN <= accumulators)) {
            store<true>(row, column, acc, columns_at<true>(column), row_at<true>(row, column));
        } else {
            store<false>(row, column, acc, columns_at<false>(column), row_at<false>(row, column));
        }
    }

    template <int THREADS, int SHARES = 1>
    __device__ __forceinline__ void finish(unsigned char*, int) const {}

private:
    template <typename T>
    __device__ __forceinline__ static const T* at(const T* p, long long offset) {
        return p + offset;
    }
    __device__ __forceinline__ static const None* at(const None* p, long long) { return p; }
};

}  // namespace frtc
