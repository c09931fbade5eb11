// Rows of a table picked by integers on the device, and rows put at a place that the device knows.
//
//   gather_rows  y[i] = scale * table[ids[i]]       table rows of WIDTH elements, `table_step` apart; ids `id_step` apart
//   put_rows     y[h, at + i] = x[h, i]             x [outer, width], whole rows moved `at * y_step` further into y
//   grid   (groups of VEC elements of a row, rows)  threads past the end of a row are idle
//   moves  2 elements an element; an id or place outside of its range is not checked
#pragma once

#include "ptx.cuh"
#include "vector.cuh"

namespace frtc {

template <int VEC, int THREADS, typename T, typename I, typename Y>
__global__ void __launch_bounds__(THREADS)
    gather_rows(const T* table, const I* ids, Y* y, int width, int table_step, int id_step, int y_step, float scale) {
    grid_wait(), grid_release();
    const int column = (blockIdx.x * THREADS + threadIdx.x) * VEC;
    if (column >= width) return;
    const long long row = blockIdx.y;
    long long id = ids[row * id_step];
#ifdef FRTC_SABOTAGE_NEIGHBOUR_ROW
    id = id > 0 ? id - 1 : 1;
#endif
    const T* from = table + id * table_step + column;
    Y* to = y + row * y_step + column;
    if constexpr (kSame<T, Y>) {
        if (scale == 1.0f) {  // also for integers, which fp32 would round
            move_some<VEC>(to, from, width - column);
            return;
        }
    }
    float v[VEC];
    load_some<VEC>(v, from, width - column);
#pragma unroll
    for (int j = 0; j < VEC; ++j) v[j] *= scale;
    store_some<VEC>(to, v, width - column);
}

template <int VEC, int THREADS, typename T, typename I>
__global__ void __launch_bounds__(THREADS)
    put_rows(const T* x, const I* at, T* y, int width, int x_outer, int y_outer, int y_step) {
    grid_wait(), grid_release();
    const int column = (blockIdx.x * THREADS + threadIdx.x) * VEC;
    if (column >= width) return;
    const long long outer = blockIdx.y;
    move_some<VEC>(y + outer * y_outer + static_cast<long long>(*at) * y_step + column, x + outer * x_outer + column,
                   width - column);
}

}  // namespace frtc
