// kernels/smxx_frames.cuh on a CPU: the threads of a block take turns between its barriers. tests/kernels/frames_cpu.py
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline

// Compiled with -ffp-contract=off, every operation is rounded once.
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

#include "smxx_frames.cuh"

template <bool PIL, bool FLOAT>
static void block(const frtc::FrameCamera& camera, int x, int y, void* picture, unsigned* range) {
    std::vector<frtc::FrameThread<PIL, FLOAT>> threads;
    for (int i = 0; i < frtc::kElements * frtc::kGroups; ++i) threads.emplace_back(camera, x, y, i);
    int middle[frtc::kChunk * frtc::kElements];
    for (int start = threads[0].first; start <= threads[0].last; start += frtc::kChunk) {
        std::memset(middle, 0xff, sizeof middle);  // what nobody wrote is seen
        for (auto& thread : threads) thread.across(start, middle);
        for (auto& thread : threads) thread.down(start, middle);
    }
    for (auto& thread : threads) thread.store(picture, range);
}

extern "C" int frames_sizes(int i) {
    const int sizes[] = {sizeof(frtc::FrameCamera), sizeof(frtc::Tap), frtc::kElements, frtc::kGroups, frtc::kRows,
                         frtc::kPil, frtc::kSigned};
    return sizes[i];
}

extern "C" void frames_on_cpu(const frtc::FrameCamera* cameras, void* images, unsigned* range, int columns, int rows,
                              int views) {
    for (int v = 0; v < views; ++v) {
        const frtc::FrameCamera& camera = cameras[v];
        const bool pil = camera.rule == frtc::kPil, is_float = camera.is_float;
        void* picture = pil ? frtc::picture_of<true>(images, v, camera.size)
                            : frtc::picture_of<false>(images, v, camera.size);
        auto run = pil ? (is_float ? block<true, true> : block<true, false>)
                       : (is_float ? block<false, true> : block<false, false>);
        for (int y = 0; y < rows; ++y)
            for (int x = 0; x < columns; ++x) run(camera, x, y, picture, range + v);
    }
}
