// In: rows of the residual stream and one decoder layer. Out: the rows after it, their keys and values in the slots.
// The parts that the target's forward and the recursive drafter share, each run by all threads together.
#pragma once
#include <vector>

#include "native_attention.h"
#include "native_linear.h"
#include "native_threads.h"

extern "C" {
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
}

namespace {

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

// Where the rows of a chunk belong, what they see of their slots, and where the tapped layers' outputs go.
struct Places {
    const int64_t *slots, *positions, *entries;  // entries: where in its slot a row's key and value lie
    const Seen* seen;
    float* features;  // [rows][taps * width]; null: not wanted
};

// Entries of a pass's rows, and what each of them sees. In a chain both follow from the position.
struct Sight {
    std::vector<int64_t> entries, tails;
    std::vector<Seen> seen;

    Places places(const int64_t* slots, const int64_t* positions, int64_t first, float* features) const {
        return {slots + first, positions + first, entries.data() + first, seen.data() + first, features};
    }

    static Sight of_chains(const int64_t* positions, int64_t rows) {
        Sight sight;
        for (int64_t r = 0; r < rows; ++r) sight.add(positions[r], positions[r] + 1);
        return sight;
    }

    // A row at `entry` that sees the first `prefix` entries and those of `tail`. Call `settle` after the last.
    void add(int64_t entry, int64_t prefix, const std::vector<int64_t>& tail) {
        add(entry, prefix);
        seen.back().tail_count = static_cast<int64_t>(tail.size());
        tails.insert(tails.end(), tail.begin(), tail.end());
    }
    void settle() {
        const int64_t* tail = tails.data();
        for (Seen& row : seen) {
            row.tail = tail;
            tail += row.tail_count;
        }
    }

    // Rows of a slot lie together; parents[r] is the row that r follows, or -1 for the slot's cached entries.
    static Sight of_trees(const int64_t* slots, const int64_t* positions, const int64_t* parents, int64_t rows) {
        Sight sight;
        std::vector<int64_t> path;
        for (int64_t r = 0, first = 0; r < rows; ++r) {
            if (r && slots[r] != slots[r - 1]) first = r;
            const int64_t base = positions[first];
            if (positions[r] == base + r - first) {  // all rows before it are on its path: a chain
                sight.add(positions[r], positions[r] + 1);
                continue;
            }
            path.clear();
            for (int64_t row = r; row >= 0; row = parents[row]) path.push_back(base + row - first);
            std::reverse(path.begin(), path.end());
            sight.add(base + r - first, base, path);
        }
        sight.settle();
        return sight;
    }

private:
    void add(int64_t entry, int64_t prefix) {
        entries.push_back(entry);
        seen.push_back({prefix, nullptr, 0});
    }
};

// One thread's view of a chunk of rows. Its methods are called by all threads in the same order.
template <class F>
class LayerWalk {
protected:
    using X = typename F::X;

    LayerWalk(const Model& model, Barrier& barrier, float* workspace, int thread, int threads)
        : m(model), s(model), thread_(thread), threads_(threads), barrier_(barrier) {
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

    void wait() { barrier_.wait(threads_); }

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

    void layer(const Layer& layer, const Places& places, const Groups& groups) {
        const auto same = [](int64_t r) { return r; };
        const X* x = normalise(layer.attention_norm, groups, same);
        multiply<F>(layer.qkv, x, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            memcpy(qkv_ + r * s.qkv + tile * TILE, sums, TILE * sizeof(float));
        });
        wait();
        write_keys_and_values(layer, places, groups.rows);
        wait();
        attention(layer, places, groups);
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
            if (layer.tap < 0 || !places.features) return;
            const int64_t n = std::min<int64_t>(TILE, m.width - tile * TILE);
            float* out = places.features + (r * m.taps + layer.tap) * m.width + tile * TILE;
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

    void write_keys_and_values(const Layer& layer, const Places& places, int64_t rows) {
        const Range units = share(rows * m.kv_heads, thread_, threads_);
        for (int64_t unit = units.begin; unit < units.end; ++unit) {
            const int64_t r = unit / m.kv_heads, kv = unit % m.kv_heads;
            const int64_t position = places.positions[r], entry = places.entries[r];
            const int64_t lane = places.slots[r] * m.kv_heads + kv;
            const float* key = qkv_ + r * s.qkv + (m.heads + kv) * m.head_dim;
            norm_and_rotate(key, layer.k_norm, position, queries_);
            const int64_t block = (lane * s.capacity + entry / KEY_BLOCK * KEY_BLOCK) * m.head_dim;
            float* out = layer.keys + block + entry % KEY_BLOCK;
            for (int64_t d = 0; d < m.head_dim; ++d) out[d * KEY_BLOCK] = queries_[d];
            const float* value = key + m.kv_heads * m.head_dim;
            memcpy(layer.values + (lane * s.capacity + entry) * s.padded_dim, value, m.head_dim * sizeof(float));
        }
    }

    // Heads of rows in order, cut where each thread's part costs the same; a row costs about its position.
    int64_t first_head(const Places& places, int64_t rows, int thread) const {
        const auto cost = [&](int64_t r) { return (places.positions[r] + 32) * m.heads; };
        int64_t total = 0;
        for (int64_t r = 0; r < rows; ++r) total += cost(r);
        int64_t wanted = total * thread / threads_;
        for (int64_t r = 0; r < rows; ++r) {
            if (wanted < cost(r)) return r * m.heads + wanted * m.heads / cost(r);
            wanted -= cost(r);
        }
        return rows * m.heads;
    }

    void attention(const Layer& layer, const Places& places, const Groups& groups) {
        const AttentionShape shape{m.head_dim, s.padded_dim, s.capacity + LANES};
        const float scale = 1.0f / std::sqrt(static_cast<float>(m.head_dim));
        const int64_t per_kv = m.heads / m.kv_heads, end = first_head(places, groups.rows, thread_ + 1);
        for (int64_t unit = first_head(places, groups.rows, thread_); unit < end;) {
            const int64_t r = unit / m.heads, head = unit % m.heads, kv = head / per_kv;
            const int64_t n = std::min({static_cast<int64_t>(MAX_HEADS), end - unit, (kv + 1) * per_kv - head});
            const int64_t position = places.positions[r], lane = places.slots[r] * m.kv_heads + kv;
            for (int64_t h = 0; h < n; ++h) {
                float* query = queries_ + h * m.head_dim;
                norm_and_rotate(qkv_ + r * s.qkv + (head + h) * m.head_dim, layer.q_norm, position, query);
                for (int64_t d = 0; d < m.head_dim; ++d) query[d] *= scale;
            }
            attend_heads(static_cast<int>(n), shape, queries_, layer.keys + lane * s.capacity * m.head_dim,
                         layer.values + lane * s.capacity * s.padded_dim, places.seen[r], scores_, heads_out_);
            for (int64_t h = 0; h < n; ++h) {
                const float* out = heads_out_ + h * s.padded_dim;
                put<F>(attention_, groups, r, s.attention, (head + h) * m.head_dim, out, m.head_dim);
            }
            unit += n;
        }
    }

    const Model& m;
    const Sizes s;
    const int thread_, threads_;
    float *hidden_, *acc_, *row_;  // hidden_ [CHUNK][s.width]: the residual stream, shared; acc_, row_: this thread's

private:
    Barrier& barrier_;
    float *qkv_, *queries_, *heads_out_, *scores_;
    X *x_shared_, *x_own_, *attention_, *mlp_;
};

// Rows of a pass as they come from Python. parents: the row that each one follows, -1 where a slot's rows begin; null
// where each follows the one before it.
struct GivenRows {
    const int64_t *ids, *slots, *positions, *parents;
    int64_t rows;
};

// 0, or what is wrong with row *row: 1 token id, 2 slot, 3 position, 4 a slot's rows apart, or not one past the row they
// follow.
inline int check_rows(const Model& m, int64_t tokens, const GivenRows& given, int64_t* row) {
    std::vector<char> seen(m.num_slots, 0);
    for (int64_t r = 0, first = 0; r < given.rows; ++r) {
        const int64_t slot = given.slots[r], position = given.positions[r];
        *row = r;
        if (given.ids[r] < 0 || given.ids[r] >= tokens) return 1;
        if (slot < 0 || slot >= m.num_slots) return 2;
        const bool begins = r == 0 || slot != given.slots[r - 1];
        if (begins) first = r;
        const int64_t entry = given.positions[first] + r - first;
        if (position < 0 || position >= m.max_len || entry >= m.max_len) return 3;
        const int64_t parent = begins ? -1 : given.parents ? given.parents[r] : r - 1;
        if (begins && (seen[slot] || (given.parents && given.parents[r] != -1))) return 4;
        if (!begins && (parent < first || parent >= r || position != given.positions[parent] + 1)) return 4;
        seen[slot] = 1;
    }
    return 0;
}

}  // namespace
