// Raw PTX that every family shares: asynchronous copies, matrix fragments, tensor-core products, barriers.
//
// Needs sm_80; products of e4m3 sm_89. Fragment layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point
// type". With lane l,
// g = l / 4 and t = l % 4 an m16n8k16 product holds
//   A  16x16  a[0] (g, 2t..)   a[1] (g+8, 2t..)   a[2] (g, 2t+8..)   a[3] (g+8, 2t+8..)    two elements a register
//   B  16x8   b[0] (2t.., g)   b[1] (2t+8.., g)                                            two elements a register
//   C  16x8   c[0] (g, 2t)     c[1] (g, 2t+1)     c[2] (g+8, 2t)     c[3] (g+8, 2t+1)      fp32
// m16n8k32 of e4m3 has the same fragments byte by byte: four elements a register, 2t a place of two of them.
// ldmatrix hands row r of 8x8 matrix i, two elements a lane, to lanes 4r..4r+3; lane 8i + r gives that row's address.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace frtc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- cp.async -------------------------------------------------------------------------------------------------------

// 16 bytes from global to shared memory past L1. Only `bytes` (0..16) are read, the rest is zero-filled; with 0 bytes
// `src` is not read, but must still be a valid address. Both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// 4 bytes, for rows that are not 16-byte aligned; goes through L1. `bytes` is 0 or 4.
__device__ __forceinline__ void cp_async_4(u32 dst, const void* src, int bytes = 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's newest groups are in flight. Other threads' copies need a barrier after.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- fragments ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

// Each 8x8 matrix arrives transposed: rows of B^T in shared memory become columns of the B fragment.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

// 16 bits, zero-extended.
__device__ __forceinline__ u32 load_shared_16(u32 address) {
    u32 r;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}

// ---- tensor cores ---------------------------------------------------------------------------------------------------

// c += a b for one m16n8k16 tile; T is __nv_bfloat16 or __half, accumulation in fp32.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b for one m16n8k32 tile of e4m3, accumulation in fp32. Where it is not native ptxas would widen to fp16, in so many
// registers that large tiles spill: smxx_gemm.cuh widens itself there.
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
inline constexpr bool kNativeE4m3 = true;
#else
inline constexpr bool kNativeE4m3 = false;
#endif
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- barriers -------------------------------------------------------------------------------------------------------

// A barrier of `threads` threads of the block (a multiple of 32); id 0 is __syncthreads's, so 1 to 15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds `value` to a counter in global memory. Release and acquire at device scope: what this block wrote before a
// barrier and this call is visible to the block that sees the sum.
__device__ __forceinline__ u32 atomic_add_acq_rel(u32* counter, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ u32 load_acquire(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------

// A launch may begin before those it depends on have ended (an "early" launch of a Plan). The kernel then waits itself:
// grid_wait() returns when all grids before this one are complete and what they wrote is visible. Every thread calls it
// before it reads or writes anything but weights, which nobody writes. In a launch that is not early it returns at once.
// NOTE: what plain loads read, and is no weight, is not const __restrict__: the compiler may move them ahead of the wait. It
// moves no cp_async: that is volatile.
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900 && !defined(FRTC_SABOTAGE_NO_WAIT)
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets early launches behind this one begin once every block has called it or ended. It says nothing about memory: what
// this grid writes before or after it is visible behind the other's grid_wait(), which waits until this grid is complete.
// Kernels call it behind their own wait. Before it, the grid after the next one would begin, too, and double up on the SMs
// that have room: vision's attention took 11.8 us on an H200 instead of 7.7. Products of few rows may (sm90_gemm.py, RELEASE),
// where a search in the chain says so.
__device__ __forceinline__ void grid_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace frtc
