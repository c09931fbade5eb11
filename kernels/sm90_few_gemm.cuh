// y = epilogue(x w^T) of few rows on Hopper: a block has 64 rows of w on wgmma's M side and all rows of x on its N side, and
// all that it multiplies fits in shared memory at once.
//
//   x  [M, K], w [N, K]: M <= 64, N a multiple of 16, rows at multiples of 16 bytes, both of one type, e4m3, bf16 or fp16
//   epilogue   as in smxx_gemm.cuh
//   grid   (SPLIT, ceil(N / 64)); the SPLIT blocks of a cluster share K
//   block  128 threads, one of which asks for the copies
//   smem   FewTile::SMEM bytes
//   moves  every w element once from DRAM, asked for before grid_wait(); x from L2, M rows of a share of K for each block,
//          which is what a block waits for: an SM takes 64 bytes a clock from L2
//
// w's tensor map hands over each 16 rows as eight even ones, then eight odd ones, so that a thread's accumulators are two
// neighbouring columns of two neighbouring rows of y (sm90.cuh). Sums go through shared memory, because an epilogue takes
// eight columns of a row: of each eight rows a place in the memory of the block that they belong to, each block's in turn.
// There they are added in the order of the blocks. Between blocks sums of e4m3 travel in bf16, others in fp32: what e4m3
// has lost of x and w is eight times as much and more.
#pragma once

#include "sm90_tile.cuh"

namespace frtc {

// ROWS: of x, a multiple of 8. CHUNKS: of 128 bytes of K, by all blocks of a cluster. EARLY: the next launch may begin when
// this one has begun, not when its wait is over. WIDE: sums travel in fp32.
template <int ROWS_, int CHUNKS_, int SPLIT_, bool EARLY_, bool WIDE_>
struct FewTile {
    static constexpr int ROWS = ROWS_, CHUNKS = CHUNKS_, SPLIT = SPLIT_;
    static constexpr bool EARLY = EARLY_;
    static constexpr Parts PARTS = Parts::rows;
    static constexpr int WM = ROWS <= 32 ? 32 : 64;  // whose factors are found at once
    static constexpr int COLUMNS = 64, ROW = 128, MOST = ceil_div(CHUNKS, SPLIT);
    static constexpr int X_BYTES = ROWS * ROW, W_BYTES = COLUMNS * ROW, CHUNK_BYTES = X_BYTES + W_BYTES;
    static constexpr int EIGHTS = ROWS / 8, OWN = ceil_div(EIGHTS, SPLIT), PASSES = ceil_div(OWN, 2);
    // Of two columns of two rows; of two rows, all columns, with a gap that spreads them over the banks; of eight rows.
    static constexpr int UNIT = WIDE_ ? 16 : 8, PAIR_BYTES = COLUMNS / 2 * UNIT + 32, EIGHT_BYTES = 4 * PAIR_BYTES;
    static constexpr int SUMS_BYTES = SPLIT * OWN * EIGHT_BYTES, COPIES = MOST * CHUNK_BYTES;
    // Sums of a block alone take the place of what it has multiplied.
    static constexpr int SUMS_AT = SPLIT == 1 ? 0 : COPIES;
    static constexpr int FULL_AT = SUMS_AT + SUMS_BYTES > COPIES ? SUMS_AT + SUMS_BYTES : COPIES;
    static constexpr int SMEM = 1024 + FULL_AT + 8 * MOST + 8;
    static_assert(ROWS % 8 == 0 && ROWS <= 64, "the N side of one wgmma");
    static_assert(SPLIT > 1 || WIDE_, "in bf16 sums only travel");
};

// Where a block's copies and sums are, and which of K it multiplies.
template <typename TILE>
struct FewShare {
    u32 base, peers[TILE::SPLIT];  // the same place in the memory of each block of the cluster
    int rank, first, chunks;

    __device__ __forceinline__ explicit FewShare(u32 base)
        : base(base), rank(TILE::SPLIT == 1 ? 0 : blockIdx.x), first(rank * TILE::CHUNKS / TILE::SPLIT),
          chunks((rank + 1) * TILE::CHUNKS / TILE::SPLIT - first) {
#pragma unroll
        for (int i = 0; i < TILE::SPLIT; ++i) peers[i] = TILE::SPLIT == 1 ? base : cluster_address(base, i);
    }
    __device__ __forceinline__ u32 w(int chunk) const { return base + chunk * TILE::W_BYTES; }
    __device__ __forceinline__ u32 x(int chunk) const { return base + TILE::MOST * TILE::W_BYTES + chunk * TILE::X_BYTES; }
    __device__ __forceinline__ u32 full(int chunk) const { return base + TILE::FULL_AT + 8 * chunk; }
    __device__ __forceinline__ u32 summed() const { return full(TILE::MOST); }
    __device__ __forceinline__ bool has(int chunk) const { return TILE::CHUNKS % TILE::SPLIT == 0 || chunk < chunks; }
    // The eight rows, counted from the first of x on, that are this block's `own` eight.
    __device__ __forceinline__ int eight(int own) const { return rank + own * TILE::SPLIT; }
    __device__ __forceinline__ u32 sums(int sender, int own) const {
        return base + TILE::SUMS_AT + (sender * TILE::OWN + own) * TILE::EIGHT_BYTES;
    }
};

// By one thread, before grid_wait(): barriers, and all of w.
template <typename TILE, typename T>
__device__ __forceinline__ void few_begin(const FewShare<TILE>& share, const TensorMap& x, const TensorMap& w, int n0) {
    constexpr int K = TILE::ROW / sizeof(T);
    for (int i = 0; i <= TILE::MOST; ++i) barrier_init(share.full(i), 1);  // the last one: summed
    barrier_init_fence();
    if constexpr (TILE::SPLIT > 1) {
        const int eights = max(0, (TILE::EIGHTS - share.rank + TILE::SPLIT - 1) / TILE::SPLIT);
        barrier_expect(share.summed(), TILE::SPLIT * eights * 128 * TILE::UNIT);
    }
#pragma unroll
    for (int i = 0; i < TILE::MOST; ++i) {
        if (!share.has(i)) break;
        barrier_expect(share.full(i), TILE::CHUNK_BYTES);
        tensor_load(share.w(i), w, share.full(i), (share.first + i) * K, 0, 0, n0 / 16);
    }
    tensor_map_prefetch(x);
}

template <typename TILE, typename T>
__device__ __forceinline__ void few_multiply(float (&acc)[TILE::ROWS / 2], const FewShare<TILE>& share) {
#pragma unroll
    for (int i = 0; i < TILE::MOST; ++i) {
        if (!share.has(i)) break;
        barrier_wait(share.full(i), 0);
        const u64 w = descriptor(share.w(i)), x = descriptor(share.x(i));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE::ROW / 32; ++k) wgmma<T, TILE::ROWS>(acc, w + 2 * k, x + 2 * k, i | k);
    }
    wgmma_commit();
}

// Where a thread's sums of two columns of two rows lie among those of eight rows.
template <typename TILE>
__device__ __forceinline__ u32 few_place() {
    const int warp = threadIdx.x / 32, column = threadIdx.x % 32 / 4, row = threadIdx.x % 4;  // pairs of them
    // Pieces of 16 bytes lie where lanes that read eight columns each meet no bank twice.
    const int pair = warp * 8 + (column ^ (TILE::UNIT == 16 ? warp % 4 : warp & 2));
    return row * TILE::PAIR_BYTES + pair * TILE::UNIT;
}

// A thread's sums, four of each eight rows, to the block that the rows belong to.
template <typename TILE>
__device__ __forceinline__ void few_send(const float (&acc)[TILE::ROWS / 2], const FewShare<TILE>& share) {
    const u32 within = few_place<TILE>();
#pragma unroll
    for (int e = 0; e < TILE::EIGHTS; ++e) {
        const float even = acc[4 * e], next_even = acc[4 * e + 1], odd = acc[4 * e + 2], next_odd = acc[4 * e + 3];
        const int owner = e % TILE::SPLIT, own = e / TILE::SPLIT;
        if constexpr (TILE::SPLIT == 1) {
            store_shared_f32x4(share.sums(0, e) + within, make_float4(even, odd, next_even, next_odd));
        } else {
            const u32 there = share.peers[owner] - share.base;
            const u32 to = there + share.sums(share.rank, own) + within, summed = there + share.summed();
            if constexpr (TILE::UNIT == 16) {
                store_async(to, summed, even, odd, next_even, next_odd);
            } else {
                store_async(to, summed, pack2<bf16>(even, odd), pack2<bf16>(next_even, next_odd));
            }
        }
    }
}

// v += eight neighbouring columns of a row, those of an octet, as one block has sent them; at: of the row's pair.
template <typename TILE>
__device__ __forceinline__ void few_add(float (&v)[8], u32 at, int octet, int second) {
    if constexpr (TILE::UNIT == 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = load_shared_f32x2(at + octet * 64 + (i ^ octet / 2) * 16 + second * 8);
            v[2 * i] += two.x, v[2 * i + 1] += two.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 four = load_shared_u32x4(at + octet * 32 + (i ^ octet / 4) * 16);
            const float2 a = unpack_bf16(second ? four.y : four.x), b = unpack_bf16(second ? four.w : four.z);
            v[4 * i] += a.x, v[4 * i + 1] += a.y, v[4 * i + 2] += b.x, v[4 * i + 3] += b.y;
        }
    }
}

template <typename T, typename TILE, typename EPILOGUE, typename... ARGUMENTS>
__device__ __forceinline__ void few_gemm(const TensorMap& x, const TensorMap& w, int M, int N, ARGUMENTS... of_epilogue) {
    constexpr int K = TILE::ROW / sizeof(T);
    extern __shared__ u8 unaligned[];
    const FewShare<TILE> share((shared_address(unaligned) + 1023) & ~1023u);
    const int n0 = blockIdx.y * TILE::COLUMNS;
    if (threadIdx.x == 0) few_begin<TILE, T>(share, x, w, n0);
    __syncthreads();
    // Here, not before sums are sent: it would wait for all loads, those of operands too.
    if constexpr (TILE::SPLIT > 1) cluster_arrive_relaxed(), cluster_wait();
    enter<TILE>();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < TILE::MOST; ++i) {
            if (!share.has(i)) break;
            const bool spoiled = kSabotage == Sabotage::last_k_tile && i + 1 == share.chunks;
            tensor_load(share.x(i), x, share.full(i), (share.first + i - spoiled) * K, 0);
        }
    }
    __syncwarp();

    // A thread finishes eight columns of a row, sixteen rows a pass; what it needs for that comes while the product is made.
    EPILOGUE epilogue(M, N, 0, of_epilogue...);
    Factors<TILE, EPILOGUE> factors(epilogue, 0);
    const int octet = threadIdx.x % 8, row = threadIdx.x / 8 % 8, group = threadIdx.x / 64, column = n0 + octet * 8;
    typename EPILOGUE::Columns columns;
    typename EPILOGUE::Row rows[TILE::PASSES];
    if constexpr (EPILOGUE::WHOLE) {
        columns = epilogue.template columns_at<true>(column);
#pragma unroll
        for (int pass = 0; pass < TILE::PASSES; ++pass) {
            rows[pass] = epilogue.template row_at<true>(share.eight(2 * pass + group) * 8 + row, column);
        }
    }
    float acc[TILE::ROWS / 2];
    few_multiply<TILE, T>(acc, share);
    factors.settle(epilogue);
    wgmma_wait<0>();
    if constexpr (TILE::SPLIT == 1) __syncthreads();  // w and x are read
    few_send<TILE>(acc, share);
    if constexpr (TILE::SPLIT == 1) __syncthreads();
    else barrier_wait(share.summed(), 0);

#pragma unroll
    for (int pass = 0; pass < TILE::PASSES; ++pass) {
        const int own = 2 * pass + group, eight = share.eight(own);  // one of all threads of a warp
        if (own >= TILE::OWN || eight >= TILE::EIGHTS) break;
        float sum[8] = {};
#pragma unroll
        for (int sender = 0; sender < TILE::SPLIT; ++sender) {
            few_add<TILE>(sum, share.sums(sender, own) + row / 2 * TILE::PAIR_BYTES, octet, row % 2);
        }
        if constexpr (EPILOGUE::WHOLE) {
            epilogue.template store<true>(eight * 8 + row, column, sum, columns, rows[pass]);
        } else {
            epilogue.store(eight * 8 + row, column, sum);
        }
    }
}

template <typename T, typename TILE, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(128)
sm90_few_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, int M, int N, ARGUMENTS... of_epilogue) {
    few_gemm<T, TILE, EPILOGUE>(x, w, M, N, of_epilogue...);
}

template <typename T, typename TILE, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __cluster_dims__(TILE::SPLIT) __launch_bounds__(128)
sm90_few_split_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, int M, int N,
                    ARGUMENTS... of_epilogue) {
    few_gemm<T, TILE, EPILOGUE>(x, w, M, N, of_epilogue...);
}

}  // namespace frtc
