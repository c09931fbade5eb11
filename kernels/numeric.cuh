// Element types and the fp32 arithmetic on them that every kernel shares.
//
// Storage types: float, __nv_bfloat16, __half, __nv_fp8_e4m3, and for plain loads int, unsigned char, bool. Arithmetic is
// in fp32; a result is rounded once, to nearest even, when it is stored; e4m3 saturates at +-448, and NaN stays NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace frtc {

using bf16 = __nv_bfloat16;
using f16 = __half;
using e4m3 = __nv_fp8_e4m3;

// ---- one element ----------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ float to_f32(T x) {
    return static_cast<float>(x);
}
template <>
__device__ __forceinline__ float to_f32<bf16>(bf16 x) {
    return __bfloat162float(x);
}
template <>
__device__ __forceinline__ float to_f32<f16>(f16 x) {
    return __half2float(x);
}
template <>
__device__ __forceinline__ float to_f32<e4m3>(e4m3 x) {
    return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T from_f32(float x) {
    return static_cast<T>(x);
}
template <>
__device__ __forceinline__ bf16 from_f32<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ f16 from_f32<f16>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ e4m3 from_f32<e4m3>(float x) {
    e4m3 y;
#if __CUDA_ARCH__ >= 890
    y.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
#else  // the same in fp32; cuda_fp8.h goes through double. Below 2^-6 codes are 2^-9 apart: 2^14 + x has that step
    const float size = fminf(fabsf(x), 448.0f);
    const unsigned int bits = __float_as_uint(size);
    const unsigned int code = size < 0x1p-6f ? __float_as_uint(size + 0x1p14f) - __float_as_uint(0x1p14f)
                                             : (bits + 0x7ffffu + (bits >> 20 & 1u)) / (1u << 20) - (120u << 3);
    y.__x = x != x ? 0x7fu : (__float_as_uint(x) >> 24 & 0x80u) | code;
#endif
    return y;
}

// `x` as it would read back from storage type T: for ops that round inside.
template <typename T>
__device__ __forceinline__ float round_to(float x) {
    return to_f32(from_f32<T>(x));
}

// Two 16-bit elements in one register, the first in the low half: the order of mma fragments and of memory.
template <typename T>
__device__ __forceinline__ unsigned int pack2(float first, float second);
template <>
__device__ __forceinline__ unsigned int pack2<bf16>(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned int*>(&pair);
}
template <>
__device__ __forceinline__ unsigned int pack2<f16>(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const unsigned int*>(&pair);
}

__device__ __forceinline__ float2 unpack_bf16(unsigned int pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Two e4m3 in the low 16 bits, as two elements of T in one register. Exact, subnormals too, but NaN becomes 480. The bits
// of an e4m3 number, moved into place, are those of a T with the other exponent bias: one product sets it right.
template <typename T>
__device__ __forceinline__ unsigned int widen2(unsigned int two);
template <>
__device__ __forceinline__ unsigned int widen2<bf16>(unsigned int two) {
    const unsigned int apart = __byte_perm(two, 0, 0x4140);  // a byte at bit 0, a byte at bit 16
    const unsigned int bits = (apart << 8 & 0x80008000u) | (apart << 4 & 0x07f007f0u);
    const unsigned int power = 0x7b807b80u;  // 2^(127 - 7)
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), reinterpret_cast<const __nv_bfloat162&>(power));
    return reinterpret_cast<const unsigned int&>(pair);
}
template <>
__device__ __forceinline__ unsigned int widen2<f16>(unsigned int two) {
    const unsigned int apart = __byte_perm(two, 0, 0x4140);
    const unsigned int bits = (apart << 8 & 0x80008000u) | (apart << 7 & 0x3f803f80u);
    const unsigned int power = 0x5c005c00u;  // 2^(15 - 7)
    const __half2 pair = __hmul2(reinterpret_cast<const __half2&>(bits), reinterpret_cast<const __half2&>(power));
    return reinterpret_cast<const unsigned int&>(pair);
}

// Two e4m3 as two fp16 in one instruction of sm_89 and later; NaN stays NaN.
__device__ __forceinline__ unsigned int e4m3_as_f16(unsigned short two) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
    return reinterpret_cast<const unsigned int&>(pair);
}

// ---- vectors --------------------------------------------------------------------------------------------------------

// N neighbouring elements as one aligned object: one memory access for up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T at[N];
};

// Elements in a 16-byte access.
template <typename T>
inline constexpr int kVec = 16 / static_cast<int>(sizeof(T));

// N elements from `p`, which is aligned to N elements, or to 16 bytes where N elements are more.
template <int N, typename T>
__device__ __forceinline__ void load_f32(float (&out)[N], const T* p) {
    constexpr int STEP = N < kVec<T> ? N : kVec<T>;
    static_assert(N % STEP == 0, "N is a power of two");
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
        const Vec<T, STEP> v = *reinterpret_cast<const Vec<T, STEP>*>(p + i);
#pragma unroll
        for (int j = 0; j < STEP; ++j) out[i + j] = to_f32(v.at[j]);
    }
}

template <int N, typename T>
__device__ __forceinline__ void store_f32(T* p, const float (&values)[N]) {
    constexpr int STEP = N < kVec<T> ? N : kVec<T>;
    static_assert(N % STEP == 0, "N is a power of two");
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
        Vec<T, STEP> v;
#pragma unroll
        for (int j = 0; j < STEP; ++j) v.at[j] = from_f32<T>(values[i + j]);
        *reinterpret_cast<Vec<T, STEP>*>(p + i) = v;
    }
}

// e4m3 in pairs: from sm_89 on one instruction rounds two.
template <int N>
__device__ __forceinline__ void store_f32(e4m3* p, const float (&values)[N]) {
    constexpr int STEP = N < kVec<e4m3> ? N : kVec<e4m3>;
    static_assert(N % STEP == 0 && N % 2 == 0, "N is a power of two, and more than one");
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
        Vec<__nv_fp8x2_storage_t, STEP / 2> v;
#pragma unroll
        for (int j = 0; j < STEP / 2; ++j) {
            const float first = values[i + 2 * j], second = values[i + 2 * j + 1];
#if __CUDA_ARCH__ >= 890
            v.at[j] = __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
#else
            v.at[j] = from_f32<e4m3>(first).__x | from_f32<e4m3>(second).__x << 8;
#endif
        }
        *reinterpret_cast<Vec<__nv_fp8x2_storage_t, STEP / 2>*>(p + i) = v;
    }
}

// ---- activations ----------------------------------------------------------------------------------------------------

enum class Act { none, gelu_tanh, gelu_erf, silu };

// One instruction, error 2 ulp: no scaling around results below 2^-126, which are zero.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / (1 + 2^e), e = -log2(e) times what the sigmoid takes. 2^e overflows to infinity, and the quotient is then 0, as it
// should be.
__device__ __forceinline__ float gated_by(float x, float e) {
    return x * __fdividef(1.0f, 1.0f + exp2_fast(e));
}

inline constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float silu(float x) {
    return gated_by(x, -kLog2e * x);
}

// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2u): no cancellation for x < 0.
__device__ __forceinline__ float gelu_tanh(float x) {
    constexpr float LINEAR = -kLog2e * 1.5957691216057308f, CUBIC = LINEAR * 0.044715f;
    return gated_by(x, x * fmaf(CUBIC, x * x, LINEAR));
}

__device__ __forceinline__ float gelu_erf(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

// Whether a result of type Out may come of tanh.approx: one operation of the special-function unit instead of two. PTX ISA
// bounds its relative error by 2^-11, which is 2^-12 |x| in x (1 + tanh(u)) / 2, also where that is near zero. From one
// number near |x| to the next are 2^-8 |x| and more of bf16, 2^-4 |x| and more of e4m3; f32 promises more (docs/numerics.md).
template <typename Out>
inline constexpr bool kRounds = sizeof(Out) <= 2;

// x (1 + tanh(u)) / 2. Saturated: beyond its ends tanh.approx must not exceed 1. NaN passes through x.
__device__ __forceinline__ float gated_by_tanh(float x, float u) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(u));
    return x * __saturatef(fmaf(0.5f, y, 0.5f));
}

__device__ __forceinline__ float silu_coarse(float x) {
    return gated_by_tanh(x, 0.5f * x);
}

__device__ __forceinline__ float gelu_tanh_coarse(float x) {
    constexpr float LINEAR = 0.7978845608028654f, CUBIC = LINEAR * 0.044715f;
    return gated_by_tanh(x, x * fmaf(CUBIC, x * x, LINEAR));
}

// As exactly as a result of type Out can show.
template <Act ACT, typename Out>
__device__ __forceinline__ float activate(float x) {
    if constexpr (ACT == Act::gelu_tanh) return kRounds<Out> ? gelu_tanh_coarse(x) : gelu_tanh(x);
    if constexpr (ACT == Act::gelu_erf) return gelu_erf(x);
    if constexpr (ACT == Act::silu) return kRounds<Out> ? silu_coarse(x) : silu(x);
    return x;
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// Over groups of WIDTH lanes (a power of two up to 32); every lane gets the result, in a fixed order of additions.
template <int WIDTH = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

template <int WIDTH = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

}  // namespace frtc
