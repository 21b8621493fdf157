// In: packed weights, KV slots, the rows of a pass (C structs filled by native_rows.py). Out: logits and features. The
// whole pass runs in one parallel region; residual stream, KV, softmax and logits are fp32. Plain C calls at the end.
#include <algorithm>
#include <vector>

#include "native_attention.h"
#include "native_threads.h"

extern "C" {
struct Linear {
    const void* weight;  // packed, see native_kernels.h
    const float* bias;   // [out rounded up to 32] or null
    int64_t in, out;     // in is even
};
struct Layer {
    Linear qkv, o, gate_up, down;  // a gate_up tile: 16 gates, then their 16 ups
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
    float *keys, *values;
    int64_t tap;  // index among the taps, or -1
};
struct Model {
    const Layer* layers;
    int64_t num_layers, width, heads, kv_heads, head_dim, vocab, num_slots, max_len, taps;
    const void* embedding;  // [vocab][width]; null: tied, read from `head`
    Linear head;
    const float *final_norm, *cos, *sin;  // cos, sin: [max_len][head_dim / 2]
    float eps;
    int32_t bf16;
};
struct Pass {
    const int64_t *ids, *slots, *positions, *logit_rows;
    int64_t rows, num_logit_rows;
    float *logits, *features;
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

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    vf squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float sum = sum_lanes(squares);
    for (; i < n; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
    for (i = 0; i < n; ++i) out[i] = weight[i] * (x[i] * scale);
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

struct Sizes {
    int64_t width, in, qkv, attention, mlp, widest, padded_dim, capacity;
    explicit Sizes(const Model& m) {
        width = round_up(m.width, TILE);
        in = round_up(m.width, 2);
        qkv = round_up((m.heads + 2 * m.kv_heads) * m.head_dim, TILE);
        attention = m.heads * m.head_dim;
        mlp = m.num_layers ? m.layers[0].down.in : 0;
        widest = std::max({width, attention, mlp});
        padded_dim = round_up(m.head_dim, KEY_BLOCK);
        capacity = round_up(m.max_len, KEY_BLOCK);
    }
    int64_t shared_floats() const { return round_up(CHUNK * (width + qkv + in + attention + mlp) + 64, 16); }
    int64_t thread_floats(const Model& m) const {
        return round_up(CHUNK * TILE + widest + in + MAX_HEADS * (m.head_dim + padded_dim + capacity + LANES), 16);
    }
};

// One chunk of rows on its way through the layers, seen by one thread.
template <class F>
class Walk {
    using X = typename F::X;

public:
    Walk(const Model& model, const Pass& pass, Barrier& barrier, float* workspace, int thread, int threads)
        : m(model), p(pass), s(model), barrier_(barrier), thread_(thread), threads_(threads) {
        hidden_ = workspace;
        qkv_ = hidden_ + CHUNK * s.width;
        x_shared_ = reinterpret_cast<X*>(qkv_ + CHUNK * s.qkv);
        attention_ = reinterpret_cast<X*>(qkv_ + CHUNK * (s.qkv + s.in));
        mlp_ = reinterpret_cast<X*>(qkv_ + CHUNK * (s.qkv + s.in + s.attention));
        acc_ = workspace + s.shared_floats() + thread * s.thread_floats(m);
        row_ = acc_ + CHUNK * TILE;
        x_own_ = reinterpret_cast<X*>(row_ + s.widest);
        queries_ = row_ + s.widest + s.in;
        heads_out_ = queries_ + MAX_HEADS * m.head_dim;
        scores_ = heads_out_ + MAX_HEADS * s.padded_dim;
    }

    void run(int64_t first, int64_t rows) {
        first_ = first;
        rows_ = rows;
        const Groups groups(rows);
        embed();
        wait();
        for (int64_t i = 0; i < m.num_layers; ++i) layer(m.layers[i], groups);
        head();
        wait();
    }

private:
    void wait() { barrier_.wait(threads_); }

    void embed() {
        const Range rows = share(rows_, thread_, threads_);
        using W = typename F::W;
        for (int64_t r = rows.begin; r < rows.end; ++r) {
            const int64_t id = p.ids[first_ + r];
            float* out = hidden_ + r * s.width;
            for (int64_t i = 0; i < m.width; ++i) {
                if (!m.embedding) out[i] = F::weight(static_cast<const W*>(m.head.weight), m.head.in, id, i);
                else if constexpr (sizeof(W) == 4) out[i] = static_cast<const W*>(m.embedding)[id * m.width + i];
                else out[i] = from_bf16(static_cast<const W*>(m.embedding)[id * m.width + i]);
            }
        }
    }

    // Normalised rows, packed for a kernel. A single row is cheaper to do again in every thread than to wait for.
    template <class RowOf>
    const X* normalise(const float* weight, const Groups& groups, RowOf row_of) {
        const bool alone = groups.rows == 1;
        X* x = alone ? x_own_ : x_shared_;
        const Range rows = alone ? Range{0, 1} : share(groups.rows, thread_, threads_);
        for (int64_t r = rows.begin; r < rows.end; ++r) {
            rms_norm(hidden_ + row_of(r) * s.width, weight, m.width, m.eps, row_);
            if (s.in != m.width) row_[m.width] = 0.0f;
            put<F>(x, groups, r, s.in, 0, row_, s.in);
        }
        if (!alone) wait();
        return x;
    }

    void layer(const Layer& layer, const Groups& groups) {
        const auto same = [](int64_t r) { return r; };
        const X* x = normalise(layer.attention_norm, groups, same);
        multiply<F>(layer.qkv, x, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            memcpy(qkv_ + r * s.qkv + tile * TILE, sums, TILE * sizeof(float));
        });
        wait();
        write_keys_and_values(layer);
        wait();
        attention(layer, groups);
        wait();
        const auto add = [&](int64_t tile, int64_t r, const float* sums) { add_to_hidden(tile, r, sums); };
        multiply<F>(layer.o, attention_, groups, acc_, thread_, threads_, add);
        wait();
        x = normalise(layer.mlp_norm, groups, same);
        multiply<F>(layer.gate_up, x, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            float act[TILE / 2];
            for (int i = 0; i < TILE / 2; i += LANES) store(act + i, silu(load(sums + i)) * load(sums + TILE / 2 + i));
            put<F>(mlp_, groups, r, s.mlp, tile * (TILE / 2), act, TILE / 2);
        });
        wait();
        multiply<F>(layer.down, mlp_, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            add_to_hidden(tile, r, sums);
            if (layer.tap < 0) return;
            const int64_t n = std::min<int64_t>(TILE, m.width - tile * TILE);
            float* out = p.features + ((first_ + r) * m.taps + layer.tap) * m.width + tile * TILE;
            memcpy(out, hidden_ + r * s.width + tile * TILE, n * sizeof(float));
        });
        wait();
    }

    void add_to_hidden(int64_t tile, int64_t r, const float* sums) {
        float* out = hidden_ + r * s.width + tile * TILE;
        for (int i = 0; i < TILE; ++i) out[i] += sums[i];
    }

    void norm_and_rotate(const float* head, const float* norm, int64_t position, float* out) {
        if (norm) rms_norm(head, norm, m.head_dim, m.eps, out);
        else memcpy(out, head, m.head_dim * sizeof(float));
        const int64_t half = m.head_dim / 2;
        rotate(out, m.cos + position * half, m.sin + position * half, half);
    }

    void write_keys_and_values(const Layer& layer) {
        const Range units = share(rows_ * m.kv_heads, thread_, threads_);
        for (int64_t unit = units.begin; unit < units.end; ++unit) {
            const int64_t r = unit / m.kv_heads, kv = unit % m.kv_heads;
            const int64_t position = p.positions[first_ + r], lane = p.slots[first_ + r] * m.kv_heads + kv;
            const float* key = qkv_ + r * s.qkv + (m.heads + kv) * m.head_dim;
            norm_and_rotate(key, layer.k_norm, position, queries_);
            const int64_t block = (lane * s.capacity + position / KEY_BLOCK * KEY_BLOCK) * m.head_dim;
            float* out = layer.keys + block + position % KEY_BLOCK;
            for (int64_t d = 0; d < m.head_dim; ++d) out[d * KEY_BLOCK] = queries_[d];
            const float* value = key + m.kv_heads * m.head_dim;
            memcpy(layer.values + (lane * s.capacity + position) * s.padded_dim, value, m.head_dim * sizeof(float));
        }
    }

    // Heads of rows in order, cut where each thread's part costs the same; a row costs about its position.
    int64_t attention_share(int thread) const {
        const auto cost = [&](int64_t r) { return (p.positions[first_ + r] + 32) * m.heads; };
        int64_t total = 0;
        for (int64_t r = 0; r < rows_; ++r) total += cost(r);
        int64_t wanted = total * thread / threads_;
        for (int64_t r = 0; r < rows_; ++r) {
            if (wanted < cost(r)) return r * m.heads + wanted * m.heads / cost(r);
            wanted -= cost(r);
        }
        return rows_ * m.heads;
    }

    void attention(const Layer& layer, const Groups& groups) {
        const AttentionShape shape{m.head_dim, s.padded_dim, s.capacity + LANES};
        const float scale = 1.0f / std::sqrt(static_cast<float>(m.head_dim));
        const int64_t per_kv = m.heads / m.kv_heads, end = attention_share(thread_ + 1);
        for (int64_t unit = attention_share(thread_); unit < end;) {
            const int64_t r = unit / m.heads, head = unit % m.heads, kv = head / per_kv;
            const int64_t n = std::min({static_cast<int64_t>(MAX_HEADS), end - unit, (kv + 1) * per_kv - head});
            const int64_t position = p.positions[first_ + r], lane = p.slots[first_ + r] * m.kv_heads + kv;
            for (int64_t h = 0; h < n; ++h) {
                float* query = queries_ + h * m.head_dim;
                norm_and_rotate(qkv_ + r * s.qkv + (head + h) * m.head_dim, layer.q_norm, position, query);
                for (int64_t d = 0; d < m.head_dim; ++d) query[d] *= scale;
            }
            attend_heads(static_cast<int>(n), shape, queries_, layer.keys + lane * s.capacity * m.head_dim,
                         layer.values + lane * s.capacity * s.padded_dim, position + 1, scores_, heads_out_);
            for (int64_t h = 0; h < n; ++h) {
                const float* out = heads_out_ + h * s.padded_dim;
                put<F>(attention_, groups, r, s.attention, (head + h) * m.head_dim, out, m.head_dim);
            }
            unit += n;
        }
    }

    void head() {
        const int64_t* begin = std::lower_bound(p.logit_rows, p.logit_rows + p.num_logit_rows, first_);
        const int64_t* end = std::lower_bound(begin, p.logit_rows + p.num_logit_rows, first_ + rows_);
        const Groups groups(end - begin);
        if (!groups.rows) return;
        const X* x = normalise(m.final_norm, groups, [&](int64_t r) { return begin[r] - first_; });
        float* logits = p.logits + (begin - p.logit_rows) * m.vocab;
        multiply<F>(m.head, x, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            const int64_t n = std::min<int64_t>(TILE, m.vocab - tile * TILE);
            memcpy(logits + r * m.vocab + tile * TILE, sums, n * sizeof(float));
        });
    }

    const Model& m;
    const Pass& p;
    const Sizes s;
    Barrier& barrier_;
    int thread_, threads_;
    int64_t first_ = 0, rows_ = 0;
    float *hidden_, *qkv_, *acc_, *row_, *queries_, *heads_out_, *scores_;
    X *x_shared_, *x_own_, *attention_, *mlp_;
};

template <class F>
void forward(const Model& model, const Pass& pass, float* workspace, int threads) {
    Barrier barrier;
    auto body = [&](int thread) {
        Walk<F> walk(model, pass, barrier, workspace, thread, threads);
        for (int64_t first = 0; first < pass.rows; first += CHUNK) walk.run(first, std::min(CHUNK, pass.rows - first));
    };
    run_on_threads(threads, body);
}

template <class F>
void linear_rows(const Linear& linear, const float* x, int64_t width, int64_t rows, float* y, float* workspace,
                 int threads) {
    using X = typename F::X;
    Barrier barrier;
    auto body = [&](int thread) {
        auto* packed = reinterpret_cast<X*>(workspace);
        float* acc = workspace + CHUNK * linear.in + thread * (CHUNK * TILE + linear.in);
        float* row = acc + CHUNK * TILE;
        for (int64_t first = 0; first < rows; first += CHUNK) {
            const Groups groups(std::min(CHUNK, rows - first));
            const Range own = share(groups.rows, thread, threads);
            for (int64_t r = own.begin; r < own.end; ++r) {
                memcpy(row, x + (first + r) * width, width * sizeof(float));
                if (width != linear.in) row[width] = 0.0f;
                put<F>(packed, groups, r, linear.in, 0, row, linear.in);
            }
            barrier.wait(threads);
            multiply<F>(linear, packed, groups, acc, thread, threads, [&](int64_t tile, int64_t r, const float* sums) {
                const int64_t n = std::min<int64_t>(TILE, linear.out - tile * TILE);
                memcpy(y + (first + r) * linear.out + tile * TILE, sums, n * sizeof(float));
            });
            barrier.wait(threads);
        }
    };
    run_on_threads(threads, body);
}

// 0, or what is wrong: 1 token id, 2 slot, 3 position, 4 a slot's rows apart or not ascending by one, 5 logit row.
int check(const Model& m, const Pass& p, int64_t* row) {
    std::vector<char> seen(m.num_slots, 0);
    for (int64_t r = 0; r < p.rows; ++r) {
        *row = r;
        if (p.ids[r] < 0 || p.ids[r] >= m.vocab) return 1;
        if (p.slots[r] < 0 || p.slots[r] >= m.num_slots) return 2;
        if (p.positions[r] < 0 || p.positions[r] >= m.max_len) return 3;
        const bool follows = r > 0 && p.slots[r] == p.slots[r - 1];
        if (follows ? p.positions[r] != p.positions[r - 1] + 1 : seen[p.slots[r]]) return 4;
        seen[p.slots[r]] = 1;
    }
    for (int64_t i = 0; i < p.num_logit_rows; ++i) {
        *row = i;
        if (p.logit_rows[i] < (i ? p.logit_rows[i - 1] + 1 : 0) || p.logit_rows[i] >= p.rows) return 5;
    }
    return 0;
}

}  // namespace

// All else is hidden: two levels of the library in one process must not share a template's statics.
#pragma GCC visibility push(default)
extern "C" {

int64_t draftloop_workspace_floats(const Model* model, int threads) {
    const Sizes sizes(*model);
    return sizes.shared_floats() + threads * sizes.thread_floats(*model);
}

int draftloop_forward(const Model* model, const Pass* pass, float* workspace, int threads, int64_t* bad_row) {
    const int wrong = check(*model, *pass, bad_row);
    if (wrong || !pass->rows) return wrong;
    if (model->bf16) forward<BFloat16>(*model, *pass, workspace, threads);
    else forward<Float32>(*model, *pass, workspace, threads);
    return 0;
}

int64_t draftloop_linear_workspace_floats(const Linear* linear, int threads) {
    return CHUNK * linear->in + threads * (CHUNK * TILE + linear->in);
}

void draftloop_linear(const Linear* linear, int bf16, const float* x, int64_t width, int64_t rows, float* y,
                      float* workspace, int threads) {
    if (bf16) linear_rows<BFloat16>(*linear, x, width, rows, y, workspace, threads);
    else linear_rows<Float32>(*linear, x, width, rows, y, workspace, threads);
}

// What the compiler made of this machine: "avx512bf16", "avx512", "avx2" or "portable".
const char* draftloop_isa() {
#if defined(__AVX512BF16__)
    return "avx512bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "portable";
#endif
}

}
#pragma GCC visibility pop
