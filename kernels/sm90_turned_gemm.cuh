// y = epilogue(x w^T) on Hopper: a warpgroup has 64 rows of w on wgmma's M side and all rows of the tile on its N side, whose
// height has steps of eight. So tiles fit the rows that there are.
//
//   x  [M, K], w [N, K]: N a multiple of 32, rows at multiples of 16 bytes, both of one type, e4m3, bf16 or fp16
//   epilogue, rows   as in smxx_gemm.cuh
//   grid   one block for each tile, (ceil(M / BM), ceil(N / 128), SPLIT)
//   block  2 x 128 threads that multiply, and behind them the producer of sm90_gemm.cuh
//   smem   TurnedTile::SMEM bytes
//   moves  as sm90_gemm.cuh; of shared memory 2 (64 + BM) + 128 + BM rows for each 128 bytes of K, at 128 bytes a clock, which
//          the 4 BM clocks of its products hide at BM = 256
//
// w's tensor map hands over each 16 rows as eight even ones, then eight odd ones, so that a thread's accumulators are two
// neighbouring columns of two neighbouring rows of y (sm90_few_gemm.cuh). An epilogue takes eight columns of a row: sums go
// through shared memory, in the form that they have there, too.
//
// The SPLIT blocks of a cluster share K. Of each tile the eight rows in turn belong to a block, which adds their sums in the
// order of the blocks: its own wait in the place of w and x, those of others arrive in a place that nothing else uses, so that
// no block waits for another one's products before it sends. Between blocks they travel in fp32 by st.async.
#pragma once

#include "sm90_few_gemm.cuh"
#include "sm90_gemm.cuh"

namespace frtc {

// ROWS: of x, a multiple of 8.
template <int ROWS, int STAGES_, int SPLIT_>
struct TurnedTile {
    static constexpr int BLOCKS = 1, WN = ROWS, WARPGROUPS = 2, STAGES = STAGES_, SPLIT = SPLIT_;
    static constexpr Parts PARTS = Parts::turned;
    static constexpr bool PERSISTENT = false, EARLY = false;
    static constexpr int WM = 64, BM = ROWS, BN = WM * WARPGROUPS;
    static constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
    static constexpr int REGISTERS = 232, PRODUCER_REGISTERS = 40, SUMS = ROWS / 2;
    static constexpr int ROW = 128, STAGE_BYTES = (BM + BN) * ROW, RING = STAGES * STAGE_BYTES;
    // Sums of two columns of two rows; of two rows, all columns, with a gap that spreads them over the banks; of eight rows.
    static constexpr int UNIT = 16, PAIR_BYTES = BN / 2 * UNIT + 32, EIGHT_BYTES = 4 * PAIR_BYTES;
    static constexpr int EIGHTS = BM / 8, OWN = ceil_div(EIGHTS, SPLIT), OWN_BYTES = OWN * EIGHT_BYTES;
    static constexpr int PASSES = ceil_div(OWN, 2);  // of a warpgroup, sixteen rows each
    static constexpr int RECEIVED = (SPLIT - 1) * OWN_BYTES;
    static constexpr int SMEM = 1024 + RING + RECEIVED + 16 * STAGES + 32;
    static_assert(ROWS % 8 == 0 && ROWS <= 256, "the N side of one wgmma");
    static_assert(OWN_BYTES <= RING, "a block's own sums take the place of w and x");
};

// Which rows of a tile belong to this block of the cluster, and where their sums lie.
template <typename TILE>
struct TurnedShare {
    const Ring<TILE>& ring;
    int rank, eights, own;  // eights: of rows that exist; own: those that are this block's

    __device__ __forceinline__ TurnedShare(const Ring<TILE>& ring, int m0, int M)
        : ring(ring), rank(TILE::SPLIT == 1 ? 0 : blockIdx.z), eights((min(M - m0, TILE::BM) + 7) / 8),
          own((eights - rank + TILE::SPLIT - 1) / TILE::SPLIT) {}
    // The eight rows, counted from the tile's first on, that are this block's `of_own` eight.
    __device__ __forceinline__ int eight(int of_own) const { return rank + of_own * TILE::SPLIT; }
    // In a block's memory: what `sender` has sent to it.
    __device__ __forceinline__ u32 received(int sender, int receiver, int of_own) const {
        const int place = sender - (sender > receiver);
        return ring.received + place * TILE::OWN_BYTES + of_own * TILE::EIGHT_BYTES;
    }
    __device__ __forceinline__ u32 sums(int sender, int of_own) const {
        return sender == rank ? ring.tiles + of_own * TILE::EIGHT_BYTES : received(sender, rank, of_own);
    }
};

template <typename TILE>
__device__ __forceinline__ void turned_barriers(const Ring<TILE>& ring, const TurnedShare<TILE>& share) {
    for (int i = 0; i < TILE::STAGES; ++i) {
        barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, TILE::WARPGROUPS);
    }
    barrier_init(ring.sums, 1);
    barrier_init_fence();
    barrier_expect(ring.sums, (TILE::SPLIT - 1) * share.own * 8 * TILE::BN * 4);  // 0: the barrier is passed at once
}

// A thread's sums, four of each eight rows: those of others on their way at once, its block's own when all have multiplied.
template <typename TILE>
__device__ __forceinline__ void turned_send(const WgmmaSums<TILE>& acc, const TurnedShare<TILE>& share) {
    const u32 within = few_place<TILE>();
#pragma unroll
    for (int e = 0; e < TILE::EIGHTS; ++e) {
        const int owner = e % TILE::SPLIT;
        if (e >= share.eights) break;
        if (owner == share.rank) continue;
        const u32 to = cluster_address(share.received(share.rank, owner, e / TILE::SPLIT) + within, owner);
        const u32 arrived = cluster_address(share.ring.sums, owner);
        store_async(to, arrived, acc[0][4 * e], acc[0][4 * e + 2], acc[0][4 * e + 1], acc[0][4 * e + 3]);
    }
    named_barrier(1, TILE::CONSUMERS);  // w and x are read
#pragma unroll
    for (int e = 0; e < TILE::EIGHTS; ++e) {
        if (e >= share.eights) break;
        if (e % TILE::SPLIT != share.rank) continue;
        const u32 to = share.ring.tiles + e / TILE::SPLIT * TILE::EIGHT_BYTES + within;
        store_shared_f32x4(to, make_float4(acc[0][4 * e], acc[0][4 * e + 2], acc[0][4 * e + 1], acc[0][4 * e + 3]));
    }
    named_barrier(2 + threadIdx.x / 128, 128);
    if constexpr (TILE::SPLIT > 1) barrier_wait(share.ring.sums, 0);
}

// How many passes' operands of rows are on their way at a time: as many as fit beside accumulators and addresses.
template <typename TILE, typename EPILOGUE>
inline constexpr int kTurnedAhead = [] {
    constexpr int OF_ROW = (sizeof(typename EPILOGUE::Row) + 3) / 4, OF_COLUMNS = sizeof(typename EPILOGUE::Columns) / 4;
    constexpr int OTHERS = 48;  // registers; by trial
    const int fit = (TILE::REGISTERS - TILE::SUMS - OF_COLUMNS - OTHERS) / OF_ROW;
    return fit < 1 ? 1 : fit < TILE::PASSES ? fit : TILE::PASSES;
}();

// A warpgroup's 64 columns of a tile. A thread finishes eight columns of a row in each pass; what it needs for that comes while
// the product is made.
template <typename T, typename TILE, typename EPILOGUE>
__device__ __forceinline__ void turned_part(const TurnedShare<TILE>& share, const EPILOGUE& epilogue, int m0, int n0, int chunks) {
    constexpr int AHEAD = kTurnedAhead<TILE, EPILOGUE>;
    const int octet = threadIdx.x % 8, row = threadIdx.x / 8 % 8, half = threadIdx.x % 128 / 64;
    const int group = threadIdx.x / 128, column = n0 + group * TILE::WM + octet * 8;
    const auto row_of = [&](int pass) { return m0 + share.eight(2 * pass + half) * 8 + row; };
    typename EPILOGUE::Columns columns;
    typename EPILOGUE::Row rows[AHEAD];
    if constexpr (EPILOGUE::WHOLE) {
        columns = epilogue.template columns_at<true>(column);
#pragma unroll
        for (int pass = 0; pass < AHEAD; ++pass) rows[pass] = epilogue.template row_at<true>(row_of(pass), column);
    }
    WgmmaSums<TILE> acc;
    Place<TILE::STAGES> place;
    multiply<TILE, T>(acc, share.ring, place, chunks);
    turned_send<TILE>(acc, share);

#pragma unroll
    for (int pass = 0; pass < TILE::PASSES; ++pass) {
        const int of_own = 2 * pass + half;  // one of all threads of a warp
        if (of_own >= share.own) break;
        float sum[8] = {};
#pragma unroll
        for (int sender = 0; sender < TILE::SPLIT; ++sender) {
            const u32 pair = share.sums(sender, of_own) + row / 2 * TILE::PAIR_BYTES;
            few_add<TILE>(sum, pair + group * (TILE::WM / 2 * TILE::UNIT), octet, row % 2);
        }
        if constexpr (EPILOGUE::WHOLE) {
            const typename EPILOGUE::Row of_row = rows[pass % AHEAD];
            if (pass + AHEAD < TILE::PASSES) {
                rows[pass % AHEAD] = epilogue.template row_at<true>(row_of(pass + AHEAD), column);
            }
            epilogue.template store<true>(row_of(pass), column, sum, columns, of_row);
        } else {
            epilogue.store(row_of(pass), column, sum);
        }
    }
}

template <typename T, typename TILE, typename EPILOGUE, typename... ARGUMENTS>
__device__ __forceinline__ void turned_gemm(const TensorMap& x, const TensorMap& w, const int* rows, int M, int N, int K,
                                            ARGUMENTS... of_epilogue) {
    extern __shared__ u8 unaligned[];
    const Ring<TILE> ring((shared_address(unaligned) + 1023) & ~1023u);
    const int k_chunks = (K + TILE::ROW / sizeof(T) - 1) / (TILE::ROW / static_cast<int>(sizeof(T)));
    const TurnedShare<TILE> share(ring, blockIdx.x * TILE::BM, M);
    if (threadIdx.x == 0) turned_barriers(ring, share);
    __syncthreads();
    if constexpr (TILE::SPLIT > 1) cluster_arrive_relaxed();

    if (threadIdx.x >= TILE::CONSUMERS) {
        registers_down<TILE::PRODUCER_REGISTERS>();
        if (threadIdx.x == TILE::CONSUMERS) produce<TILE, T, Order::permuted>(ring, x, w, w, rows, M, N, k_chunks);
    } else {
        registers_up<TILE::REGISTERS>();
        if constexpr (TILE::SPLIT > 1) cluster_wait();  // before operands are asked for: it would wait for them
        enter<TILE>();
        const EPILOGUE epilogue(M, N, 0, of_epilogue...);
        const Work<TILE> work(M, N, k_chunks, rows);
        if (work.first < work.end) turned_part<T>(share, epilogue, work.m0(0), work.n0(0), work.chunks);
    }
}

template <typename T, typename TILE, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __launch_bounds__(TILE::THREADS, 1)
sm90_turned_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const int* rows, int M, int N, int K,
                 ARGUMENTS... of_epilogue) {
    turned_gemm<T, TILE, EPILOGUE>(x, w, rows, M, N, K, of_epilogue...);
}

template <typename T, typename TILE, typename EPILOGUE, typename... ARGUMENTS>
__global__ void __cluster_dims__(1, 1, TILE::SPLIT) __launch_bounds__(TILE::THREADS, 1)
sm90_turned_split_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const int* rows, int M, int N,
                       int K, ARGUMENTS... of_epilogue) {
    turned_gemm<T, TILE, EPILOGUE>(x, w, rows, M, N, K, of_epilogue...);
}

}  // namespace frtc
