// What linear_moments does with its fp32 accumulators: the rows that a norm would take, and what its readers need of them.
//
//   s [M, N]        EPILOGUE's results, rounded to its type
//   z [M, N]        s * (offset + w) * inv, each factor where given: w [N], inv of an e4m3 z
//   moments [M, P]  sums of squares of each 32 columns of the rounded s, P = ceil(N / 32); LAYER: [M, 2 P], sum and sum of
//                   squares in turn
//
// For mainloops whose four neighbouring lanes store 32 neighbouring columns of a row, eight each, and do so together:
// exists() is true of all of them. N is a multiple of 8; columns beyond it count as zeros.
#pragma once

#include "epilogue.cuh"

namespace frtc {

template <typename EPILOGUE, typename S, typename Z, typename W, bool LAYER>
class WithMoments {
public:
    static constexpr int IN = EPILOGUE::IN, PARTS = LAYER ? 2 : 1;
    static constexpr bool WHOLE = EPILOGUE::WHOLE, TOGETHER = true;
    static_assert(WHOLE && sizeof(S) == 2 && !EPILOGUE::FOUND, "groups of eight columns are vectors");

    template <typename... ARGUMENTS>
    __device__ __forceinline__ WithMoments(int m, int n, int batch, const W* w, const float* inv, float* moments, Z* z,
                                           int ld_moments, int ld_z, float offset, ARGUMENTS... of_epilogue)
        : epilogue(m, n, batch, of_epilogue...), w(w), moments(moments), z(z), ld_moments(ld_moments), ld_z(ld_z),
          offset(offset), inv(sizeof(Z) == 1 ? *inv : 1.0f) {}

    struct Columns {
        typename EPILOGUE::Columns of_s;
        Held<W, kSame<W, None> ? 0 : IN> w;
    };
    using Row = typename EPILOGUE::Row;

    __device__ __forceinline__ bool whole() const { return true; }
    __device__ __forceinline__ bool exists(int, int) const { return true; }

    template <bool VECTORS>
    __device__ __forceinline__ Columns columns_at(int column) const {
        Columns found;
        found.of_s = epilogue.template columns_at<VECTORS>(column);
        hold<true>(found.w, w, min(column, epilogue.columns - IN), IN);
        return found;
    }
    template <bool VECTORS>
    __device__ __forceinline__ Row row_at(int row, int column) const {
        return epilogue.template row_at<VECTORS>(row, column);
    }

    template <bool VECTORS>
    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN], const Columns& of_columns,
                                          const Row& of_row) const {
        float s[IN];
        epilogue.results(s, row, acc, of_columns.of_s, of_row);
        const bool stored = epilogue.exists(row, column);
        const long long r = row;
        Vec<S, IN> rounded;
#pragma unroll
        for (int i = 0; i < IN; ++i) rounded.at[i] = from_f32<S>(s[i]), s[i] = to_f32(rounded.at[i]);
        if (stored) *reinterpret_cast<Vec<S, IN>*>(epilogue.y + r * epilogue.ld_y + column) = rounded;

        float sums[PARTS] = {};  // the squares last
#pragma unroll
        for (int i = 0; i < IN; ++i) {
            if constexpr (LAYER) sums[0] += s[i];
            sums[PARTS - 1] += s[i] * s[i];
        }
        const int lane = threadIdx.x % 4;
        const bool counts = stored && !(kSabotage == Sabotage::quarter_moment && lane == 3);
#pragma unroll
        for (float& sum : sums) sum = warp_sum<4>(counts ? sum : 0.0f);
        if (stored && lane == 0) {
            float* const to = moments + r * ld_moments + column / 32 * PARTS;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) to[i] = sums[i];
        }

#pragma unroll
        for (int i = 0; i < IN; ++i) {
            if constexpr (!kSame<W, None>) s[i] *= offset + to_f32(of_columns.w.at[i]);
            if constexpr (sizeof(Z) == 1) s[i] *= inv;
        }
        if (stored) store_f32(z + r * ld_z + column, s);
    }

    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN]) const {
        store<true>(row, column, acc, columns_at<true>(column), row_at<true>(row, column));
    }

    template <int THREADS, int SHARES = 1>
    __device__ __forceinline__ void finish(unsigned char*, int) const {}

private:
    EPILOGUE epilogue;
    const W* w;
    float* moments;
    Z* z;
    int ld_moments, ld_z;
    float offset, inv;
};

}  // namespace frtc
