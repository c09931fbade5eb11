// Camera frames of any size -> images [V, S, S, 3]: resized keeping the aspect, the rest of the square a border.
// The same bits as runtime/steps_image.py, whose filter tables the cameras' records point to (smxx_frames.py).
//
//   cameras   V records; one of size 0 leaves its picture as it is
//   images    u8 where the rule is kPil, else f32
//   range     u32 [V]: set to the record's serial where a float outside of [0, 1] was read
//   grid      (ELEMENTS of a row of 3 S, ROWS, cameras), THREADS threads: a thread makes one element of OWN rows
//   kPil      weights in 2**-22: across, rounded to 8 bits, then down, rounded again; floats are cut to 255 x first
//   others    floats: products and sums in the order of the taps, each rounded (a sum begins at -0.0, which adds nothing)
//   moves     the frames once and some rows again where blocks meet; bound by latency at camera sizes of today
//
// Source rows come in chunks: across into shared memory, then from there down into registers. Both halves are functions
// of a thread, so that a test can run them on a CPU.
#pragma once

namespace frtc {

inline constexpr int kElements = 96, kGroups = 2, kRows = 4, kChunk = 16;  // GROUPS rows at a time, by all threads
inline constexpr int kOwn = kRows / kGroups, kEach = kChunk / kGroups;
inline constexpr int kPil = 0, kSigned = 2;
inline constexpr int kBits = 22;

struct alignas(8) Tap {
    int index;
    int weight;  // in 2**-22, or the bits of a float
};

struct FrameCamera {
    const unsigned char* frame;       // element [0, 0, red]
    const Tap* across;                // [across_taps, width]
    const Tap* down;                  // [down_taps, height]
    long long row, column, channel;   // bytes from one to the next
    int across_taps, down_taps;
    int height, width, top, left;     // the picture inside the square
    int size;
    int is_float;                     // the frame
    int rule;
    float border;
    unsigned serial;
    unsigned unused;
};

template <bool PIL>
struct FrameSum {  // of 8-bit values
    int sum = 1 << (kBits - 1);
#ifdef FRTC_SABOTAGE_TRUNCATED
    __device__ FrameSum() : sum(0) {}
#endif
    __device__ __forceinline__ void add(int weight, int value) { sum += weight * value; }
    __device__ __forceinline__ int value() const { return sum >> kBits; }
};

template <>
struct FrameSum<false> {  // values are the bits of floats
    float sum = -0.0f;
    __device__ __forceinline__ void add(int weight, int value) {
        sum = __fadd_rn(sum, __fmul_rn(__int_as_float(weight), __int_as_float(value)));
    }
    __device__ __forceinline__ int value() const { return __float_as_int(sum); }
};

// One thread of a block.
template <bool PIL, bool FLOAT>
struct FrameThread {
    FrameCamera camera;
    int element, group;      // in the block
    int y0, x, channel;      // first row of the block and column, in the picture
    int place, out_row;      // element of a row of the square, first row of the block there
    bool inside;             // the column
    int first, last;         // source rows that the block reads
    bool bad = false;
    FrameSum<PIL> sums[kOwn];

    __device__ __forceinline__ FrameThread(const FrameCamera& of, int block_x, int block_y, int thread) : camera(of) {
        element = thread % kElements, group = thread / kElements;
        place = block_x * kElements + element, out_row = block_y * kRows;
        channel = place % 3, x = place / 3 - camera.left, y0 = out_row - camera.top;
        inside = x >= 0 && x < camera.width;
        const int from = y0 < 0 ? 0 : y0, to = (y0 + kRows < camera.height ? y0 + kRows : camera.height) - 1;
        const bool any = from <= to;  // indices rise with the tap and with the row
        first = any ? camera.down[from].index : 0;
        last = any ? camera.down[(camera.down_taps - 1) * camera.height + to].index : -1;
    }

    __device__ __forceinline__ int load(const unsigned char* at) {
        if constexpr (FLOAT) {
            const float value = *reinterpret_cast<const float*>(at);
            bad |= !(value >= 0.0f && value <= 1.0f);  // true for NaN
            return PIL ? static_cast<int>(__fmul_rn(255.0f, value)) & 255 : __float_as_int(value);
        } else {
            return PIL ? *at : __float_as_int(__fdiv_rn(static_cast<float>(*at), 255.0f));
        }
    }

    // middle [kChunk, kElements]: this thread's column of the rows from `start` on that are its group's.
    __device__ __forceinline__ void across(int start, int* middle) {
        if (!inside) return;
        const unsigned char* rows[kEach];
        FrameSum<PIL> acc[kEach];
#pragma unroll
        for (int r = 0; r < kEach; ++r) {
            const int row = start + group + r * kGroups;
            rows[r] = camera.frame + (row < last ? row : last) * camera.row + channel * camera.channel;
        }
        int taps = camera.across_taps;
#ifdef FRTC_SABOTAGE_LAST_TAP
        taps = taps > 1 ? taps - 1 : taps;
#endif
        for (int t = 0; t < taps; ++t) {
            const Tap tap = camera.across[t * camera.width + x];
            const long long offset = tap.index * camera.column;
#pragma unroll
            for (int r = 0; r < kEach; ++r) acc[r].add(tap.weight, load(rows[r] + offset));
        }
#pragma unroll
        for (int r = 0; r < kEach; ++r) middle[(group + r * kGroups) * kElements + element] = acc[r].value();
    }

    __device__ __forceinline__ void down(int start, const int* middle) {
#pragma unroll
        for (int o = 0; o < kOwn; ++o) {
            const int y = y0 + group + o * kGroups;
            if (!inside || y < 0 || y >= camera.height) continue;
            for (int t = 0; t < camera.down_taps; ++t) {
                const Tap tap = camera.down[t * camera.height + y];
                const int row = tap.index - start;
                if (row >= 0 && row < kChunk) sums[o].add(tap.weight, middle[row * kElements + element]);
            }
        }
    }

    // picture: of this camera.
    __device__ __forceinline__ void store(void* picture, unsigned* range) const {
        if (bad) *range = camera.serial;
        if (place >= 3 * camera.size) return;
#pragma unroll
        for (int o = 0; o < kOwn; ++o) {
            const int row = out_row + group + o * kGroups, y = y0 + group + o * kGroups;
            if (row >= camera.size) continue;
            const bool within = inside && y >= 0 && y < camera.height;
            const long long at = static_cast<long long>(row) * 3 * camera.size + place;
            if constexpr (PIL) {
                const int value = within ? sums[o].value() : static_cast<int>(camera.border);
                static_cast<unsigned char*>(picture)[at] = static_cast<unsigned char>(value);
            } else {
                float value = within ? __int_as_float(sums[o].value()) : camera.border;
                if (within && camera.rule == kSigned) value = __fadd_rn(__fmul_rn(value, 2.0f), -1.0f);
                static_cast<float*>(picture)[at] = value;
            }
        }
    }
};

// Where the pictures of the cameras before lie behind one another: of one size and rule, or of size 0.
template <bool PIL>
__device__ __forceinline__ void* picture_of(void* images, int camera, int size) {
    const long long elements = static_cast<long long>(camera) * size * size * 3;
    return static_cast<unsigned char*>(images) + elements * (PIL ? 1 : 4);
}

#ifdef __CUDACC__
template <bool PIL, bool FLOAT>
__device__ __forceinline__ void frame(const FrameCamera& camera, void* images, unsigned* range, int* middle) {
    FrameThread<PIL, FLOAT> thread(camera, blockIdx.x, blockIdx.y, threadIdx.x);
    for (int start = thread.first; start <= thread.last; start += kChunk) {  // the same for all threads
        thread.across(start, middle);
        __syncthreads();
        thread.down(start, middle);
        __syncthreads();
    }
    thread.store(picture_of<PIL>(images, blockIdx.z, camera.size), range + blockIdx.z);
}

__global__ void __launch_bounds__(kElements* kGroups)
    frames(const FrameCamera* cameras, void* images, unsigned* range) {
    __shared__ int middle[kChunk * kElements];
    const FrameCamera camera = cameras[blockIdx.z];
    if (camera.rule == kPil) {
        camera.is_float ? frame<true, true>(camera, images, range, middle)
                        : frame<true, false>(camera, images, range, middle);
    } else {
        camera.is_float ? frame<false, true>(camera, images, range, middle)
                        : frame<false, false>(camera, images, range, middle);
    }
}
#endif

}  // namespace frtc
