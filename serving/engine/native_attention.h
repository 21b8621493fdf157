// In: the queries of a few heads that share one row and one KV head, that KV head's slot, and the entries that the row
// sees. Out: their attention. Keys lie as [max_len / 16][head_dim][16], values as [max_len][head_dim rounded up to 16].
// A head's sums run over dimensions, then over keys in the order of their positions, wherever these lie: they depend on
// the row's position only, and a row of a tree gets the same bits as in a chain.
#pragma once
#include "native_kernels.h"

constexpr int KEY_BLOCK = 16;

// scores[h][key] = query[h] . key for UNITS vectors of keys, starting at key `first` (a multiple of LANES).
template <int HEADS, int UNITS>
INLINE void score_keys(const float* queries, const float* keys, int64_t dim, int64_t first, float* scores,
                       int64_t stride) {
    vf sum[HEADS][UNITS] = {};
    const float* unit[UNITS];
    for (int u = 0; u < UNITS; ++u) {
        const int64_t key = first + u * LANES;
        unit[u] = keys + key / KEY_BLOCK * KEY_BLOCK * dim + key % KEY_BLOCK;
    }
    for (int64_t d = 0; d < dim; ++d) {
        vf k[UNITS];
        UNROLL for (int u = 0; u < UNITS; ++u) k[u] = load(unit[u] + d * KEY_BLOCK);
        UNROLL for (int h = 0; h < HEADS; ++h) {
            const vf q = splat(queries[h * dim + d]);
            UNROLL for (int u = 0; u < UNITS; ++u) sum[h][u] = fma(q, k[u], sum[h][u]);
        }
    }
    UNROLL for (int h = 0; h < HEADS; ++h) {
        UNROLL for (int u = 0; u < UNITS; ++u) store(scores + h * stride + first + u * LANES, sum[h][u]);
    }
}

// scores[h] = query[h] . key for one key, summed as in score_keys.
template <int HEADS>
INLINE void score_key(const float* queries, const float* keys, int64_t dim, int64_t key, float* scores,
                      int64_t stride) {
    vf sum[HEADS] = {};
    const float* unit = keys + key / KEY_BLOCK * KEY_BLOCK * dim + key % KEY_BLOCK / LANES * LANES;
    for (int64_t d = 0; d < dim; ++d) {
        const vf k = load(unit + d * KEY_BLOCK);
        UNROLL for (int h = 0; h < HEADS; ++h) sum[h] = fma(splat(queries[h * dim + d]), k, sum[h]);
    }
    UNROLL for (int h = 0; h < HEADS; ++h) scores[h * stride] = sum[h][key % LANES];
}

// Turns scores of `count` keys into exp(score - max), zero after `count`; returns their sum.
inline float exponentiate(float* scores, int64_t count) {
    float last[LANES];
    const int64_t whole = count / LANES * LANES;
    for (int64_t i = whole; i < whole + LANES; ++i) last[i - whole] = i < count ? scores[i] : -INFINITY;
    vf top = load(last);
    for (int64_t i = 0; i < whole; i += LANES) {
        const vf s = load(scores + i);
        top = s > top ? s : top;
    }
    float max = top[0];
    for (int i = 1; i < LANES; ++i) max = top[i] > max ? top[i] : max;
    vf sum = splat(0.0f);
    for (int64_t i = 0; i < whole; i += LANES) {
        const vf e = vexp(load(scores + i) - max);
        store(scores + i, e);
        sum += e;
    }
    if (whole < count) {
        store(last, vexp(load(last) - max));
        for (int64_t i = whole; i < whole + LANES; ++i) scores[i] = i < count ? last[i - whole] : 0.0f;
        sum += load(scores + whole);
    }
    return sum_lanes(sum);
}

// What a row sees of its slot, by position: the first `prefix` entries, then those that `tail` lists.
struct Seen {
    int64_t prefix;
    const int64_t* tail;
    int64_t tail_count;
    int64_t count() const { return prefix + tail_count; }
};

template <int HEADS, int VECTORS>
INLINE void add_value(const float* weights, int64_t stride, const float* value, vf (&sum)[HEADS][VECTORS]) {
    vf v[VECTORS];
    UNROLL for (int i = 0; i < VECTORS; ++i) v[i] = load(value + i * LANES);
    UNROLL for (int h = 0; h < HEADS; ++h) {
        const vf w = splat(weights[h * stride]);
        UNROLL for (int i = 0; i < VECTORS; ++i) sum[h][i] = fma(w, v[i], sum[h][i]);
    }
}

// out[h][d] = sum over seen keys of weight[h][key] * value[key][d] for VECTORS vectors of dimensions.
template <int HEADS, int VECTORS>
INLINE void add_values(const float* weights, int64_t stride, const float* values, int64_t padded_dim, const Seen& seen,
                       float* out) {
    vf sum[HEADS][VECTORS] = {};
    const float* value = values;
    for (int64_t k = 0; k < seen.prefix; ++k, value += padded_dim) add_value(weights + k, stride, value, sum);
    for (int64_t t = 0; t < seen.tail_count; ++t)
        add_value(weights + seen.prefix + t, stride, values + seen.tail[t] * padded_dim, sum);
    UNROLL for (int h = 0; h < HEADS; ++h) {
        UNROLL for (int i = 0; i < VECTORS; ++i) store(out + h * padded_dim + i * LANES, sum[h][i]);
    }
}

struct AttentionShape {
    int64_t dim, padded_dim, score_stride;
};

// queries [HEADS][dim], already scaled; out [HEADS][padded_dim]; scores: scratch [HEADS][score_stride].
template <int HEADS>
void attend(const AttentionShape& shape, const float* queries, const float* keys, const float* values,
            const Seen& seen, float* scores, float* out) {
    constexpr int UNITS = HEADS == 1 ? 4 : 2;
    const int64_t units = (seen.prefix + LANES - 1) / LANES;
    int64_t unit = 0;
    for (; unit + UNITS <= units; unit += UNITS)
        score_keys<HEADS, UNITS>(queries, keys, shape.dim, unit * LANES, scores, shape.score_stride);
    for (; unit < units; ++unit)
        score_keys<HEADS, 1>(queries, keys, shape.dim, unit * LANES, scores, shape.score_stride);
    for (int64_t t = 0; t < seen.tail_count; ++t)  // after the prefix, whose last vector may reach past it
        score_key<HEADS>(queries, keys, shape.dim, seen.tail[t], scores + seen.prefix + t, shape.score_stride);
    float sums[HEADS];
    for (int h = 0; h < HEADS; ++h) sums[h] = exponentiate(scores + h * shape.score_stride, seen.count());
    int64_t d = 0;
    for (; d + 4 * LANES <= shape.padded_dim; d += 4 * LANES)
        add_values<HEADS, 4>(scores, shape.score_stride, values + d, shape.padded_dim, seen, out + d);
    for (; d < shape.padded_dim; d += LANES)
        add_values<HEADS, 1>(scores, shape.score_stride, values + d, shape.padded_dim, seen, out + d);
    for (int h = 0; h < HEADS; ++h)
        for (int64_t i = 0; i < shape.dim; ++i) out[h * shape.padded_dim + i] /= sums[h];
}

inline void attend_heads(int heads, const AttentionShape& shape, const float* queries, const float* keys,
                         const float* values, const Seen& seen, float* scores, float* out) {
    switch (heads) {
        case 1: return attend<1>(shape, queries, keys, values, seen, scores, out);
        case 2: return attend<2>(shape, queries, keys, values, seen, scores, out);
        case 3: return attend<3>(shape, queries, keys, values, seen, scores, out);
        default: return attend<4>(shape, queries, keys, values, seen, scores, out);
    }
}
