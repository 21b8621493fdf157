// In: new pairs (features at p, token at p + 1) of B sequences. Out: K drafts, or a tree of them, for each. The
// recursive MTP head of drafters/mtp.py in one parallel region: step 1 over the pairs, then K - 1 steps over its output.
#pragma once
#include "native_draft_tree.h"
#include "native_layer.h"

extern "C" {
struct RecursiveHead {
    Model model;                 // one layer; its `head` and `vocab` are those of the draft vocabulary
    Linear fuse, enter;          // taps * width -> width; [embedding ; hidden] -> width
    const float *tap_norm, *embedding_norm, *hidden_norm;  // tap_norm: [taps][width]
    const float* embedding;      // [num_tokens][width], the target's
    const int64_t* token_of;     // [vocab]: the target's id of every token that can be drafted
    int64_t taps, num_tokens;
};
struct DraftTask {
    const int64_t *ids, *slots, *positions;  // of the pairs: the token at p + 1, its slot, p
    const float* features;                   // [pairs][taps * width], of position p
    int64_t pairs, sequences, steps;         // a sequence's pairs lie together, the newest last
    int64_t nodes;                           // most nodes of a sequence's tree of depth `steps`; 0: chains
    int64_t* drafts;                         // [sequences][steps, or nodes]
    int64_t *parents, *counts;               // of trees: [sequences][nodes], [sequences]
    float* confidences;                      // [sequences][nodes]
};
}

namespace {

// What all threads share about a draft.
struct DraftState {
    std::vector<int64_t> newest;  // [sequences], row of each sequence's newest pair
    std::vector<int64_t> tokens;  // [sequences], drafted by a chain's last step
    Sight pairs;
    // Of the rows of a step:
    std::vector<int64_t> ids, slots, positions, sources;  // sources: rows of the last step, whose outputs they carry on
    Sight sight;
    std::vector<DraftTree> trees;
    std::vector<int64_t> expanded;  // nodes of each tree that have been rows
    std::vector<Candidate> candidates;

    explicit DraftState(const DraftTask& task) : pairs(Sight::of_chains(task.positions, task.pairs)) {
        for (int64_t r = 0; r < task.pairs; ++r)
            if (r + 1 == task.pairs || task.slots[r] != task.slots[r + 1]) newest.push_back(r);
        tokens.resize(newest.size());
    }

    // Rows of step k + 1 of chains: one for every sequence of `first`, ..., first + count - 1.
    void set_chain_rows(const DraftTask& task, int64_t first, int64_t count, int64_t k) {
        slots.clear(), positions.clear();
        for (int64_t b = first; b < first + count; ++b) {
            slots.push_back(task.slots[newest[b]]);
            positions.push_back(task.positions[newest[b]] + k);
        }
        sight = Sight::of_chains(positions.data(), count);
    }

    void start_trees(const DraftTask& task, int64_t count, int64_t children) {
        trees.assign(count, DraftTree(task.nodes));
        expanded.assign(count, 0);
        candidates.resize(count * MAX_FRONTIER * children);
    }

    // Take the candidates of the last step's rows over into the trees; the rows of the next step are their frontiers.
    void grow(const DraftTask& task, int64_t first, int64_t children, const int64_t* token_of) {
        ids.clear(), slots.clear(), positions.clear(), sources.clear();
        sight = Sight();
        int64_t row = 0;
        for (size_t b = 0; b < trees.size(); ++b) {
            DraftTree& tree = trees[b];
            const std::vector<int64_t> parents = tree.frontier;
            tree.extend(candidates.data() + row * children, children, token_of);
            const int64_t pair = newest[first + b], base = task.positions[pair] + 1;
            for (const int64_t node : tree.frontier) {
                TreeNode& n = tree.nodes[node];
                n.entry = base + expanded[b]++;
                ids.push_back(n.token);
                slots.push_back(task.slots[pair]);
                positions.push_back(base - 1 + n.depth);
                sources.push_back(row + (std::find(parents.begin(), parents.end(), n.parent) - parents.begin()));
                std::vector<int64_t> path;
                for (int64_t up = node; up != TREE_ROOT; up = tree.nodes[up].parent) path.push_back(tree.nodes[up].entry);
                std::reverse(path.begin(), path.end());
                sight.add(n.entry, base, path);
            }
            row += static_cast<int64_t>(parents.size());
        }
        sight.settle();
    }
};

template <class F>
class RecursiveWalk : LayerWalk<F> {
    using Base = LayerWalk<F>;
    using typename Base::X;
    using Base::acc_, Base::hidden_, Base::m, Base::s, Base::thread_, Base::threads_;

public:
    static int64_t wide(const RecursiveHead& h) { return std::max(h.fuse.in, h.enter.in); }
    static int64_t workspace_floats(const RecursiveHead& h, int threads) {
        const Sizes sizes(h.model);
        return sizes.shared_floats() + threads * (sizes.thread_floats(h.model) + round_up(wide(h), 16)) +
               CHUNK * (wide(h) + sizes.width + logits_stride(h)) + (h.model.num_slots * sizes.width) +
               2 * threads * CHUNK;
    }
    static int64_t logits_stride(const RecursiveHead& h) { return round_up(h.model.vocab, TILE); }

    RecursiveWalk(const RecursiveHead& head, const DraftTask& task, DraftState& state, Barrier& barrier,
                  float* workspace, int thread, int threads)
        : Base(head.model, barrier, workspace, thread, threads), h_(head), task_(task), state_(state) {
        float* own = workspace + s.shared_floats() + threads * s.thread_floats(m);
        wide_row_ = own + thread * round_up(wide(head), 16);
        own += threads * round_up(wide(head), 16);
        wide_x_ = reinterpret_cast<X*>(own);
        carried_ = own + CHUNK * wide(head);
        outputs_ = carried_ + CHUNK * s.width;
        best_score_ = outputs_ + m.num_slots * s.width;
        best_index_ = reinterpret_cast<int32_t*>(best_score_ + threads * CHUNK);
        logits_ = best_score_ + 2 * threads * CHUNK;
    }

    void run() {
        for (int64_t first = 0; first < task_.pairs; first += CHUNK)
            observe(first, std::min(CHUNK, task_.pairs - first));
        if (!task_.steps) return;
        const int64_t most = task_.nodes ? CHUNK / MAX_FRONTIER : CHUNK;
        for (int64_t first = 0; first < task_.sequences; first += most) {
            const int64_t count = std::min(most, task_.sequences - first);
            if (task_.nodes) draft_trees(first, count);
            else draft_chains(first, count);
        }
    }

private:
    // Step 1 over a chunk of pairs; the output at each sequence's newest pair is kept.
    void observe(int64_t first, int64_t rows) {
        const Groups groups(rows);
        const Range own = share(rows, thread_, threads_);
        for (int64_t r = own.begin; r < own.end; ++r) {
            const float* features = task_.features + (first + r) * h_.taps * m.width;
            for (int64_t tap = 0; tap < h_.taps; ++tap) {
                const int64_t at = tap * m.width;
                rms_norm(features + at, h_.tap_norm + at, m.width, m.eps, wide_row_ + at);
            }
            put_wide(groups, r, h_.taps * m.width, h_.fuse.in);
        }
        this->wait();
        multiply<F>(h_.fuse, wide_x_, groups, acc_, thread_, threads_, store_to(carried_));
        this->wait();
        const Places places = state_.pairs.places(task_.slots, task_.positions, first, nullptr);
        step(groups, places, task_.ids + first);
        for (int64_t b = 0; b < task_.sequences; ++b) {
            const int64_t r = state_.newest[b] - first;
            if (r >= 0 && r < rows && b % threads_ == thread_) copy(outputs_ + b * s.width, hidden_ + r * s.width);
        }
        this->wait();
    }

    void load_outputs(int64_t first, int64_t rows) {
        const Range own = share(rows, thread_, threads_);
        for (int64_t r = own.begin; r < own.end; ++r) copy(hidden_ + r * s.width, outputs_ + (first + r) * s.width);
        this->wait();
    }

    // K tokens for a chunk of sequences, starting from the outputs at their newest pairs.
    void draft_chains(int64_t first, int64_t rows) {
        const Groups groups(rows);
        const Range own = share(rows, thread_, threads_);
        int64_t* tokens = state_.tokens.data() + first;
        load_outputs(first, rows);
        for (int64_t k = 0; k < task_.steps; ++k) {
            score(groups);
            this->wait();
            for (int64_t r = own.begin; r < own.end; ++r) {
                tokens[r] = h_.token_of[best(r)];
                task_.drafts[(first + r) * task_.steps + k] = tokens[r];
                copy(carried_ + r * s.width, hidden_ + r * s.width);
            }
            if (thread_ == 0) state_.set_chain_rows(task_, first, rows, k + 1);
            this->wait();
            if (k + 1 == task_.steps) return;
            step(groups, state_.sight.places(state_.slots.data(), state_.positions.data(), 0, nullptr), tokens);
        }
    }

    // A tree for every sequence of a chunk, depth by depth.
    void draft_trees(int64_t first, int64_t sequences) {
        const int64_t children = std::min({task_.nodes, MAX_CHILDREN, m.vocab});
        int64_t rows = sequences;
        if (thread_ == 0) state_.start_trees(task_, sequences, children);
        load_outputs(first, sequences);
        for (int64_t depth = 1;; ++depth) {
            const Groups scored(rows);
            score_all(scored);
            const Range own = share(rows, thread_, threads_);
            for (int64_t r = own.begin; r < own.end; ++r)
                top_candidates(logits_ + r * logits_stride(h_), m.vocab, children, &state_.candidates[r * children]);
            this->wait();
            if (thread_ == 0) state_.grow(task_, first, children, h_.token_of);
            this->wait();
            rows = static_cast<int64_t>(state_.ids.size());
            if (depth == task_.steps || !rows) break;
            const Groups groups(rows);
            const Range next = share(rows, thread_, threads_);
            for (int64_t r = next.begin; r < next.end; ++r)
                copy(carried_ + r * s.width, hidden_ + state_.sources[r] * s.width);
            const Places places = state_.sight.places(state_.slots.data(), state_.positions.data(), 0, nullptr);
            step(groups, places, state_.ids.data());
        }
        const Range own = share(sequences, thread_, threads_);
        for (int64_t b = own.begin; b < own.end; ++b) {
            const int64_t at = (first + b) * task_.nodes;
            task_.counts[first + b] =
                state_.trees[b].write(task_.drafts + at, task_.parents + at, task_.confidences + at);
        }
        this->wait();
    }

    // hidden_ = layer(enter([embedding of `ids` ; carried_])).
    void step(const Groups& groups, const Places& places, const int64_t* ids) {
        const Range own = share(groups.rows, thread_, threads_);
        for (int64_t r = own.begin; r < own.end; ++r) {
            rms_norm(h_.embedding + ids[r] * m.width, h_.embedding_norm, m.width, m.eps, wide_row_);
            rms_norm(carried_ + r * s.width, h_.hidden_norm, m.width, m.eps, wide_row_ + m.width);
            put_wide(groups, r, 2 * m.width, h_.enter.in);
        }
        this->wait();
        multiply<F>(h_.enter, wide_x_, groups, acc_, thread_, threads_, store_to(hidden_));
        this->wait();
        this->layer(m.layers[0], places, groups);
    }

    // This thread's best token of every row, among its own tiles.
    void score(const Groups& groups) {
        float* scores = best_score_ + thread_ * CHUNK;
        int32_t* indices = best_index_ + thread_ * CHUNK;
        for (int64_t r = 0; r < groups.rows; ++r) scores[r] = -INFINITY, indices[r] = 0;
        const auto same = [](int64_t r) { return r; };
        const X* x = this->normalise(m.final_norm, groups, same);
        multiply<F>(m.head, x, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            const int64_t n = std::min<int64_t>(TILE, m.vocab - tile * TILE);
            for (int64_t i = 0; i < n; ++i)
                if (sums[i] > scores[r]) scores[r] = sums[i], indices[r] = static_cast<int32_t>(tile * TILE + i);
        });
    }

    // All logits of every row.
    void score_all(const Groups& groups) {
        const X* x = this->normalise(m.final_norm, groups, [](int64_t r) { return r; });
        multiply<F>(m.head, x, groups, acc_, thread_, threads_, [&](int64_t tile, int64_t r, const float* sums) {
            memcpy(logits_ + r * logits_stride(h_) + tile * TILE, sums, TILE * sizeof(float));
        });
        this->wait();
    }

    // The best over all threads; of equal ones the first.
    int32_t best(int64_t r) const {
        int winner = 0;
        for (int t = 1; t < threads_; ++t)
            if (best_score_[t * CHUNK + r] > best_score_[winner * CHUNK + r]) winner = t;
        return best_index_[winner * CHUNK + r];
    }

    void put_wide(const Groups& groups, int64_t row, int64_t n, int64_t in) {
        if (in != n) wide_row_[n] = 0.0f;
        put<F>(wide_x_, groups, row, in, 0, wide_row_, in);
    }
    auto store_to(float* rows) {
        return [this, rows](int64_t tile, int64_t r, const float* sums) {
            memcpy(rows + r * s.width + tile * TILE, sums, TILE * sizeof(float));
        };
    }
    void copy(float* to, const float* from) { memcpy(to, from, s.width * sizeof(float)); }

    const RecursiveHead& h_;
    const DraftTask& task_;
    DraftState& state_;
    float *wide_row_, *carried_, *outputs_, *best_score_, *logits_;  // wide_row_ is this thread's, the others are shared
    int32_t* best_index_;
    X* wide_x_;
};

// As check_rows, and 3 also where the drafts would not fit into a slot, 5: not as many sequences as said.
inline int check(const RecursiveHead& head, const DraftTask& task, int64_t* row) {
    const GivenRows pairs{task.ids, task.slots, task.positions, nullptr, task.pairs};
    const int wrong = check_rows(head.model, head.num_tokens, pairs, row);
    if (wrong) return wrong;
    const int64_t room = task.nodes ? 1 + (task.steps - 1) * MAX_FRONTIER : task.steps;
    int64_t sequences = 0;
    for (int64_t r = 0; r < task.pairs; ++r) {
        *row = r;
        if (r + 1 < task.pairs && task.slots[r] == task.slots[r + 1]) continue;
        if (task.steps && task.positions[r] + room > head.model.max_len) return 3;
        ++sequences;
    }
    return sequences == task.sequences ? 0 : 5;
}

template <class F>
void draft(const RecursiveHead& head, const DraftTask& task, float* workspace, int threads) {
    Barrier barrier;
    DraftState state(task);
    auto body = [&](int thread) {
        RecursiveWalk<F>(head, task, state, barrier, workspace, thread, threads).run();
    };
    run_on_threads(threads, body);
}

}  // namespace
