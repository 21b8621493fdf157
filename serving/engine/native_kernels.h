// In: packed weights and rows. Out: the register kernels of the native forward for AVX512-BF16, AVX-512, AVX2+FMA or
// any CPU, chosen at compile time. Every output element is summed in one fixed order, whatever the number of rows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 12, MAX_HEADS = 4;  // rows and heads that fit into the registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, MAX_ROWS = 6, MAX_HEADS = 3;
#else
constexpr int LANES = 4, MAX_ROWS = 6, MAX_HEADS = 3;
#endif
constexpr int TILE = 32;            // outputs of a weight tile: packed as [out / 32][in][32]
constexpr int PREFETCH = 8192;      // bytes that the weights are fetched ahead

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));

#define UNROLL _Pragma("GCC unroll 32")
#define INLINE inline __attribute__((always_inline))

INLINE vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf splat(float s) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(s);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_set1_ps(s);
#else
    return vf{s, s, s, s};
#endif
}

// a * b + c; fused where the CPU can, and the same in every kernel (contraction by the compiler is off).
INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

INLINE float sum_lanes(vf v) {
    float sum = v[0];
    for (int i = 1; i < LANES; ++i) sum += v[i];
    return sum;
}

// exp in fp32, about 1 ulp; the argument is cut to [-87, 88].
INLINE vf vexp(vf x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const vf shifted = fma(x, splat(1.44269504f), splat(12582912.0f));  // the integer lands in the low mantissa bits
    const vf n = shifted - 12582912.0f;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

INLINE vf silu(vf x) { return x / (vexp(-x) + 1.0f); }

INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}
INLINE float from_bf16(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// Rows enter a kernel in groups of up to MAX_ROWS, packed [in][rows of the group] so that one pointer reaches them all.
// A kernel adds one weight tile times one group to acc [rows][32]; `in` is even.

struct Float32 {
    using X = float;
    using W = float;

    // Writes n (even) inputs of row j of a group of `rows`, from input `at` (even) on.
    static INLINE void put(X* group, int rows, int j, int64_t at, const float* values, int64_t n) {
        if (rows == 1) {
            memcpy(group + at, values, n * sizeof(float));
            return;
        }
        X* out = group + at * rows + j;
        for (int64_t i = 0; i < n; ++i) out[i * rows] = values[i];
    }

    static float weight(const W* w, int64_t in, int64_t output, int64_t input) {
        return w[(output / TILE * in + input) * TILE + output % TILE];
    }

    template <int ROWS>
    static void kernel(const W* w, const X* x, int64_t in, float* acc) {
        for (int sub = 0; sub < TILE; sub += 2 * LANES) {
            vf a[ROWS][2];
            UNROLL for (int r = 0; r < ROWS; ++r) {
                a[r][0] = load(acc + r * TILE + sub);
                a[r][1] = load(acc + r * TILE + sub + LANES);
            }
            const float* wk = w + sub;
            const float* xk = x;
            for (int64_t k = 0; k < in; ++k, wk += TILE, xk += ROWS) {
                prefetch(reinterpret_cast<const char*>(wk) + PREFETCH);
                if (LANES == 16) prefetch(reinterpret_cast<const char*>(wk) + PREFETCH + 64);
                const vf w0 = load(wk), w1 = load(wk + LANES);
                UNROLL for (int r = 0; r < ROWS; ++r) {
                    const vf b = splat(xk[r]);
                    a[r][0] = fma(w0, b, a[r][0]);
                    a[r][1] = fma(w1, b, a[r][1]);
                }
            }
            UNROLL for (int r = 0; r < ROWS; ++r) {
                store(acc + r * TILE + sub, a[r][0]);
                store(acc + r * TILE + sub + LANES, a[r][1]);
            }
        }
    }
};

// Weights and inputs rounded to bfloat16, sums in fp32. Weights lie in pairs: [out / 32][in / 2][32][2].
struct BFloat16 {
    using W = uint16_t;
#if defined(__AVX512BF16__)
    using X = uint16_t;  // pairs too: [in / 2][rows][2]
#else
    using X = float;  // rounded values
#endif

    static INLINE void put(X* group, int rows, int j, int64_t at, const float* values, int64_t n) {
        constexpr int64_t BLOCK = 64;
        for (int64_t begin = 0; begin < n; begin += BLOCK) {
            const int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
            X rounded[BLOCK];
            for (int64_t i = 0; i < count; ++i) {
                const uint16_t half = to_bf16(values[begin + i]);
#if defined(__AVX512BF16__)
                rounded[i] = half;
            }
            X* out = group + (at + begin) * rows + 2 * j;
            for (int64_t i = 0; i < count; i += 2) memcpy(out + i * rows, rounded + i, 4);
#else
                rounded[i] = from_bf16(half);
            }
            X* out = group + (at + begin) * rows + j;
            for (int64_t i = 0; i < count; ++i) out[i * rows] = rounded[i];
#endif
        }
    }

    static float weight(const W* w, int64_t in, int64_t output, int64_t input) {
        return from_bf16(w[((output / TILE * in + (input & ~1)) * TILE) + output % TILE * 2 + (input & 1)]);
    }

    template <int ROWS>
    static void kernel(const W* w, const X* x, int64_t in, float* acc) {
        for (int sub = 0; sub < TILE; sub += 2 * LANES) {
            vf a[ROWS][2];
            UNROLL for (int r = 0; r < ROWS; ++r) {
                a[r][0] = load(acc + r * TILE + sub);
                a[r][1] = load(acc + r * TILE + sub + LANES);
            }
            const W* wk = w + sub * 2;
            const X* xk = x;
            for (int64_t k = 0; k < in; k += 2, wk += 2 * TILE, xk += 2 * ROWS) {
                prefetch(reinterpret_cast<const char*>(wk) + PREFETCH);
                if (LANES == 16) prefetch(reinterpret_cast<const char*>(wk) + PREFETCH + 64);
                multiply_pair<ROWS>(wk, xk, a);
            }
            UNROLL for (int r = 0; r < ROWS; ++r) {
                store(acc + r * TILE + sub, a[r][0]);
                store(acc + r * TILE + sub + LANES, a[r][1]);
            }
        }
    }

    template <int ROWS>
    static INLINE void multiply_pair(const W* wk, const X* xk, vf (&a)[ROWS][2]) {
#if defined(__AVX512BF16__)
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(wk), w1 = (__m512bh)_mm512_loadu_si512(wk + 2 * LANES);
        UNROLL for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            memcpy(&pair, xk + 2 * r, 4);
            const __m512bh b = (__m512bh)_mm512_set1_epi32(pair);
            a[r][0] = _mm512_dpbf16_ps(a[r][0], w0, b);
            a[r][1] = _mm512_dpbf16_ps(a[r][1], w1, b);
        }
#else
        vi w0, w1;
        memcpy(&w0, wk, sizeof w0);
        memcpy(&w1, wk + 2 * LANES, sizeof w1);
        const vi high = (vi)splat(0) + static_cast<int32_t>(0xffff0000);
        const vf even0 = (vf)(w0 << 16), odd0 = (vf)(w0 & high), even1 = (vf)(w1 << 16), odd1 = (vf)(w1 & high);
        UNROLL for (int r = 0; r < ROWS; ++r) {
            const vf even = splat(xk[r]), odd = splat(xk[ROWS + r]);
            a[r][0] = fma(odd0, odd, fma(even0, even, a[r][0]));
            a[r][1] = fma(odd1, odd, fma(even1, even, a[r][1]));
        }
#endif
    }
};

template <class F>
using Kernel = void (*)(const typename F::W*, const typename F::X*, int64_t, float*);

template <class F>
inline Kernel<F> kernel_for(int rows) {
    static const Kernel<F> kernels[] = {
        nullptr,
        F::template kernel<1>, F::template kernel<2>, F::template kernel<3>, F::template kernel<4>,
        F::template kernel<5>, F::template kernel<6>,
#if defined(__AVX512F__)
        F::template kernel<7>, F::template kernel<8>, F::template kernel<9>, F::template kernel<10>,
        F::template kernel<11>, F::template kernel<12>,
#endif
    };
    return kernels[rows];
}
