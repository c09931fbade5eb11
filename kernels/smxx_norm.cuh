// Normalisation along the last axis, with an optional residual in front:
//
//   s = x + gate * r          rounded to X, stored            (only with R; gate absent: x + r)
//   rms    y = inner(s / sqrt(mean(s^2) + eps)) * (offset + w)
//   ada    y = s / sqrt(mean(s^2) + eps) * (1 + w) + b        w is the scale, b the shift
//   layer  y = (s - mean(s)) / sqrt(var(s) + eps) * w + b     w, b may be absent
//
//   x, s [M, N] X   r [M, N] R   gate, w, b [N] or [M, N] (step 0 or the row's)   y [M, N] Y     rows of step elements
//   grid   M / ROWS blocks of LANES * ROWS threads, LANES a power of two up to 32 or, with ROWS = 1, a multiple of 32
//   row    stays in registers: ITEMS groups of VEC a thread; statistics in fp32, the variance from centred values
//   smem   one float per warp and pass (none where LANES <= 32)
//   moves  2 M N elements, 4 M N with a residual: bound by DRAM for rows beyond the L2, by launch latency below
//   s may be the same view as x or r, and y as x: a thread reads its elements before it writes them.
#pragma once

#include "vector.cuh"

namespace frtc {

enum class Norm { rms, ada, layer };

template <Norm KIND, int N, int LANES, int ROWS, int VEC, typename X, typename R, typename G, typename W, typename B,
          typename Y, typename INNER>
__global__ void __launch_bounds__(LANES * ROWS)
    norm(const X* x, const R* r, const G* gate, const W* w, const B* b, X* s, Y* y, int rows, int x_step, int r_step,
         int gate_step, int w_step, int b_step, int s_step, int y_step, float eps, float offset) {
    constexpr int ITEMS = ceil_div(N, LANES * VEC);
    constexpr bool RAGGED = N != ITEMS * LANES * VEC;
    static_assert(ROWS == 1 || LANES <= 32, "rows share a block only where a warp holds them");
    __shared__ float partial[2][LANES > 32 ? LANES / 32 : 1];

    const int lane = threadIdx.x % LANES;
    const int asked = blockIdx.x * ROWS + threadIdx.x / LANES;
    const bool live = ROWS == 1 || asked < rows;
    const long long row = live ? asked : rows - 1;  // idle rows of the last block take part in the shuffles

    float v[ITEMS][VEC];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (i * LANES + lane) * VEC;
        const int left = RAGGED ? N - column : VEC;
        load_some<VEC>(v[i], x + row * x_step + column, left);
        if constexpr (kPresent<R>) {
            float step[VEC];
            load_some<VEC>(step, r + row * r_step + column, left);
            if constexpr (kPresent<G>) {
                float factor[VEC];
                load_some<VEC>(factor, gate + row * gate_step + column, left);
#pragma unroll
                for (int j = 0; j < VEC; ++j) step[j] *= factor[j];
            }
#pragma unroll
            for (int j = 0; j < VEC; ++j) v[i][j] = round_to<X>(v[i][j] + step[j]);
            if (live) store_some<VEC>(s + row * s_step + column, v[i], left);
        }
    }

    // With one group a thread, scale and shift are fetched while the sums are made.
    float factor[VEC], shift[VEC];
    auto load_affine = [&](int column, int left) {
        if constexpr (kPresent<W>) load_some<VEC>(factor, w + row * w_step + column, left);
        if constexpr (kPresent<B>) load_some<VEC>(shift, b + row * b_step + column, left);
    };
    if constexpr (ITEMS == 1) load_affine(lane * VEC, RAGGED ? N - lane * VEC : VEC);

    if constexpr (KIND == Norm::layer) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int j = 0; j < VEC; ++j) sum += v[i][j];
        const float mean = row_sum<LANES>(sum, partial[0]) / N;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                v[i][j] = !RAGGED || (i * LANES + lane) * VEC + j < N ? v[i][j] - mean : 0.0f;
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#ifdef FRTC_SABOTAGE_LAST_GROUP
        if ((i * LANES + lane + 1) * VEC >= N) continue;
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) squares += v[i][j] * v[i][j];
    }
    const float scale = rsqrtf(row_sum<LANES>(squares, partial[1]) / N + eps);

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (i * LANES + lane) * VEC;
        const int left = RAGGED ? N - column : VEC;
        if constexpr (ITEMS > 1) load_affine(column, left);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            float value = round_to<INNER>(v[i][j] * scale);
            if constexpr (kPresent<W> && KIND == Norm::rms) value *= offset + factor[j];
            if constexpr (kPresent<W> && KIND == Norm::ada) value *= 1.0f + factor[j];
            if constexpr (kPresent<W> && KIND == Norm::layer) value *= factor[j];
            if constexpr (kPresent<B>) value += shift[j];
            v[i][j] = value;
        }
        if (live) store_some<VEC>(y + row * y_step + column, v[i], left);
    }
}

}  // namespace frtc
