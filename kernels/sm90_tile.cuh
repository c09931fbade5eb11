// A tile of the products of sm90_gemm.cuh: its shape, its ring in shared memory, which tiles a block works on, and when the
// factors of its rows are found.
#pragma once

#include "epilogue.cuh"
#include "sm90.cuh"

namespace frtc {

enum class Parts { rows, columns, turns, turned };
enum class Order { plain, permuted, whole };

template <int BLOCKS_, int WN_, Parts PARTS_, int WARPGROUPS_, int STAGES_, int SPLIT_, bool PERSISTENT_, bool PAIRED_,
          bool EARLY_>
struct WgmmaTile {
    static constexpr int BLOCKS = BLOCKS_, WN = WN_, WARPGROUPS = WARPGROUPS_, STAGES = STAGES_, SPLIT = SPLIT_;
    static constexpr Parts PARTS = PARTS_;
    static constexpr bool PERSISTENT = PERSISTENT_, PAIRED = PAIRED_;  // paired: two blocks fit on an SM
    static constexpr bool EARLY = EARLY_;  // the next launch may begin when this one has begun, not when its wait is over
    static constexpr int WM = 64 * BLOCKS, BM = WM * (PARTS == Parts::rows ? WARPGROUPS : 1);
    static constexpr int BN = WN * (PARTS == Parts::columns ? WARPGROUPS : 1);
    static constexpr int CONSUMERS = 128 * WARPGROUPS;
    // Beside several warpgroups a single warp would leave each thread 168 or 128 registers. So the producer is a warpgroup,
    // too, and gives up most of its share.
    static constexpr bool UNEVEN = WARPGROUPS > 1;
    static constexpr int REGISTERS = WARPGROUPS == 1 ? 255 : WARPGROUPS == 2 ? 232 : 152;
    static constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 56;
    static constexpr int THREADS = CONSUMERS + (UNEVEN ? 128 : 32);
    static constexpr int SUMS = BLOCKS * WN / 2;  // registers of a thread
    static constexpr int ROW = 128, STAGE_BYTES = (BM + BN) * ROW, RING = STAGES * STAGE_BYTES;
    // Of a cluster: rows of each 64 that belong to a block, how many blocks own what a warp holds (8 rows and 8 rows), and what
    // the others send of a block's rows.
    static constexpr int OWN = 64 / SPLIT, OWNERS = SPLIT == 8 ? 2 : 1, RECEIVED = (SPLIT - 1) * (BM / SPLIT) * BN * 4;
    static constexpr int SMEM = 1024 + RING + RECEIVED + 16 * STAGES + 32;
    static_assert(WN % 32 == 0 && BM <= 256 && BN <= 256, "a box has at most 256 rows");
    static_assert(SPLIT == 1 || BLOCKS == 1, "Eights::owner() begins with another block each 64 rows");
    static_assert(SPLIT == 1 || (8 % SPLIT == 0 && PARTS == Parts::rows && !PERSISTENT), "every block has rows");
    static_assert(PARTS != Parts::turns || (PERSISTENT && WARPGROUPS == 2), "two take turns");
};

// Addresses in shared memory, from a multiple of 1,024 on.
template <typename TILE>
struct Ring {
    u32 tiles, received, full, empty, sums, turns;

    __device__ __forceinline__ explicit Ring(u32 base)
        : tiles(base), received(base + TILE::RING), full(received + TILE::RECEIVED), empty(full + 8 * TILE::STAGES),
          sums(empty + 8 * TILE::STAGES), turns(sums + 8) {}
    __device__ __forceinline__ u32 x(int stage) const { return tiles + stage * TILE::STAGE_BYTES; }
    __device__ __forceinline__ u32 w(int stage) const { return x(stage) + TILE::BM * TILE::ROW; }
};

// A place in the ring and the parity of its barriers' phase.
template <int STAGES>
struct Place {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int places) {
        for (stage += places; stage >= STAGES; stage -= STAGES) parity ^= 1;
    }
};

// The tiles of a block and the chunks of K that it multiplies, chunks of 128 bytes.
template <typename TILE>
struct Work {
    int first, step, end, tall, chunk, chunks;

    __device__ __forceinline__ Work(int M, int N, int k_chunks, const int* rows) {
        int live = M;
        if (rows) live = min(M, *rows - (kSabotage == Sabotage::row_tile ? TILE::BM : 0));
        tall = (live + TILE::BM - 1) / TILE::BM;
        if constexpr (TILE::PERSISTENT) {
            first = blockIdx.x, step = gridDim.x, end = tall * ((N + TILE::BN - 1) / TILE::BN);
        } else {
            first = 0, step = 1, end = static_cast<int>(blockIdx.x) < tall;
        }
        const int share = TILE::SPLIT == 1 ? 0 : blockIdx.z;
        chunk = share * k_chunks / TILE::SPLIT;
        chunks = (share + 1) * k_chunks / TILE::SPLIT - chunk;
    }
    __device__ __forceinline__ int m0(int tile) const { return (TILE::PERSISTENT ? tile % tall : blockIdx.x) * TILE::BM; }
    __device__ __forceinline__ int n0(int tile) const { return (TILE::PERSISTENT ? tile / tall : blockIdx.y) * TILE::BN; }
};

// Whether the rows of w that begin at n0 are handed over in the other order.
template <typename TILE, Order ORDER>
__device__ __forceinline__ bool permuted(int n0, int N) {
    return ORDER == Order::permuted || (ORDER == Order::whole && n0 + TILE::BN <= N);
}

// Waits for the launches before this one, and lets the next one begin.
template <typename TILE>
__device__ __forceinline__ void enter() {
    if constexpr (TILE::EARLY) grid_release();
    grid_wait();
    if constexpr (!TILE::EARLY) grid_release();
}

// Factors of the rows that this warpgroup stores, where the epilogue has such: their moments are asked for before the product
// and come while it is made, if they fit in registers; where warpgroups take turns, while the other one multiplies.
template <typename TILE, typename EPILOGUE, bool FOUND = finds_factors<EPILOGUE>()>
struct Factors {
    __device__ __forceinline__ Factors(const EPILOGUE&, int) {}
    __device__ __forceinline__ void settle(EPILOGUE&) {}
    __device__ __forceinline__ static void find(const EPILOGUE&, int) {}
};
template <typename TILE, typename EPILOGUE>
struct Factors<TILE, EPILOGUE, true> {
    using Rows = decltype(EPILOGUE::factors);
    static constexpr bool TURNS = TILE::PARTS == Parts::turns, AHEAD = !TURNS && Rows::template AHEAD<TILE::WM>;
    int first;
    typename Rows::template Asked<AHEAD ? TILE::WM : Rows::AT_ONCE> asked;

    __device__ __forceinline__ Factors(const EPILOGUE& epilogue, int m0)
        : first(m0 + (TILE::PARTS == Parts::rows ? group() * TILE::WM : 0)) {
        if constexpr (AHEAD) asked = epilogue.factors.template ask<TILE::WM>(first);
        if constexpr (!AHEAD && !TURNS) find(epilogue, first);
    }
    __device__ __forceinline__ void settle(EPILOGUE& epilogue) {
        if constexpr (AHEAD) epilogue.factors.settle(asked, group());
        epilogue.factors.origin = group() * TILE::WM - first;
    }
    __device__ __forceinline__ static void find(const EPILOGUE& epilogue, int m0) {
        epilogue.factors.template find<TILE::WM>(m0, group());
    }

private:
    __device__ __forceinline__ static int group() { return threadIdx.x / 128; }
};

}  // namespace frtc
