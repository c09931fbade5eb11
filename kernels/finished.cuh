// A product whose rows are finished (finish.cuh): an epilogue for any mainloop that has the members of epilogue.cuh, and a
// launch of its own for rows that are better finished by all SMs.
//
//   Finished       EPILOGUE stores the product's rows as S; its parameters come behind those of the finish
//   quantize_rows  y = e4m3(s * (448 / m)), scale = m / 448; a row is held by LANES threads, as in smxx_norm.cuh
//                  s [M, N] bf16 from the launch before; moves 3 M N bytes
#pragma once

#include "finish.cuh"

namespace frtc {

template <typename EPILOGUE, int BM, int SMEM, int N, typename S, typename Y, bool kPerRow, typename NORM, bool SPREAD = false>
class Finished {
    using Rows = RowFinish<N, S, Y, kPerRow, NORM>;

public:
    static constexpr int IN = EPILOGUE::IN, BLOCKS = 1;
    static constexpr bool WHOLE = EPILOGUE::WHOLE;

    template <typename... ARGUMENTS>
    __device__ __forceinline__ Finished(int m, int n, int batch, u32* arrived, const typename NORM::W* w,
                                        const typename NORM::B* b, const float* inv, S* s, Y* y, float* scale, int ld_s,
                                        int ld_y, int ld_scale, i64 batch_s, i64 batch_y, i64 batch_scale, float eps,
                                        float offset, ARGUMENTS... of_epilogue)
        : epilogue(m, n, batch, of_epilogue...), arrived(arrived + gridDim.x * batch),
          rows{s + batch * batch_s, w, b, y + batch * batch_y, kPerRow ? scale + batch * batch_scale : nullptr, m, ld_s,
               ld_y, ld_scale, Rows::SCALED && !kPerRow ? *inv : 1.0f, eps, offset} {}

    using Columns = typename EPILOGUE::Columns;
    using Row = typename EPILOGUE::Row;

    __device__ __forceinline__ bool whole() const { return epilogue.whole(); }
    __device__ __forceinline__ bool exists(int row, int column) const { return epilogue.exists(row, column); }

    template <bool VECTORS>
    __device__ __forceinline__ Columns columns_at(int column) const {
        return epilogue.template columns_at<VECTORS>(column);
    }
    template <bool VECTORS>
    __device__ __forceinline__ Row row_at(int row, int column) const {
        return epilogue.template row_at<VECTORS>(row, column);
    }
    template <bool VECTORS>
    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN], const Columns& of_columns,
                                          const Row& of_row) const {
        linger();
        epilogue.template store<VECTORS>(row, column, acc, of_columns, of_row);
    }
    __device__ __forceinline__ void store(int row, int column, const float (&acc)[IN]) const {
        linger();
        epilogue.store(row, column, acc);
    }

    template <int THREADS, int SHARES = 1>
    __device__ __forceinline__ void finish(u8* smem, int m0) const {
        const u32 all = gridDim.y * SHARES;
        const u32 enough = kEarly ? all - SHARES : all;
        __syncthreads();  // all stores of the block are made, and its shared memory is free
        rows.template prepare<THREADS>(smem);
        const int count = min(BM, rows.rows - m0);
        u32* const counter = arrived + blockIdx.x;
        if constexpr (SPREAD) {
            if (threadIdx.x == 0) {
                for (u32 seen = atomic_add_acq_rel(counter, 1) + 1; seen < enough; seen = load_acquire(counter)) {
                }
            }
            cp_async_wait<0>();
            __syncthreads();
            const int block = blockIdx.y + gridDim.y * (SHARES > 1 ? blockIdx.z : 0), warp = threadIdx.x / 32;
            if (count > static_cast<int>(all)) {
                const int first = block + static_cast<int>(all) * warp, step = all * (THREADS / 32);
                rows.template panel<THREADS, SMEM, 1>(smem, m0, count, first, step);
            } else if (block < count) {
                rows.template whole_row<THREADS>(smem, m0 + block);
            }
            if constexpr (kEarly) __syncthreads();  // all rows of the block are read
            if (threadIdx.x == 0) {
                const u32 done = atomic_add_acq_rel(counter, 1) + 1;
                if (done == 2 * all + kMade) *counter = 0;
                if (kEarly && done == 2 * enough) atomic_add_acq_rel(counter, kMade);
            }
        } else {
            const u32 seen = threadIdx.x == 0 ? atomic_add_acq_rel(counter, 1) + 1 : 0;
            if (seen == all + kMade) *counter = 0;
            cp_async_wait<0>();
            if (__syncthreads_or(seen == enough)) {
                rows.template panel<THREADS, SMEM, 2>(smem, m0, count, threadIdx.x / 32, THREADS / 32);
                if constexpr (kEarly) {
                    __syncthreads();  // all rows of the panel are read
                    if (threadIdx.x == 0) atomic_add_acq_rel(counter, kMade);
                }
            }
        }
    }

private:
#ifdef FRTC_SABOTAGE_EARLY_PANEL
    // The panel is made without its first tile, which is stored only when the counter has the bit that says so: no delay
    // decides. Panels of one tile are whole.
    static constexpr bool kEarly = true;
    static constexpr u32 kMade = 1u << 31;
#else
    static constexpr bool kEarly = false;
    static constexpr u32 kMade = 0;
#endif

    __device__ __forceinline__ void linger() const {
#ifdef FRTC_SABOTAGE_LATE_TILE
        if (blockIdx.y == 0) __nanosleep(20000);
#endif
        if constexpr (kEarly) {
            while (blockIdx.y == 0 && gridDim.y > 1 && !(load_acquire(arrived + blockIdx.x) & kMade)) __nanosleep(100);
        }
    }

    EPILOGUE epilogue;
    u32* arrived;  // one counter for each panel of the batch
    Rows rows;
};

template <int N, int LANES, int ROWS, typename S>
__global__ void __launch_bounds__(LANES * ROWS)
quantize_rows(const S* s, e4m3* y, float* scale, const int* specified, int rows, int rows_of_batch, int ld_s, int ld_y,
              int ld_scale, i64 batch_s, i64 batch_y, i64 batch_scale) {
    grid_wait(), grid_release();
    using Part = Share<N, LANES, ROWS, 8>;
    __shared__ unsigned int partial[Part::WARPS];
    const Part part(rows);
    const int batch = static_cast<int>(part.row) / rows_of_batch, row = static_cast<int>(part.row) % rows_of_batch;
    const bool live = part.live && (!specified || row < *specified);
    if (ROWS == 1 && !live) return;  // where rows share a block, all of its threads take part in the maxima
    s += batch * batch_s + static_cast<i64>(row) * ld_s;
    y += batch * batch_y + static_cast<i64>(row) * ld_y;

    float v[Part::ITEMS][8];
    unsigned int top = 0;
#pragma unroll
    for (int i = 0; i < Part::ITEMS; ++i) {
        load_some<8>(v[i], s + part.column(i), part.left(i));
#pragma unroll
        for (int j = 0; j < 8; ++j) top = max(top, magnitude(v[i][j]));
    }
    const RowScale found(row_top<LANES>(top, partial));
    if (!live) return;
#ifdef FRTC_SABOTAGE_NEIGHBOUR_SCALE
    const int owner = (row + 1) % rows_of_batch;
#else
    const int owner = row;
#endif
    if (part.lane == 0) scale[batch * batch_scale + static_cast<i64>(owner) * ld_scale] = found.scale;
#pragma unroll
    for (int i = 0; i < Part::ITEMS; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] *= found.factor;
        store_some<8>(y + part.column(i), v[i], part.left(i));
    }
}

}  // namespace frtc
