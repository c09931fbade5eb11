// Hopper's own instructions: mbarriers, tensor maps, wgmma, clusters. Needs sm_90a.
//
// wgmma: D [64, N] fp32 += A [64, K] B [K, N], by the 128 threads of a warpgroup, K = 32 bytes of a row. Warp w of the four
// holds rows 16w .. 16w+15; with g = lane / 4, t = lane % 4
//   D      d[4j], d[4j+1]    (g, 8j+2t), (g, 8j+2t+1)      d[4j+2], d[4j+3]    (g+8, 8j+2t), (g+8, 8j+2t+1)
//   A      in registers as for mma.m16n8k16 (ptx.cuh), or in shared memory
// Operands in shared memory are tiles of rows of 128 bytes, each eight rows (1,024 bytes, the atom, and its alignment)
// swizzled: chunk c of 16 bytes of row r lies at c ^ r % 8, which is what a tensor map with swizzle 128 writes.
//   K-major (rows of K)      the next 32 bytes of K are 32 bytes further: +2 in a descriptor
//   MN-major (B as rows of N, 16-bit types only): an atom is 8 of K x 64 of N; see descriptor_mn
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate", "Matrix Descriptor Format", "Tensor Map".
#pragma once

#include "numeric.cuh"
#include "ptx.cuh"

namespace frtc {

struct alignas(64) TensorMap {
    u64 words[16];
};

// ---- mbarriers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster; a barrier of the threads follows.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and the phase also waits for `bytes` from copies that name this barrier.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity is complete. It must not be two phases behind.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- tensor maps ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tensor_map_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box at column x of row y goes to shared memory; its bytes, those beyond the edges as zeros, count at the barrier.
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap& map, u32 barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z, int u) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z, int u, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v) : "memory");
}

__device__ __forceinline__ float4 load_shared_f32x4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 load_shared_f32x2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_shared_u32x4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_f32x4(u32 address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Ordinary stores to shared memory come before what the copy engine or wgmma reads there; by each thread that stored,
// then a barrier.
__device__ __forceinline__ void async_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers of a warpgroup ---------------------------------------------------------------------------------------

template <int REGISTERS>
__device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- clusters -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// After barrier_init_fence: orders nothing else.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of the same place in the shared memory of the block `rank` of the cluster.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// 16 bytes to another block; they count at a barrier there (expect them before the cluster's barrier).
__device__ __forceinline__ void store_async(u32 to, u32 barrier, float a, float b, float c, float d) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];"
                 ::"r"(to), "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// The same of 8 bytes.
__device__ __forceinline__ void store_async(u32 to, u32 barrier, u32 a, u32 b) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];"
                 ::"r"(to), "r"(barrier), "r"(a), "r"(b) : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// Of a K-major tile with swizzled rows of 128 bytes; groups of eight rows follow each other.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Of an MN-major tile of B: rows of K, each 64 elements of N in 128 swizzled bytes; eight rows are an atom. The next eight
// of K lie `atom` bytes further (1,024: rows follow each other), the next 64 of N lie `panel` bytes further.
__device__ __forceinline__ u64 descriptor_mn(u32 address, u32 panel, u32 atom = 1024) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(panel >> 4) << 16 | static_cast<u64>(atom >> 4) << 32 |
           1ull << 62;
}

// Registers and shared memory written before are visible to the products that follow; by all four warps.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// wgmma<bf16, 128>(d, a, b, accumulate): a is a descriptor or four registers, b a descriptor. B_MN: b is MN-major.
template <typename T, int N>
struct Wgmma;

#define FRTC_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FRTC_D8(i) FRTC_D4(i), FRTC_D4(i + 4)
#define FRTC_D16(i) FRTC_D8(i), FRTC_D8(i + 8)
#define FRTC_D32(i) FRTC_D16(i), FRTC_D16(i + 16)
#define FRTC_D64(i) FRTC_D32(i), FRTC_D32(i + 32)
#define FRTC_N8_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FRTC_N8_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FRTC_N8_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FRTC_N8_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FRTC_N8_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FRTC_N8_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FRTC_N8_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FRTC_N8_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FRTC_N8_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FRTC_N8_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FRTC_N8_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FRTC_N8_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FRTC_N8_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FRTC_N8_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FRTC_N8_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FRTC_N8_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FRTC_N4_0 "%0, %1, %2, %3"
#define FRTC_N4_2 "%8, %9, %10, %11"
#define FRTC_N4_4 "%16, %17, %18, %19"
#define FRTC_N4_6 "%24, %25, %26, %27"
#define FRTC_N4_12 "%48, %49, %50, %51"
#define FRTC_N4_18 "%72, %73, %74, %75"
#define FRTC_N16 FRTC_N8_0 ", " FRTC_N8_1
#define FRTC_N32 FRTC_N16 ", " FRTC_N8_2 ", " FRTC_N8_3
#define FRTC_N40 FRTC_N32 ", " FRTC_N8_4
#define FRTC_N48 FRTC_N40 ", " FRTC_N8_5
#define FRTC_N64 FRTC_N48 ", " FRTC_N8_6 ", " FRTC_N8_7
#define FRTC_N80 FRTC_N64 ", " FRTC_N8_8 ", " FRTC_N8_9
#define FRTC_N96 FRTC_N80 ", " FRTC_N8_10 ", " FRTC_N8_11
#define FRTC_N112 FRTC_N96 ", " FRTC_N8_12 ", " FRTC_N8_13
#define FRTC_N128 FRTC_N112 ", " FRTC_N8_14 ", " FRTC_N8_15

// Wgmma of one type and width. TEXT: the accumulators %0 to %(N / 2 - 1); A to G: the numbers that follow; last: the outputs.
#define FRTC_WGMMA_16(T, TYPE, N, TEXT, A, B, C, D, E, F, G, ...)                                                    \
    template <>                                                                                                      \
    struct Wgmma<T, N> {                                                                                             \
        template <bool B_MN>                                                                                         \
        __device__ __forceinline__ static void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                             \
                         " {" TEXT "}, %" #A ", %" #B ", p, 1, 1, 0, %" #D ";\n}"                                    \
                         : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate), "n"(B_MN));                                \
        }                                                                                                            \
        template <bool B_MN>                                                                                         \
        __device__ __forceinline__ static void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                             \
                         " {" TEXT "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1, %" #G ";\n}"          \
                         : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(B_MN)); \
        }                                                                                                            \
    };
#define FRTC_WGMMA_8(T, TYPE, N, TEXT, A, B, C, D, E, F, G, ...)                                                  \
    template <>                                                                                                   \
    struct Wgmma<T, N> {                                                                                          \
        template <bool B_MN>                                                                                      \
        __device__ __forceinline__ static void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE                          \
                         " {" TEXT "}, %" #A ", %" #B ", p, 1, 1;\n}"                                             \
                         : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate));                                        \
        }                                                                                                         \
        template <bool B_MN>                                                                                      \
        __device__ __forceinline__ static void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\n"                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE                          \
                         " {" TEXT "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1;\n}"                \
                         : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));    \
        }                                                                                                         \
    };
#define FRTC_WGMMA(N, TEXT, A, B, C, D, E, F, G, ...)                      \
    FRTC_WGMMA_16(bf16, "bf16", N, TEXT, A, B, C, D, E, F, G, __VA_ARGS__) \
    FRTC_WGMMA_16(f16, "f16", N, TEXT, A, B, C, D, E, F, G, __VA_ARGS__)   \
    FRTC_WGMMA_8(e4m3, "e4m3", N, TEXT, A, B, C, D, E, F, G, __VA_ARGS__)

FRTC_WGMMA(8, FRTC_N4_0, 4, 5, 6, 7, 8, 9, 10, FRTC_D4(0))
FRTC_WGMMA(16, FRTC_N8_0, 8, 9, 10, 11, 12, 13, 14, FRTC_D8(0))
FRTC_WGMMA(24, FRTC_N8_0 ", " FRTC_N4_2, 12, 13, 14, 15, 16, 17, 18, FRTC_D8(0), FRTC_D4(8))
FRTC_WGMMA(32, FRTC_N16, 16, 17, 18, 19, 20, 21, 22, FRTC_D16(0))
FRTC_WGMMA(40, FRTC_N16 ", " FRTC_N4_4, 20, 21, 22, 23, 24, 25, 26, FRTC_D16(0), FRTC_D4(16))
FRTC_WGMMA(48, FRTC_N16 ", " FRTC_N8_2, 24, 25, 26, 27, 28, 29, 30, FRTC_D16(0), FRTC_D8(16))
FRTC_WGMMA(56, FRTC_N16 ", " FRTC_N8_2 ", " FRTC_N4_6, 28, 29, 30, 31, 32, 33, 34, FRTC_D16(0), FRTC_D8(16), FRTC_D4(24))
FRTC_WGMMA(64, FRTC_N32, 32, 33, 34, 35, 36, 37, 38, FRTC_D32(0))
FRTC_WGMMA(80, FRTC_N40, 40, 41, 42, 43, 44, 45, 46, FRTC_D32(0), FRTC_D8(32))
FRTC_WGMMA(96, FRTC_N48, 48, 49, 50, 51, 52, 53, 54, FRTC_D32(0), FRTC_D16(32))
FRTC_WGMMA(104, FRTC_N48 ", " FRTC_N4_12, 52, 53, 54, 55, 56, 57, 58, FRTC_D32(0), FRTC_D16(32), FRTC_D4(48))
FRTC_WGMMA(112, FRTC_N48 ", " FRTC_N8_6, 56, 57, 58, 59, 60, 61, 62, FRTC_D32(0), FRTC_D16(32), FRTC_D8(48))
FRTC_WGMMA(128, FRTC_N64, 64, 65, 66, 67, 68, 69, 70, FRTC_D64(0))
FRTC_WGMMA(144, FRTC_N64 ", " FRTC_N8_8, 72, 73, 74, 75, 76, 77, 78, FRTC_D64(0), FRTC_D8(64))
FRTC_WGMMA(152, FRTC_N64 ", " FRTC_N8_8 ", " FRTC_N4_18, 76, 77, 78, 79, 80, 81, 82, FRTC_D64(0), FRTC_D8(64), FRTC_D4(72))
FRTC_WGMMA(160, FRTC_N80, 80, 81, 82, 83, 84, 85, 86, FRTC_D64(0), FRTC_D16(64))
FRTC_WGMMA(176, FRTC_N80 ", " FRTC_N8_10, 88, 89, 90, 91, 92, 93, 94, FRTC_D64(0), FRTC_D16(64), FRTC_D8(80))
FRTC_WGMMA(192, FRTC_N96, 96, 97, 98, 99, 100, 101, 102, FRTC_D64(0), FRTC_D32(64))
FRTC_WGMMA(208, FRTC_N96 ", " FRTC_N8_12, 104, 105, 106, 107, 108, 109, 110, FRTC_D64(0), FRTC_D32(64), FRTC_D8(96))
FRTC_WGMMA(224, FRTC_N112, 112, 113, 114, 115, 116, 117, 118, FRTC_D64(0), FRTC_D32(64), FRTC_D16(96))
FRTC_WGMMA(240, FRTC_N112 ", " FRTC_N8_14, 120, 121, 122, 123, 124, 125, 126, FRTC_D64(0), FRTC_D32(64), FRTC_D16(96), FRTC_D8(112))
FRTC_WGMMA(256, FRTC_N128, 128, 129, 130, 131, 132, 133, 134, FRTC_D64(0), FRTC_D64(64))

template <typename T, int N, bool B_MN = false, typename A>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const A& a, u64 b, int accumulate) {
    static_assert(!B_MN || sizeof(T) == 2, "e4m3 is K-major");
    Wgmma<T, N>::template run<B_MN>(d, a, b, accumulate);
}

}  // namespace frtc
