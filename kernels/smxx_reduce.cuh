// Reductions, running sums and softmax along one axis.
//
//   reduce   y = sum, mean, max or min of x over n elements     one warp a row; any steps; sums of integers in 64 bits
//   cumsum   y[j] = x[0] + ... + x[j]                           one warp a row, 32 elements at a time
//   softmax  y = exp(x - max(x)) / sum(exp(x - max(x)))         rows of N dense elements in registers, as in smxx_norm
//   moves    each element once; a NaN among floats spreads to the result
#pragma once

#include "ptx.cuh"
#include "vector.cuh"

namespace frtc {

enum class Reduce { sum, mean, max, min };

template <Reduce OP, typename A>
__device__ __forceinline__ A combine(A a, A b) {
    if constexpr (OP == Reduce::max) return a != a || a > b ? a : b;
    if constexpr (OP == Reduce::min) return a != a || a < b ? a : b;
    return a + b;
}

// A is the type that is added in: float or long long. Lanes without an element hold what leaves the others as they are.
template <Reduce OP, int WARPS, typename A, typename X, typename Y>
__global__ void __launch_bounds__(WARPS * 32)
    reduce(const X* x, Y* y, int rows, int n, int x_row, int x_step, int y_row) {
    grid_wait(), grid_release();
    const long long row = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
#ifdef FRTC_SABOTAGE_LAST_ELEMENT
    n -= 1;
#endif
    const X* from = x + row * x_row;
    A total = OP == Reduce::max || OP == Reduce::min ? as_register<A>(from[0]) : A(0);
    for (long long j = threadIdx.x % 32; j < n; j += 32) total = combine<OP>(total, as_register<A>(from[j * x_step]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total = combine<OP>(total, __shfl_xor_sync(0xffffffffu, total, step));
    if constexpr (OP == Reduce::mean) total /= n;
    if (threadIdx.x % 32 == 0) y[row * y_row] = as_stored<Y>(total);
}

template <int WARPS, typename A, typename X, typename Y>
__global__ void __launch_bounds__(WARPS * 32)
    cumsum(const X* x, Y* y, int rows, int n, int x_row, int x_step, int y_row, int y_step) {
    grid_wait(), grid_release();
    const long long row = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
#ifdef FRTC_SABOTAGE_LAST_ELEMENT
    n -= 1;
#endif
    const int lane = threadIdx.x % 32;
    A before = A(0);
    for (int start = 0; start < n; start += 32) {
        const long long j = start + lane;
        A value = j < n ? as_register<A>(x[row * x_row + j * x_step]) : A(0);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const A other = __shfl_up_sync(0xffffffffu, value, step);
            if (lane >= step) value += other;
        }
        value += before;
        before = __shfl_sync(0xffffffffu, value, 31);
        if (j < n) y[row * y_row + j * y_step] = as_stored<Y>(value);
    }
}

template <int N, int LANES, int ROWS, int VEC, typename X, typename Y>
__global__ void __launch_bounds__(LANES * ROWS) softmax(const X* x, Y* y, int rows, int x_step, int y_step) {
    grid_wait(), grid_release();
    using Part = Share<N, LANES, ROWS, VEC>;
    __shared__ float partial[2][Part::WARPS];
    const Part part(rows);
    float v[Part::ITEMS][VEC];
    float largest = __uint_as_float(0xff800000u);  // minus infinity
#pragma unroll
    for (int i = 0; i < Part::ITEMS; ++i) {
        load_some<VEC>(v[i], x + part.row * x_step + part.column(i), part.left(i));
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < part.left(i)) largest = fmaxf(largest, v[i][j]);
    }
    largest = row_max<LANES>(largest, partial[0]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Part::ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            v[i][j] = j < part.left(i) ? expf(v[i][j] - largest) : 0.0f;
#ifdef FRTC_SABOTAGE_LAST_ELEMENT
            if (part.column(i) + j == N - 1) v[i][j] = 0.0f;
#endif
            sum += v[i][j];
        }
    const float scale = 1.0f / row_sum<LANES>(sum, partial[1]);
#pragma unroll
    for (int i = 0; i < Part::ITEMS; ++i) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) v[i][j] *= scale;
        if (part.live) store_some<VEC>(y + part.row * y_step + part.column(i), v[i], part.left(i));
    }
}

}  // namespace frtc
