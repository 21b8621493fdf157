// In: packed rows and one packed weight matrix. Out: this thread's part of their product, tile by tile.
#pragma once
#include <algorithm>

#include "native_kernels.h"

extern "C" {
struct Linear {
    const void* weight;  // packed, see native_kernels.h
    const float* bias;   // [out rounded up to 32] or null
    int64_t in, out;     // in is even
};
}

namespace {

constexpr int64_t CHUNK = 96;             // rows that go through the layers together
constexpr int64_t KERNEL_BYTES = 1 << 19;  // of a weight tile that is reused from the cache for all groups of rows

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Range {
    int64_t begin, end;
};
Range share(int64_t n, int thread, int threads) { return {n * thread / threads, n * (thread + 1) / threads}; }

// Rows split evenly into groups for the register kernels; where row r lies in a packed buffer.
struct Groups {
    int64_t rows = 0;
    int count = 0;
    int64_t starts[CHUNK + 1];
    int group_of[CHUNK];

    explicit Groups(int64_t n) : rows(n), count(static_cast<int>((n + MAX_ROWS - 1) / MAX_ROWS)) {
        for (int g = 0; g <= count; ++g) starts[g] = count ? n * g / count : 0;
        for (int g = 0; g < count; ++g)
            for (int64_t r = starts[g]; r < starts[g + 1]; ++r) group_of[r] = g;
    }
    int size(int g) const { return static_cast<int>(starts[g + 1] - starts[g]); }
};

template <class F>
void put(typename F::X* x, const Groups& groups, int64_t row, int64_t in, int64_t at, const float* values, int64_t n) {
    const int g = groups.group_of[row];
    F::put(x + groups.starts[g] * in, groups.size(g), static_cast<int>(row - groups.starts[g]), at, values, n);
}

// This thread's tiles of x W^T + bias; finish(tile, row, sums of the tile's 32 outputs).
template <class F, class Finish>
void multiply(const Linear& linear, const typename F::X* x, const Groups& groups, float* acc, int thread, int threads,
              Finish finish) {
    const int64_t in = linear.in;
    const int64_t block = groups.count > 1 ? KERNEL_BYTES / (TILE * static_cast<int64_t>(sizeof(typename F::W))) : in;
    const Range tiles = share(round_up(linear.out, TILE) / TILE, thread, threads);
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        const auto* w = static_cast<const typename F::W*>(linear.weight) + tile * in * TILE;
        for (int64_t r = 0; r < groups.rows; ++r) {
            if (linear.bias) memcpy(acc + r * TILE, linear.bias + tile * TILE, TILE * sizeof(float));
            else memset(acc + r * TILE, 0, TILE * sizeof(float));
        }
        for (int64_t k = 0; k < in; k += block) {
            for (int g = 0; g < groups.count; ++g) {
                const int64_t start = groups.starts[g];
                const auto* xg = x + start * in + k * groups.size(g);
                kernel_for<F>(groups.size(g))(w + k * TILE, xg, std::min(block, in - k), acc + start * TILE);
            }
        }
        for (int64_t r = 0; r < groups.rows; ++r) finish(tile, r, acc + r * TILE);
    }
}

}  // namespace
