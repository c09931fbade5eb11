// y = epilogue(x w^T) on tcgen05: products of shared memory into tensor memory, by one thread of a block
//
//   x  [M, K], w  [N, K], rows of strides ldx, ldw       T: bf16, fp16
//   y  [M, N], or [M, N / 2] where gated; bias, gate, residual: epilogue.cuh
//   rows of x and w start at multiples of 16 bytes (base address and stride); nothing beyond K of a row is used
//   rows   null, or the number of rows of y (of each batch) that anything reads: tiles beyond it are left out
//   batch  x, w, residual, gate and y may have one more axis, with its own strides (0: the same for all)
//   grid   (ceil(M / 128), ceil(N / BN), batch)          block  128 threads: one for each row of the accumulators
//   smem   STAGES * (128 + BN) * 128 bytes, aligned to 1024 inside the block: the ring
//   tensor memory  BN columns of 128 lanes: fp32 accumulators, row m of the tile in lane m
//   compiles, not run: no such GPU was at hand. Descriptors, instructions and their fences are the vendor's wrappers
//
// A tile in shared memory is K-major in the 128-byte swizzle: a row of 64 elements is 8 chunks of 16 bytes, chunk c of row
// r lies at c ^ (r % 8), and 8 rows are one atom of 1024 bytes (PTX ISA, "Shared memory matrix layout"). It is the order
// that copy_tile writes. The products read it through the async proxy, so every thread fences its copies before the barrier.
#pragma once

#include "smxx_gemm.cuh"

#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/mma_sm100_umma.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>
#include <cutlass/arch/barrier.h>

namespace frtc::sm110 {

using cutlass::arch::ClusterBarrier;

inline constexpr int BM = 128, BK = 64, THREADS = 128;
inline constexpr int MMA_K = 16;                // elements of K in one instruction
inline constexpr int ATOM_BYTES = 8 * 128;      // 8 rows of a swizzled tile

template <typename T>
struct Vendor;
template <>
struct Vendor<bf16> {
    using type = cutlass::bfloat16_t;
};
template <>
struct Vendor<f16> {
    using type = cutlass::half_t;
};

// Where a K-major tile in 128-byte swizzle starts. A step of 16 elements of K adds 32 bytes to the address.
__device__ __forceinline__ cute::UMMA::SmemDescriptor tile_descriptor(u32 address) {
    cute::UMMA::SmemDescriptor tile;
    tile.desc_ = 0;
    tile.start_address_ = static_cast<u16>(address >> 4);
    tile.leading_byte_offset_ = 1;  // not used: a row of the tile is one swizzle span
    tile.stride_byte_offset_ = ATOM_BYTES >> 4;
    tile.version_ = 1;
    tile.layout_type_ = static_cast<u8>(cute::UMMA::LayoutType::SWIZZLE_128B);
    return tile;
}

// accumulators (+)= one tile of x times one of w; issued by the elected thread of the calling warp.
template <typename T, int BN>
__device__ __forceinline__ void multiply_tile(u32 accumulators, u32 x_tile, u32 w_tile, bool add) {
    using V = typename Vendor<T>::type;
    constexpr auto K_MAJOR = cute::UMMA::Major::K;
    using Mma = cute::SM100_MMA_F16BF16_SS<V, V, float, BM, BN, K_MAJOR, K_MAJOR>;
    const u64 instruction = cute::UMMA::make_runtime_instr_desc<V, V, float, BM, BN, K_MAJOR, K_MAJOR>();
    cute::UMMA::SmemDescriptor a = tile_descriptor(x_tile), b = tile_descriptor(w_tile);
#pragma unroll
    for (int k = 0; k < BK / MMA_K; ++k) {
        Mma::fma(a, b, accumulators, add || k > 0, instruction);
        a.lo += MMA_K * 2 >> 4, b.lo += MMA_K * 2 >> 4;
    }
}

// Orders tcgen05 instructions before (after) a barrier of the block against those behind (ahead of) it.
__device__ __forceinline__ void fence_before_barrier() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void fence_after_barrier() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Eight neighbouring accumulators of this thread's row.
__device__ __forceinline__ void load_accumulators(float (&v)[8], u32 address) {
    u32 r[8];
    cute::SM100::TMEM::LOAD::SM100_TMEM_LOAD_32dp32b8x::copy(address, r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]);
    cutlass::arch::fence_view_async_tmem_load();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        asm volatile("" : "+r"(r[i]));  // nothing that uses the value may move ahead of the fence
        v[i] = __uint_as_float(r[i]);
    }
}

// The ring: tiles are copied STAGES - 1 ahead; `done[slot]` completes when the products of a slot have read it.
template <typename T, int BN, int STAGES>
__device__ __forceinline__ void mainloop(u32 accumulators, u32 ring, u64* done, const T* x, const T* w, int ldx, int ldw,
                                         int M, int N, int K, int m0, int n0, int k_tiles) {
    constexpr int X_BYTES = BM * BK * 2, STAGE_BYTES = X_BYTES + BN * BK * 2;
    const auto copy = [&](int tile) {
        const u32 to = ring + tile % STAGES * STAGE_BYTES;
        copy_tile<false, BM, BK, THREADS>(to, x, ldx, m0, M, tile * BK, K);
        copy_tile<false, BN, BK, THREADS>(to + X_BYTES, w, ldw, n0, N, tile * BK, K);
    };
    const auto wait = [&](int tile) { ClusterBarrier::wait(done + tile % STAGES, tile / STAGES & 1); };
#pragma unroll 1
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        if (tile < k_tiles) copy(tile);
        cp_async_commit();
    }
#pragma unroll 1
    for (int tile = 0; tile < k_tiles; ++tile) {
        cp_async_wait<STAGES - 2>();
        cutlass::arch::fence_view_async_shared();
        __syncthreads();
        if (threadIdx.x < 32) {
            const u32 stage = ring + tile % STAGES * STAGE_BYTES;
            fence_after_barrier();
            multiply_tile<T, BN>(accumulators, stage, stage + X_BYTES, tile > 0);
            cutlass::arch::umma_arrive(done + tile % STAGES);
        }
        if (tile + STAGES - 1 < k_tiles) {
            if (tile > 0) wait(tile - 1);  // its slot is the next to fill
            copy(tile + STAGES - 1);
        }
        cp_async_commit();
    }
    wait(k_tiles - 1);
    fence_after_barrier();
}

template <typename T, int BN, int STAGES, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(THREADS)
gemm(const T* __restrict__ x, const T* __restrict__ w, const int* __restrict__ rows, int M, int N, int K, int ldx, int ldw,
     i64 batch_x, i64 batch_w, ARGUMENTS... of_epilogue) {
    static_assert(BN == 32 || BN == 64 || BN == 128 || BN == 256, "columns of tensor memory are given out in powers of two");
    extern __shared__ __align__(128) u8 smem[];
    __shared__ __align__(8) u64 done[STAGES];
    __shared__ u32 given;
    const u32 ring = (shared_address(smem) + ATOM_BYTES - 1) / ATOM_BYTES * ATOM_BYTES;
    const int m0 = blockIdx.x * BM, n0 = blockIdx.y * BN, warp = threadIdx.x / 32;
    if (rows && m0 >= *rows - (kSabotage == Sabotage::row_tile ? BM : 0)) return;

    x += blockIdx.z * batch_x, w += blockIdx.z * batch_w;
    int k_tiles = (K + BK - 1) / BK;
    if constexpr (kSabotage == Sabotage::last_k_tile) --k_tiles;

    cute::TMEM::Allocator1Sm allocator;
    if (warp == 0) {
        allocator.allocate(BN, &given);
        allocator.release_allocation_lock();
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) ClusterBarrier::init(done + s, 1);
        cutlass::arch::fence_barrier_init();
    }
    fence_before_barrier();
    __syncthreads();
    fence_after_barrier();
    const u32 accumulators = given;

    mainloop<T, BN, STAGES>(accumulators, ring, done, x, w, ldx, ldw, M, N, K, m0, n0, k_tiles);

    const EPILOGUE epilogue(M, N, blockIdx.z, of_epilogue...);
    const u32 lane = static_cast<u32>(warp * 32) << 16;  // a warp reads the 32 lanes of its own quarter
#pragma unroll 1
    for (int column = 0; column < BN; column += 8) {
        float v[8];
        load_accumulators(v, accumulators + lane + column);
        epilogue.store(m0 + static_cast<int>(threadIdx.x), n0 + column, v);
    }
    epilogue.template finish<THREADS>(smem, m0);
    fence_before_barrier();
    __syncthreads();
    fence_after_barrier();
    if (warp == 0) allocator.free(accumulators, BN);
}

}  // namespace frtc::sm110
