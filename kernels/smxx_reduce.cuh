// Reductions, running sums and softmax along one axis.
//
//   reduce   y = sum, mean, max or min of x over n elements     one warp a row; any steps; sums of integers in 64 bits
//   cumsum   y[j] = x[0] + ... + x[j]                           one warp a row, 32 elements at a time
//   softmax  y = exp(x - max(x)) / sum(exp(x - max(x)))         rows of N dense elements in registers, as in smxx_norm
//   moves    each element once; a NaN among floats spreads to the result
#pragma once

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
    constexpr int ITEMS = ceil_div(N, LANES * VEC);
#ifdef FRTC_SABOTAGE_LAST_ELEMENT
    constexpr int COUNT = N - 1;
#else
    constexpr int COUNT = N;
#endif
    static_assert(ROWS == 1 || LANES <= 32, "rows share a block only where a warp holds them");
    __shared__ float partial[2][LANES > 32 ? LANES / 32 : 1];
    const int lane = threadIdx.x % LANES;
    const int asked = blockIdx.x * ROWS + threadIdx.x / LANES;
    const bool live = ROWS == 1 || asked < rows;
    const long long row = live ? asked : rows - 1;  // idle rows of the last block take part in the shuffles

    float v[ITEMS][VEC];
    float largest = __uint_as_float(0xff800000u);  // minus infinity
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (i * LANES + lane) * VEC;
        load_some<VEC>(v[i], x + row * x_step + column, N - column);
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (column + j < N) largest = fmaxf(largest, v[i][j]);
    }
    largest = row_max<LANES>(largest, partial[0]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            v[i][j] = (i * LANES + lane) * VEC + j < COUNT ? expf(v[i][j] - largest) : 0.0f;
            sum += v[i][j];
        }
    const float scale = 1.0f / row_sum<LANES>(sum, partial[1]);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (i * LANES + lane) * VEC;
#pragma unroll
        for (int j = 0; j < VEC; ++j) v[i][j] *= scale;
        if (live) store_some<VEC>(y + row * y_step + column, v[i], N - column);
    }
}

}  // namespace frtc
