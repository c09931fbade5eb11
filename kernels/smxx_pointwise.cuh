// The elementwise ops, one function each, and how groups of elements get in and out of registers.
//
// In registers a value is float, int, long long or bool, whatever its storage type; generated kernels
// (smxx_pointwise.cu.j2) convert operands to a common register type before they call an op. Division, square root and
// the transcendental functions are the accurate ones: fp32 results stay within a few ulp.
#pragma once

#include "ptx.cuh"
#include "vector.cuh"

namespace frtc {

// ---- storage to registers -------------------------------------------------------------------------------------------

// VEC elements from `p` on, STEP apart: one element for all (0), neighbours (1), or single loads.
template <int STEP, int VEC, typename R, typename T>
__device__ __forceinline__ void fetch(R (&out)[VEC], const T* p) {
    constexpr int WIDE = VEC < kVec<T> ? VEC : kVec<T>;
    if constexpr (STEP == 0) {
        const R value = as_register<R>(*p);
#pragma unroll
        for (int j = 0; j < VEC; ++j) out[j] = value;
    } else if (STEP == 1 && WIDE > 1 && aligned<VEC>(p)) {
#pragma unroll
        for (int j = 0; j < VEC; j += WIDE) {
            const Vec<T, WIDE> v = *reinterpret_cast<const Vec<T, WIDE>*>(p + j);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) out[j + i] = as_register<R>(v.at[i]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < VEC; ++j) out[j] = as_register<R>(p[j * STEP]);
    }
#ifdef FRTC_SABOTAGE_LAST_ELEMENT
    out[VEC - 1] = R(0);
#endif
}

template <int STEP, int VEC, typename R, typename T>
__device__ __forceinline__ void put(T* p, const R (&values)[VEC]) {
    constexpr int WIDE = VEC < kVec<T> ? VEC : kVec<T>;
    if (STEP == 1 && WIDE > 1 && aligned<VEC>(p)) {
#pragma unroll
        for (int j = 0; j < VEC; j += WIDE) {
            Vec<T, WIDE> v;
#pragma unroll
            for (int i = 0; i < WIDE; ++i) v.at[i] = as_stored<T>(values[j + i]);
            *reinterpret_cast<Vec<T, WIDE>*>(p + j) = v;
        }
    } else {
#pragma unroll
        for (int j = 0; j < VEC; ++j) p[j * STEP] = as_stored<T>(values[j]);
    }
}

// ---- the ops --------------------------------------------------------------------------------------------------------

namespace op {

template <typename R>
__device__ __forceinline__ R add(R a, R b) { return a + b; }
template <typename R>
__device__ __forceinline__ R sub(R a, R b) { return a - b; }
template <typename R>
__device__ __forceinline__ R mul(R a, R b) { return a * b; }
__device__ __forceinline__ float div(float a, float b) { return a / b; }

// NaN wins over a number.
template <typename R>
__device__ __forceinline__ R minimum(R a, R b) { return a != a || a < b ? a : b; }
template <typename R>
__device__ __forceinline__ R maximum(R a, R b) { return a != a || a > b ? a : b; }

// Towards minus infinity, the remainder with the sign of the divisor.
__device__ __forceinline__ float floor_div(float a, float b) { return floorf(a / b); }
template <typename R>
__device__ __forceinline__ R floor_div(R a, R b) {
    const R quotient = a / b;
    return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
__device__ __forceinline__ float mod(float a, float b) { return a - b * floorf(a / b); }
template <typename R>
__device__ __forceinline__ R mod(R a, R b) { return a - b * floor_div(a, b); }

template <typename R>
__device__ __forceinline__ R neg(R x) { return -x; }
template <typename R>
__device__ __forceinline__ R abs_(R x) { return x < R(0) ? -x : x; }
__device__ __forceinline__ float abs_(float x) { return fabsf(x); }

__device__ __forceinline__ float pow_(float a, float b) { return powf(a, b); }
__device__ __forceinline__ float exp_(float x) { return expf(x); }
__device__ __forceinline__ float log_(float x) { return logf(x); }
__device__ __forceinline__ float tanh_(float x) { return tanhf(x); }
__device__ __forceinline__ float erf_(float x) { return erff(x); }
__device__ __forceinline__ float sqrt_(float x) { return sqrtf(x); }
__device__ __forceinline__ float rsqrt_(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ float floor_(float x) { return floorf(x); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float gelu_tanh(float x) { return frtc::gelu_tanh(x); }
__device__ __forceinline__ float gelu_erf(float x) { return frtc::gelu_erf(x); }

// sin(x + quarter * pi / 2). The library's sinf keeps a table in local memory for large x; here x is brought into
// [-pi/4, pi/4] in double precision, good to 2^-24 as long as |x| < 2^28, and the polynomials of Cephes' sinf and cosf
// finish.
__device__ __forceinline__ float sin_quarter(float x, int quarter) {
    const double turns = rint(x * 0.63661977236758134);               // 2 / pi
    const float r = static_cast<float>(fma(turns, -1.5707963267948966, static_cast<double>(x)));
    const int q = (static_cast<int>(turns) + quarter) & 3;
    const float z = r * r;
    const float s = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
    const float c = 1.0f - 0.5f * z + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
    const float y = q & 1 ? c : s;
    return q & 2 ? -y : y;
}
__device__ __forceinline__ float sin_(float x) { return sin_quarter(x, 0); }
__device__ __forceinline__ float cos_(float x) { return sin_quarter(x, 1); }

template <typename R>
__device__ __forceinline__ bool eq(R a, R b) { return a == b; }
template <typename R>
__device__ __forceinline__ bool ne(R a, R b) { return a != b; }
template <typename R>
__device__ __forceinline__ bool lt(R a, R b) { return a < b; }
template <typename R>
__device__ __forceinline__ bool le(R a, R b) { return a <= b; }
template <typename R>
__device__ __forceinline__ bool gt(R a, R b) { return a > b; }
template <typename R>
__device__ __forceinline__ bool ge(R a, R b) { return a >= b; }
__device__ __forceinline__ bool and_(bool a, bool b) { return a && b; }
__device__ __forceinline__ bool or_(bool a, bool b) { return a || b; }
__device__ __forceinline__ bool not_(bool x) { return !x; }
template <typename R>
__device__ __forceinline__ R where(bool condition, R a, R b) { return condition ? a : b; }

// To storage type T and back into a register: rounds floats, truncates to integers.
template <typename R, typename T, typename X>
__device__ __forceinline__ R cast(X x) {
    if constexpr (kSame<T, bool>)
        return x != X(0);
    else
        return as_register<R>(as_stored<T>(x));
}

}  // namespace op
}  // namespace frtc
