// Normalisation along the last axis, with an optional residual in front:
//
//   s = x + gate * r          rounded to X, stored            (only with R; gate absent: x + r)
//   rms    y = inner(s / sqrt(mean(s^2) + eps)) * (offset + w)
//   ada    y = s / sqrt(mean(s^2) + eps) * (1 + w) + b        w is the scale, b the shift
//   layer  y = (s - mean(s)) / sqrt(var(s) + eps) * w + b     w, b may be absent
//   Y e4m3: stored is y * inv, one number for all rows; or, kPerRow, y * (448 / m) of each row's largest magnitude m,
//   and m / 448 in row_scale [M]; m and y are fp32 in registers.
//
//   x, s [M, N] X   r [M, N] R   gate, w, b [N] or [M, N] (step 0 or the row's)   y [M, N] Y     rows of step elements
//   grid   M / ROWS blocks of LANES * ROWS threads, LANES a power of two up to 32 or, with ROWS = 1, a multiple of 32
//   row    stays in registers: ITEMS groups of VEC a thread; statistics in fp32, the variance from centred values
//   smem   one number per warp and pass (none where LANES <= 32)
//   moves  2 M N elements, 4 M N with a residual: bound by DRAM for rows beyond the L2, by launch latency below
//   s may be the same view as x or r, and y as x: a thread reads its elements before it writes them.
#pragma once

#include "ptx.cuh"
#include "vector.cuh"

namespace frtc {

enum class Norm { rms, ada, layer };

// v += gate * r, rounded to X
template <typename X, int VEC, typename R, typename G>
__device__ __forceinline__ void add_residual(float (&v)[VEC], const R* r, const G* gate, int left) {
    float step[VEC];
    load_some<VEC>(step, r, left);
    if constexpr (kPresent<G>) {
        float factor[VEC];
        load_some<VEC>(factor, gate, left);
#pragma unroll
        for (int j = 0; j < VEC; ++j) step[j] *= factor[j];
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) v[j] = round_to<X>(v[j] + step[j]);
}

// v -= mean(v); places behind the end of the row become 0
template <int N, int LANES, int ROWS, int VEC, int ITEMS>
__device__ __forceinline__ void center(float (&v)[ITEMS][VEC], Share<N, LANES, ROWS, VEC> share, float* partial) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum += v[i][j];
    const float mean = row_sum<LANES>(sum, partial) / N;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < VEC; ++j) v[i][j] = j < share.left(i) ? v[i][j] - mean : 0.0f;
}

template <int N, int LANES, int ROWS, int VEC, int ITEMS>
__device__ __forceinline__ float mean_square(const float (&v)[ITEMS][VEC], Share<N, LANES, ROWS, VEC> share,
                                             float* partial) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#ifdef FRTC_SABOTAGE_LAST_GROUP
        if (share.column(i) + VEC >= N) continue;
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) squares += v[i][j] * v[i][j];
    }
    return row_sum<LANES>(squares, partial) / N;
}

// The affine map of one group, with whatever of scale and shift there is.
template <Norm KIND, typename W, typename B, int VEC>
__device__ __forceinline__ void affine(float (&v)[VEC], const float (&factor)[VEC], const float (&shift)[VEC],
                                       float offset) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        if constexpr (kPresent<W> && KIND == Norm::rms) v[j] *= offset + factor[j];
        if constexpr (kPresent<W> && KIND == Norm::ada) v[j] *= 1.0f + factor[j];
        if constexpr (kPresent<W> && KIND == Norm::layer) v[j] *= factor[j];
        if constexpr (kPresent<B>) v[j] += shift[j];
    }
}

// The factor of a row that is stored with a scale of its own, which is written. v holds what is to be stored.
template <int N, int LANES, int ROWS, int VEC, int ITEMS>
__device__ __forceinline__ float find_scale(const float (&v)[ITEMS][VEC], Share<N, LANES, ROWS, VEC> share, int rows,
                                            float* row_scale, int step) {
    __shared__ unsigned int partial[Share<N, LANES, ROWS, VEC>::WARPS];
    unsigned int top = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#ifdef FRTC_SABOTAGE_LAST_MAXIMUM
        if (share.column(i) + VEC >= N) continue;
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) top = max(top, magnitude(v[i][j]));
    }
    const RowScale found(row_top<LANES>(top, partial));
    long long row = share.row;
#ifdef FRTC_SABOTAGE_NEIGHBOUR_SCALE
    row = (row + 1) % rows;
#endif
    if (share.live && share.lane == 0) row_scale[row * step] = found.scale;
    return found.factor;
}

// The bound of one block an SM keeps the compiler from spilling a few bytes around divisions and conversions.
template <Norm KIND, int N, int LANES, int ROWS, int VEC, typename X, typename R, typename G, typename W, typename B,
          typename Y, typename INNER, bool kPerRow>
__global__ void __launch_bounds__(LANES * ROWS, kSame<Y, e4m3> ? 1 : 0)
    norm(const X* x, const R* r, const G* gate, const W* w, const B* b, X* s, Y* y, const float* inv, float* row_scale,
         int rows, int x_step, int r_step, int gate_step, int w_step, int b_step, int s_step, int y_step,
         int scale_step, float eps, float offset) {
    grid_wait(), grid_release();
    using Part = Share<N, LANES, ROWS, VEC>;
    constexpr bool SCALED = kSame<Y, e4m3>;
    __shared__ float partial[2][Part::WARPS];
    const Part part(rows);
    float unit = SCALED && !kPerRow ? *inv : 1.0f;  // what the row is stored times

    float v[Part::ITEMS][VEC], factor[VEC], shift[VEC];
#pragma unroll
    for (int i = 0; i < Part::ITEMS; ++i) {
        const long long column = part.column(i);
        load_some<VEC>(v[i], x + part.row * x_step + column, part.left(i));
        if constexpr (kPresent<R>) {
            const G* factors = kPresent<G> ? gate + part.row * gate_step + column : gate;
            add_residual<X>(v[i], r + part.row * r_step + column, factors, part.left(i));
            if (part.live) store_some<VEC>(s + part.row * s_step + column, v[i], part.left(i));
        }
    }
    auto load_affine = [&](int i) {
        if constexpr (kPresent<W>) load_some<VEC>(factor, w + part.row * w_step + part.column(i), part.left(i));
        if constexpr (kPresent<B>) load_some<VEC>(shift, b + part.row * b_step + part.column(i), part.left(i));
    };
    auto store = [&](int i) {
        if constexpr (SCALED) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) v[i][j] *= unit;
        }
        if (part.live) store_some<VEC>(y + part.row * y_step + part.column(i), v[i], part.left(i));
    };
    if constexpr (Part::ITEMS == 1) load_affine(0);  // in flight while the sums are made

    if constexpr (KIND == Norm::layer) center(v, part, partial[0]);
    const float scale = rsqrtf(mean_square(v, part, partial[1]) + eps);
#pragma unroll
    for (int i = 0; i < Part::ITEMS; ++i) {
        if constexpr (Part::ITEMS > 1) load_affine(i);
#pragma unroll
        for (int j = 0; j < VEC; ++j) v[i][j] = round_to<INNER>(v[i][j] * scale);
        affine<KIND, W, B>(v[i], factor, shift, offset);
        if constexpr (!kPerRow) store(i);
    }
    if constexpr (kPerRow) {
        unit = find_scale(v, part, rows, row_scale, scale_step);
#pragma unroll
        for (int i = 0; i < Part::ITEMS; ++i) store(i);
    }
}

}  // namespace frtc
