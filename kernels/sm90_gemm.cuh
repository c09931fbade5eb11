// y = epilogue(x w^T) on Hopper: tensor maps fill a ring of tiles, wgmma multiplies them, warps are specialised.
//
//   x  [M, K], w [N, K]: rows at multiples of 16 bytes, both of one type, e4m3, bf16 or fp16
//   epilogue, rows   as in smxx_gemm.cuh
//   grid   one block for each tile, (ceil(M / BM), ceil(N / BN), SPLIT); PERSISTENT: any number of blocks, (blocks, 1, 1)
//   block  WARPGROUPS x 128 threads that multiply, and behind them the producer: one thread of its warp works
//   smem   Tile::SMEM bytes
//   moves  every w element once from DRAM (blocks that share a column of tiles run together), x from L2; an SM takes 64
//          bytes a clock from L2, so a tile of BM x BN needs 2 (BM + BN) clocks of loads and BM BN / 32 of products for each
//          128 bytes of K
//
// A tile is WARPGROUPS parts of 64 BLOCKS rows by WN columns: above each other (rows), beside each other (columns), or the
// warpgroups take turns at whole tiles (turns: one multiplies while the other stores). Turned ones are sm90_turned_gemm.cuh's.
//
// Order::permuted: the tensor map of w hands its rows over in another order, so that each thread's accumulators are eight
// columns side by side: row 32 J + 8 t + 2 j + i of w is column 32 J + 8 j + 2 t + i of the product (t the thread of its
// four). Order::plain: the four threads exchange their accumulators. Order::whole: N is no multiple of 32; the last tile is
// plain, by a map of its own, the others are permuted.
//
// SPLIT > 1: the blocks of a cluster share K. Of each 64 rows, 64 / SPLIT belong to a block, in the order of the blocks (each
// further warpgroup begins with another one). It adds the partial sums of its rows in the order of the blocks and stores them,
// so that whole warps store, and four threads have 32 columns of a row. Sums travel in fp32 by st.async.
//
// Weights do not depend on earlier launches: where the first tile is known before `rows` can be read, they are requested
// before grid_wait().
#pragma once

#include "epilogue.cuh"
#include "sm90_tile.cuh"

namespace frtc {

template <typename TILE, typename T, Order ORDER>
__device__ __forceinline__ void produce(const Ring<TILE>& ring, const TensorMap& x, const TensorMap& w,
                                        const TensorMap& plain_w, const int* rows, int M, int N, int k_chunks) {
    constexpr int K = TILE::ROW / sizeof(T);
    const auto load_w = [&](int stage, int n0, int chunk) {
        if (permuted<TILE, ORDER>(n0, N)) {
            tensor_load(ring.w(stage), w, ring.full + 8 * stage, chunk * K, 0, 0, 0, n0 / 32);
        } else {
            tensor_load(ring.w(stage), plain_w, ring.full + 8 * stage, chunk * K, n0);
        }
    };
    tensor_map_prefetch(x);
    int ahead = 0;  // stages whose w is on its way
    if (!rows) {
        const Work<TILE> work(M, N, k_chunks, nullptr);
        if (work.first < work.end) {
            for (; ahead < min(work.chunks, TILE::STAGES); ++ahead) {
                barrier_expect(ring.full + 8 * ahead, TILE::STAGE_BYTES);
                load_w(ahead, work.n0(work.first), work.chunk + ahead);
            }
        }
    }
    enter<TILE>();
    const Work<TILE> work(M, N, k_chunks, rows);
    Place<TILE::STAGES> place;
    bool refill = false;
    for (int tile = work.first; tile < work.end; tile += work.step) {
        const int m0 = work.m0(tile), n0 = work.n0(tile);
        for (int i = 0; i < work.chunks; ++i) {
            if (refill) barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);
            if (ahead > 0) {
                --ahead;
            } else {
                barrier_expect(ring.full + 8 * place.stage, TILE::STAGE_BYTES);
                load_w(place.stage, n0, work.chunk + i);
            }
            const bool spoiled = kSabotage == Sabotage::last_k_tile && i + 1 == work.chunks;
            tensor_load(ring.x(place.stage), x, ring.full + 8 * place.stage, (work.chunk + i - spoiled) * K, m0);
            place.next();
            refill |= place.stage == 0;
        }
    }
}

template <typename TILE>
using WgmmaSums = float[TILE::BLOCKS][TILE::WN / 2];

// acc = the warpgroup's part of a tile, from `chunks` places of the ring on.
template <typename TILE, typename T>
__device__ __forceinline__ void multiply(WgmmaSums<TILE>& acc, const Ring<TILE>& ring, Place<TILE::STAGES>& place, int chunks) {
    constexpr u64 BLOCK = 64 * TILE::ROW / 16;  // from block to block in a descriptor
    const int part = TILE::PARTS == Parts::turns ? 0 : threadIdx.x / 128;
    const int first_x = TILE::PARTS == Parts::rows ? part * TILE::WM * TILE::ROW : 0;
    constexpr int OF_W = TILE::PARTS == Parts::columns ? TILE::WN : TILE::PARTS == Parts::turned ? TILE::WM : 0;
    const int first_w = part * OF_W * TILE::ROW;
    const bool leader = threadIdx.x % 128 == 0;
    int last = 0;
    for (int i = 0; i < chunks; ++i) {
        barrier_wait(ring.full + 8 * place.stage, place.parity);
        const u64 x = descriptor(ring.x(place.stage) + first_x), w = descriptor(ring.w(place.stage) + first_w);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE::ROW / 32; ++k) {
#pragma unroll
            for (int b = 0; b < TILE::BLOCKS; ++b) {
                if constexpr (TILE::PARTS == Parts::turned) wgmma<T, TILE::WN>(acc[b], w + 2 * k, x + 2 * k, i | k);
                else wgmma<T, TILE::WN>(acc[b], x + b * BLOCK + 2 * k, w + 2 * k, i | k);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (leader && i > 0) barrier_arrive(ring.empty + 8 * last);
        last = place.stage;
        place.next();
    }
    wgmma_wait<0>();
    if (leader && chunks > 0) barrier_arrive(ring.empty + 8 * last);
}

// Four threads hold columns 2t, 2t+1 of each of four groups of eight; after it thread t holds all of group t.
__device__ __forceinline__ void exchange(float (&v)[8]) {
    const int t = threadIdx.x % 4;
    const auto trade = [&](int a, int b, int mask) {  // the low thread's b for the high thread's a
        const bool high = t & mask;
        const float theirs = __shfl_xor_sync(~0u, high ? v[a] : v[b], mask);
        v[a] = high ? theirs : v[a];
        v[b] = high ? v[b] : theirs;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        trade(i, 2 + i, 1), trade(4 + i, 6 + i, 1);
        trade(i, 4 + i, 2), trade(2 + i, 6 + i, 2);
    }
}

// The eight neighbouring columns of one row that this thread has in group J of 32: those from 32 J + 8 t on.
template <typename TILE, bool PERMUTED>
__device__ __forceinline__ void neighbours(float (&v)[8], const float (&acc)[TILE::WN / 2], int J, int half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        v[2 * j] = acc[16 * J + 4 * j + 2 * half], v[2 * j + 1] = acc[16 * J + 4 * j + 2 * half + 1];
    }
    if constexpr (!PERMUTED) exchange(v);
}

// The thread's accumulators, eight columns of a row at a time, in `COUNT` units: blocks and halves of rows fastest.
template <typename TILE>
struct Eights {
    static constexpr int OF_COLUMNS = 2 * TILE::BLOCKS, COUNT = OF_COLUMNS * (TILE::WN / 32);
    int row0, column0;  // from the tile's corner

    __device__ __forceinline__ Eights() {
        const int part = TILE::PARTS == Parts::turns ? 0 : threadIdx.x / 128, lane = threadIdx.x % 32;
        row0 = (TILE::PARTS == Parts::rows ? part * TILE::WM : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
        column0 = (TILE::PARTS == Parts::columns ? part * TILE::WN : 0) + lane % 4 * 8;
    }
    __device__ __forceinline__ int row(int unit) const { return row0 + unit % OF_COLUMNS / 2 * 64 + unit % 2 * 8; }
    __device__ __forceinline__ int column(int unit) const { return column0 + unit / OF_COLUMNS * 32; }

    // Of a cluster: the block that the row belongs to, and its place among this block's rows.
    // Warpgroups begin with another one, so that no warp scheduler has only warps that store.
    __device__ __forceinline__ int owner(int unit) const {
        return (row0 % 64 / TILE::OWN + row0 / 64 * TILE::OWNERS + unit % TILE::OWNERS) % TILE::SPLIT;
    }
    __device__ __forceinline__ int own_row(int unit) const {
        return row0 / 64 * TILE::OWN + row0 % TILE::OWN + unit % OF_COLUMNS / 2 * TILE::OWN + unit % 2 * 8 % TILE::OWN;
    }

    template <bool PERMUTED>
    __device__ __forceinline__ static void get(float (&v)[8], const WgmmaSums<TILE>& acc, int unit) {
        neighbours<TILE, PERMUTED>(v, acc[unit % OF_COLUMNS / 2], unit / OF_COLUMNS, unit % 2);
    }
};

// How many rows' operands fit in the registers that accumulators and addresses leave; at most MOST, 0 where it is tight.
template <typename TILE, typename EPILOGUE, bool VECTORS, int MOST>
inline constexpr int kAhead = [] {
    constexpr int OF_ROW = (sizeof(typename EPILOGUE::Row) + 3) / 4, OTHERS = 72;  // registers; others: by trial
    const int fit = (TILE::REGISTERS - TILE::SUMS - OTHERS) / OF_ROW;
    const int most = Eights<TILE>::COUNT < MOST ? Eights<TILE>::COUNT : MOST;
    return !VECTORS || fit < 1 ? 0 : fit < most ? fit : most;
}();

// Operands of the epilogue that are asked for before the product, whose time hides theirs: those of the first eight columns of
// each thread, and of rows where one warpgroup has registers for them. Where it is known when this is compiled that they
// move as vectors, and no warpgroup takes turns.
template <typename TILE, typename EPILOGUE, int MOST>
struct Operands {
    static constexpr bool EARLY = EPILOGUE::WHOLE && TILE::PARTS != Parts::turns;
    static constexpr int ROWS = EARLY && TILE::WARPGROUPS == 1 && TILE::WN <= 64 ? kAhead<TILE, EPILOGUE, true, MOST> : 0;
    typename EPILOGUE::Columns columns;
    typename EPILOGUE::Row rows[ROWS ? ROWS : 1];

    __device__ __forceinline__ Operands(const EPILOGUE& epilogue, int m0, int n0) {
        if constexpr (EARLY) {
            const Eights<TILE> units;
            columns = epilogue.template columns_at<true>(n0 + units.column(0));
#pragma unroll
            for (int u = 0; u < ROWS; ++u) rows[u] = epilogue.template row_at<true>(m0 + units.row(u), n0 + units.column(u));
        }
    }
};
template <typename TILE>
inline constexpr int kMostAhead = TILE::SPLIT > 1 ? Eights<TILE>::COUNT : 6;  // of a cluster all: sums travel meanwhile

// Operands of a thread's units, taken in order: some units ahead are on their way, the first ones since before the product.
// Where registers are short, none are.
template <bool VECTORS, typename TILE, typename EPILOGUE>
class Ahead {
    using Units = Eights<TILE>;
    using Given = Operands<TILE, EPILOGUE, kMostAhead<TILE>>;

public:
    static constexpr int ROWS = kAhead<TILE, EPILOGUE, VECTORS, kMostAhead<TILE>>;

    __device__ __forceinline__ Ahead(const EPILOGUE& epilogue, const Given& given, int m0, int n0)
        : epilogue(epilogue), m0(m0), n0(n0) {
        if constexpr (Given::EARLY && VECTORS) columns = given.columns;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if constexpr (Given::ROWS == ROWS && VECTORS) rows[u] = given.rows[u];
            else rows[u] = row_of(u);
        }
    }

    __device__ __forceinline__ typename EPILOGUE::Row row_of(int u) const {
        return epilogue.template row_at<VECTORS>(m0 + units.row(u), n0 + units.column(u));
    }

    // Of unit u, in order; what comes later is asked for.
    __device__ __forceinline__ typename EPILOGUE::Columns columns_of(int u) {
        constexpr bool NEXT = Given::EARLY && VECTORS && ROWS > 0;
        if (u % Units::OF_COLUMNS == 0) {
            if constexpr (NEXT) {
                if (u > 0) columns = next;
                if (u + Units::OF_COLUMNS < Units::COUNT) next = columns_at(u + Units::OF_COLUMNS);
            } else if (u > 0 || !(Given::EARLY && VECTORS)) {
                columns = columns_at(u);
            }
        }
        return columns;
    }
    __device__ __forceinline__ typename EPILOGUE::Row take_row(int u) {
        if constexpr (ROWS == 0) return row_of(u);
        const typename EPILOGUE::Row found = rows[u % (ROWS ? ROWS : 1)];
        if (u + ROWS < Units::COUNT) rows[u % (ROWS ? ROWS : 1)] = row_of(u + ROWS);
        return found;
    }

private:
    __device__ __forceinline__ typename EPILOGUE::Columns columns_at(int u) const {
        return epilogue.template columns_at<VECTORS>(n0 + units.column(u));
    }

    const EPILOGUE& epilogue;
    const int m0, n0;
    const Units units;
    typename EPILOGUE::Columns columns, next;
    typename EPILOGUE::Row rows[ROWS ? ROWS : 1];
};

// Everything of a tile. Where registers are short, a branch around each unit keeps the operands of the next ones out of them.
template <bool VECTORS, typename TILE, bool PERMUTED, typename EPILOGUE, typename GIVEN>
__device__ __forceinline__ void store_tile(const WgmmaSums<TILE>& acc, const EPILOGUE& epilogue, const GIVEN& given, int m0,
                                           int n0) {
    using Operand = Ahead<VECTORS, TILE, EPILOGUE>;
    constexpr bool APART =
        Operand::ROWS == 0 && (sizeof(typename EPILOGUE::Row) > 4 || finds_factors<EPILOGUE>());
    const Eights<TILE> units;
    Operand ahead(epilogue, given, m0, n0);
#pragma unroll
    for (int u = 0; u < Eights<TILE>::COUNT; ++u) {
        const typename EPILOGUE::Columns columns = ahead.columns_of(u);
        float v[8];
        Eights<TILE>::template get<PERMUTED>(v, acc, u);
        const int row = m0 + units.row(u), column = n0 + units.column(u);
        if constexpr (!APART) {
            epilogue.template store<VECTORS>(row, column, v, columns, ahead.take_row(u));
        } else if (epilogue.exists(row, column)) {
            epilogue.template store<VECTORS>(row, column, v, columns, ahead.row_of(u));
        }
    }
}

// Where half of the sums of a unit lie in the block they belong to, for each sender: the lanes of a warp read 16 bytes each,
// side by side.
template <typename TILE>
__device__ __forceinline__ u32 received_at(u32 base, int sender, const Eights<TILE>& units, int unit, int half) {
    const int plane = (sender * (TILE::BN / 32) + unit / Eights<TILE>::OF_COLUMNS) * 2 + half;
    return base + (plane * (TILE::BM / TILE::SPLIT) + units.own_row(unit)) * 64 + units.column0 / 8 * 16;
}

// Sends the sums of rows that belong to other blocks of the cluster.
template <typename TILE, bool PERMUTED>
__device__ __forceinline__ void send_sums(const WgmmaSums<TILE>& acc, const Ring<TILE>& ring, int m0, int M) {
    const Eights<TILE> units;
    const int rank = blockIdx.z;
    if (TILE::OWNERS == 1 && units.owner(0) == rank) return;
#pragma unroll
    for (int u = 0; u < Eights<TILE>::COUNT; ++u) {
        const int owner = units.owner(u);
        if (TILE::OWNERS > 1 && owner == rank) continue;
        float v[8];
        Eights<TILE>::template get<PERMUTED>(v, acc, u);
        if (m0 + units.row(u) >= M) continue;
        const u32 there = cluster_address(ring.received, owner), barrier = cluster_address(ring.sums, owner);
        const int sender = rank < owner ? rank : rank - 1;
        store_async(received_at<TILE>(there, sender, units, u, 0), barrier, v[0], v[1], v[2], v[3]);
        store_async(received_at<TILE>(there, sender, units, u, 1), barrier, v[4], v[5], v[6], v[7]);
    }
}

// Stores this block's own rows once the sums of the other blocks are there.
template <bool VECTORS, typename TILE, bool PERMUTED, typename EPILOGUE, typename GIVEN>
__device__ __forceinline__ void store_sums(const WgmmaSums<TILE>& acc, const Ring<TILE>& ring, const EPILOGUE& epilogue,
                                           const GIVEN& given, int m0, int n0) {
    const Eights<TILE> units;
    const int rank = blockIdx.z;
    if (units.owner(0) / TILE::OWNERS != rank / TILE::OWNERS) return;
    Ahead<VECTORS, TILE, EPILOGUE> ahead(epilogue, given, m0, n0);
    barrier_wait(ring.sums, 0);
#pragma unroll
    for (int u = 0; u < Eights<TILE>::COUNT; ++u) {
        const typename EPILOGUE::Columns columns = ahead.columns_of(u);
        const typename EPILOGUE::Row of_row = ahead.take_row(u);
        if (u % TILE::OWNERS != rank % TILE::OWNERS) continue;
        float own[8], sum[8] = {};
        Eights<TILE>::template get<PERMUTED>(own, acc, u);
#pragma unroll
        for (int block = 0; block < TILE::SPLIT; ++block) {
            const int sender = block < rank ? block : block - 1;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 four = block == rank ? make_float4(own[4 * h], own[4 * h + 1], own[4 * h + 2], own[4 * h + 3])
                                                  : load_shared_f32x4(received_at<TILE>(ring.received, sender, units, u, h));
                sum[4 * h] += four.x, sum[4 * h + 1] += four.y, sum[4 * h + 2] += four.z, sum[4 * h + 3] += four.w;
            }
        }
        epilogue.template store<VECTORS>(m0 + units.row(u), n0 + units.column(u), sum, columns, of_row);
    }
}

// Adds what other blocks of the cluster have of the tile, and stores it.
template <bool VECTORS, typename TILE, bool PERMUTED, typename EPILOGUE, typename GIVEN>
__device__ __forceinline__ void deliver_as(const WgmmaSums<TILE>& acc, const Ring<TILE>& ring, const EPILOGUE& epilogue,
                                           const GIVEN& given, int m0, int n0, int M) {
    if constexpr (TILE::SPLIT > 1) {
        send_sums<TILE, PERMUTED>(acc, ring, m0, M);
        __syncwarp();
        store_sums<VECTORS, TILE, PERMUTED>(acc, ring, epilogue, given, m0, n0);
    } else {
        store_tile<VECTORS, TILE, PERMUTED>(acc, epilogue, given, m0, n0);
    }
}
template <typename TILE, bool PERMUTED, typename EPILOGUE, typename GIVEN>
__device__ __forceinline__ void deliver(const WgmmaSums<TILE>& acc, const Ring<TILE>& ring, const EPILOGUE& epilogue,
                                        const GIVEN& given, int m0, int n0, int M) {
    if (EPILOGUE::WHOLE || epilogue.whole()) {
        deliver_as<true, TILE, PERMUTED>(acc, ring, epilogue, given, m0, n0, M);
    } else if constexpr (!EPILOGUE::WHOLE) {
        deliver_as<false, TILE, PERMUTED>(acc, ring, epilogue, given, m0, n0, M);
    }
}

// Barriers of the ring: full counts the producer and its bytes, empty the warpgroups that have read; sums the bytes of the
// other blocks; turns one for each warpgroup.
template <typename TILE>
__device__ __forceinline__ void init_barriers(const Ring<TILE>& ring, int m0, int M) {
    for (int i = 0; i < TILE::STAGES; ++i) {
        barrier_init(ring.full + 8 * i, 1);
        barrier_init(ring.empty + 8 * i, TILE::PARTS == Parts::turns ? 1 : TILE::WARPGROUPS);
    }
    barrier_init(ring.sums, 1);
    barrier_init(ring.turns, 1), barrier_init(ring.turns + 8, 1);
    barrier_init_fence();
    if constexpr (TILE::SPLIT > 1) {
        const int present = min(M - m0, TILE::BM), whole = present / 64;
        const int place = (blockIdx.z + TILE::SPLIT * TILE::OWNERS * 4 - whole * TILE::OWNERS) % TILE::SPLIT;
        const int own = whole * TILE::OWN + max(0, min(present % 64 - place * TILE::OWN, TILE::OWN));
        barrier_expect(ring.sums, (TILE::SPLIT - 1) * own * TILE::BN * 4);  // 0: the barrier is passed at once
    }
}

template <typename T, typename TILE, typename EPILOGUE, Order ORDER, typename... ARGUMENTS>
__device__ __forceinline__ void wgmma_gemm(const TensorMap& x, const TensorMap& w, const TensorMap& plain_w, const int* rows,
                                           int M, int N, int K, ARGUMENTS... of_epilogue) {
    extern __shared__ u8 unaligned[];
    const u32 start = shared_address(unaligned), base = (start + 1023) & ~1023u;
    const Ring<TILE> ring(base);
    const int k_chunks = (K + TILE::ROW / sizeof(T) - 1) / (TILE::ROW / static_cast<int>(sizeof(T)));
    if (threadIdx.x == 0) init_barriers(ring, blockIdx.x * TILE::BM, M);
    __syncthreads();
    if constexpr (TILE::SPLIT > 1) cluster_arrive_relaxed();

    if (threadIdx.x >= TILE::CONSUMERS) {
        if constexpr (TILE::UNEVEN) registers_down<TILE::PRODUCER_REGISTERS>();
        if (threadIdx.x == TILE::CONSUMERS) produce<TILE, T, ORDER>(ring, x, w, plain_w, rows, M, N, k_chunks);
    } else {
        if constexpr (TILE::UNEVEN) registers_up<TILE::REGISTERS>();
        // Here, not before sums are sent: it would wait for all loads, those of operands too.
        if constexpr (TILE::SPLIT > 1) cluster_wait();
        enter<TILE>();
        EPILOGUE epilogue(M, N, 0, of_epilogue...);
        const Work<TILE> work(M, N, k_chunks, rows);
        const int group = threadIdx.x / 128;
        Place<TILE::STAGES> place;
        u32 turn = group ^ 1;
        int mine = 0;  // whose turn the tile is
        WgmmaSums<TILE> acc;
        for (int tile = work.first; tile < work.end; tile += work.step) {
            const int m0 = work.m0(tile), n0 = work.n0(tile);
            if constexpr (TILE::PARTS == Parts::turns) {
                mine ^= 1;
                if (mine == group) {
                    place.skip(work.chunks);
                    continue;
                }
                const bool others = 2 * work.step % work.tall != 0 || tile - work.first < 2 * work.step;  // rows than before
                if (others && tile != work.first) Factors<TILE, EPILOGUE>::find(epilogue, m0);
                barrier_wait(ring.turns + 8 * group, turn), turn ^= 1;
            }
            Factors<TILE, EPILOGUE> factors(epilogue, m0);
            const Operands<TILE, EPILOGUE, kMostAhead<TILE>> given(epilogue, m0, n0);
            multiply<TILE, T>(acc, ring, place, work.chunks);
            if constexpr (TILE::PARTS == Parts::turns) {
                if (threadIdx.x % 128 == 0) barrier_arrive(ring.turns + 8 * (group ^ 1));
                // Of the very first tile here, too, while the other one multiplies: before it nothing would hide the time.
                if (tile == work.first) Factors<TILE, EPILOGUE>::find(epilogue, m0);
            }
            factors.settle(epilogue);
            if (permuted<TILE, ORDER>(n0, N)) {
                if constexpr (ORDER != Order::plain) deliver<TILE, true>(acc, ring, epilogue, given, m0, n0, M);
            } else {
                if constexpr (ORDER != Order::permuted) deliver<TILE, false>(acc, ring, epilogue, given, m0, n0, M);
            }
            if constexpr (!TILE::PERSISTENT) {
                epilogue.template finish<TILE::CONSUMERS, TILE::SPLIT>(unaligned + (base - start), m0);
            }
        }
    }
}

template <typename T, typename TILE, typename EPILOGUE, Order ORDER, typename... ARGUMENTS>
__global__ void __launch_bounds__(TILE::THREADS, 1)
sm90_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap plain_w,
          const int* rows, int M, int N, int K, ARGUMENTS... of_epilogue) {
    wgmma_gemm<T, TILE, EPILOGUE, ORDER>(x, w, plain_w, rows, M, N, K, of_epilogue...);
}

template <typename T, typename TILE, typename EPILOGUE, Order ORDER, typename... ARGUMENTS>
__global__ void __cluster_dims__(1, 1, TILE::SPLIT) __launch_bounds__(TILE::THREADS, TILE::PAIRED ? 2 : 1)
sm90_split_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                const __grid_constant__ TensorMap plain_w, const int* rows, int M, int N, int K, ARGUMENTS... of_epilogue) {
    wgmma_gemm<T, TILE, EPILOGUE, ORDER>(x, w, plain_w, rows, M, N, K, of_epilogue...);
}

}  // namespace frtc
