// In: packed weights, KV slots, the rows of a pass (C structs filled by native_rows.py). Out: logits and features; beside
// it the recursive drafter and single linear layers, for native_recursive_drafter.py and native_linear.py. The whole
// pass runs in one parallel region; residual stream, KV, softmax and logits are fp32. Plain C calls at the end.
#include "native_layer.h"
#include "native_recursive_head.h"

extern "C" {
struct Pass {
    const int64_t *ids, *slots, *positions, *parents, *logit_rows;  // parents: null where all rows lie in chains
    int64_t rows, num_logit_rows;
    float *logits, *features;  // features: null if nobody wants them
    int64_t* best;             // [num_logit_rows] the first of the highest logits
};
}

namespace {

// The highest logit of every row of a chunk among each thread's own tiles.
struct BestLogits {
    std::vector<float> scores;
    std::vector<int64_t> indices;

    explicit BestLogits(int threads) : scores(threads * CHUNK), indices(threads * CHUNK) {}

    void clear(int thread) { std::fill_n(scores.begin() + thread * CHUNK, CHUNK, -INFINITY); }
    void take(int thread, int64_t row, const float* sums, int64_t first, int64_t n) {
        float& score = scores[thread * CHUNK + row];
        bool higher = false;
        for (int64_t i = 0; i < n; ++i) higher |= sums[i] > score;
        if (!higher) return;
        for (int64_t i = 0; i < n; ++i)
            if (sums[i] > score) score = sums[i], indices[thread * CHUNK + row] = first + i;
    }
    // Over all threads; they have ascending tiles, and of equal logits the first counts.
    int64_t index(int64_t row, int threads) const {
        int64_t winner = row;
        for (int64_t at = row + CHUNK; at < threads * CHUNK; at += CHUNK)
            if (scores[at] > scores[winner]) winner = at;
        return indices[winner];
    }
};

// A pass on its way through the target, seen by one thread.
template <class F>
class TargetWalk : LayerWalk<F> {
    using Base = LayerWalk<F>;
    using typename Base::X;
    using Base::acc_, Base::hidden_, Base::m, Base::s, Base::thread_, Base::threads_;

public:
    TargetWalk(const Model& model, const Pass& pass, const Sight& sight, BestLogits& best, Barrier& barrier,
               float* workspace, int thread, int threads)
        : Base(model, barrier, workspace, thread, threads), p(pass), sight_(sight), best_(best) {}

    void run(int64_t first, int64_t rows) {
        const Groups groups(rows);
        float* features = p.features ? p.features + first * m.taps * m.width : nullptr;
        const Places places = sight_.places(p.slots, p.positions, first, features);
        embed(first, rows);
        this->wait();
        for (int64_t i = 0; i < m.num_layers; ++i) this->layer(m.layers[i], places, groups);
        head(first, rows);
        this->wait();
    }

private:
    void embed(int64_t first, int64_t rows) {
        const Range own = share(rows, thread_, threads_);
        using W = typename F::W;
        for (int64_t r = own.begin; r < own.end; ++r) {
            const int64_t id = p.ids[first + r];
            float* out = hidden_ + r * s.width;
            for (int64_t i = 0; i < m.width; ++i) {
                if (!m.embedding) out[i] = F::weight(static_cast<const W*>(m.head.weight), m.head.in, id, i);
                else if constexpr (sizeof(W) == 4) out[i] = static_cast<const W*>(m.embedding)[id * m.width + i];
                else out[i] = from_bf16(static_cast<const W*>(m.embedding)[id * m.width + i]);
            }
        }
    }

    void head(int64_t first, int64_t rows) {
        const int64_t* begin = std::lower_bound(p.logit_rows, p.logit_rows + p.num_logit_rows, first);
        const int64_t* end = std::lower_bound(begin, p.logit_rows + p.num_logit_rows, first + rows);
        const Groups groups(end - begin);
        if (!groups.rows) return;
        const X* x = this->normalise(m.final_norm, groups, [&](int64_t r) { return begin[r] - first; });
        float* logits = p.logits + (begin - p.logit_rows) * m.vocab;
        best_.clear(thread_);
        multiply<F>(m.head, x, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            const int64_t n = std::min<int64_t>(TILE, m.vocab - tile * TILE);
            memcpy(logits + r * m.vocab + tile * TILE, sums, n * sizeof(float));
            best_.take(thread_, r, sums, tile * TILE, n);
        });
        this->wait();
        const Range own = share(groups.rows, thread_, threads_);
        for (int64_t r = own.begin; r < own.end; ++r)
            p.best[begin - p.logit_rows + r] = best_.index(r, threads_);
    }

    const Pass& p;
    const Sight& sight_;
    BestLogits& best_;
};

template <class F>
void forward(const Model& model, const Pass& pass, float* workspace, int threads) {
    Barrier barrier;
    const Sight sight = pass.parents ? Sight::of_trees(pass.slots, pass.positions, pass.parents, pass.rows)
                                     : Sight::of_chains(pass.positions, pass.rows);
    BestLogits best(threads);
    auto body = [&](int thread) {
        TargetWalk<F> walk(model, pass, sight, best, barrier, workspace, thread, threads);
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

// As check_rows, and 5: a logit row that does not exist or is out of order.
int check(const Model& m, const Pass& p, int64_t* row) {
    const int wrong = check_rows(m, m.vocab, {p.ids, p.slots, p.positions, p.parents, p.rows}, row);
    if (wrong) return wrong;
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

// Entries from[0..count) of a slot become its entries to, to + 1, ...: those of a tree's accepted path. from ascends.
void draftloop_move_entries(const Model* model, int64_t slot, int64_t to, const int64_t* from, int64_t count) {
    const Model& m = *model;
    const Sizes sizes(m);
    for (int64_t lane = slot * m.kv_heads; lane < (slot + 1) * m.kv_heads; ++lane) {
        for (const Layer* layer = m.layers; layer < m.layers + m.num_layers; ++layer) {
            float* keys = layer->keys + lane * sizes.capacity * m.head_dim;
            float* values = layer->values + lane * sizes.capacity * sizes.padded_dim;
            const auto key_at = [&](int64_t e) { return keys + e / KEY_BLOCK * KEY_BLOCK * m.head_dim + e % KEY_BLOCK; };
            for (int64_t i = 0; i < count; ++i) {
                if (from[i] == to + i) continue;
                const float* key = key_at(from[i]);
                float* out = key_at(to + i);
                for (int64_t d = 0; d < m.head_dim; ++d) out[d * KEY_BLOCK] = key[d * KEY_BLOCK];
                memcpy(values + (to + i) * sizes.padded_dim, values + from[i] * sizes.padded_dim,
                       m.head_dim * sizeof(float));
            }
        }
    }
}

int64_t draftloop_linear_workspace_floats(const Linear* linear, int threads) {
    return CHUNK * linear->in + threads * (CHUNK * TILE + linear->in);
}

void draftloop_linear(const Linear* linear, int bf16, const float* x, int64_t width, int64_t rows, float* y,
                      float* workspace, int threads) {
    if (bf16) linear_rows<BFloat16>(*linear, x, width, rows, y, workspace, threads);
    else linear_rows<Float32>(*linear, x, width, rows, y, workspace, threads);
}

int64_t draftloop_draft_workspace_floats(const RecursiveHead* head, int threads) {
    return RecursiveWalk<Float32>::workspace_floats(*head, threads);
}

int draftloop_draft(const RecursiveHead* head, const DraftTask* task, float* workspace, int threads,
                    int64_t* bad_row) {
    const int wrong = check(*head, *task, bad_row);
    if (wrong || !task->pairs) return wrong;
    if (head->model.bf16) draft<BFloat16>(*head, *task, workspace, threads);
    else draft<Float32>(*head, *task, workspace, threads);
    return 0;
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
