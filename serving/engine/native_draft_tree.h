// In: the best next tokens of a tree's frontier with their log-probabilities, depth by depth. Out: the tree's likeliest
// nodes. The same growth as drafters/draft_tree.py, which says why it finds them.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "native_kernels.h"

namespace {

constexpr int64_t MAX_FRONTIER = 16;   // nodes of one depth that are expanded
constexpr int64_t MAX_CHILDREN = 16;   // of one node
constexpr int64_t TREE_ROOT = -1;

struct Candidate {
    float score;  // a logit, then a log-probability
    int64_t index;
};

struct TreeNode {
    float log_prob;  // joint
    int64_t token, parent, depth, entry;  // entry: of its key and value in the drafter's slot, if expanded
};

struct DraftTree {
    int64_t budget;
    std::vector<TreeNode> nodes;
    std::vector<int64_t> frontier{TREE_ROOT};

    explicit DraftTree(int64_t most) : budget(most) {}

    // `candidates` [frontier][count], likeliest first; `token_of`: their tokens.
    void extend(const Candidate* candidates, int64_t count, const int64_t* token_of) {
        const auto first_new = static_cast<int64_t>(nodes.size());
        for (const int64_t parent : frontier) {
            const TreeNode above = parent == TREE_ROOT ? TreeNode{0.0f, 0, 0, 0, 0} : nodes[parent];
            for (int64_t i = 0; i < count; ++i) {
                const float joint = above.log_prob + std::min(candidates[i].score, 0.0f);
                nodes.push_back({joint, token_of[candidates[i].index], parent, above.depth + 1, -1});
            }
            candidates += count;
        }
        frontier.clear();
        for (const int64_t node : best())  // likeliest first
            if (node >= first_new && static_cast<int64_t>(frontier.size()) < MAX_FRONTIER) frontier.push_back(node);
    }

    // The likeliest nodes; of equal ones the earlier found, so that parents come before their children.
    std::vector<int64_t> best() const {
        std::vector<int64_t> order(nodes.size());
        std::iota(order.begin(), order.end(), 0);
        const auto before = [&](int64_t a, int64_t b) {
            return nodes[a].log_prob != nodes[b].log_prob ? nodes[a].log_prob > nodes[b].log_prob : a < b;
        };
        const auto most = std::min<int64_t>(budget, static_cast<int64_t>(order.size()));
        std::partial_sort(order.begin(), order.begin() + most, order.end(), before);
        order.resize(most);
        return order;
    }

    // [budget] each; returns how many there are.
    int64_t write(int64_t* tokens, int64_t* parents, float* confidences) const {
        const std::vector<int64_t> chosen = best();
        std::vector<int64_t> place(nodes.size(), TREE_ROOT);
        for (size_t i = 0; i < chosen.size(); ++i) {
            const TreeNode& node = nodes[chosen[i]];
            place[chosen[i]] = static_cast<int64_t>(i);
            tokens[i] = node.token;
            parents[i] = node.parent == TREE_ROOT ? TREE_ROOT : place[node.parent];
            confidences[i] = std::exp(node.log_prob);
        }
        return static_cast<int64_t>(chosen.size());
    }
};

// The `count` highest of n logits, highest first, of equal ones the lower index; as log-probabilities.
inline void top_candidates(const float* logits, int64_t n, int64_t count, Candidate* out) {
    int64_t found = 0;
    const auto take = [&](int64_t i) {
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && out[at - 1].score < logits[i]; --at) out[at] = out[at - 1];
        out[at] = {logits[i], i};
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const float least = found < count ? -INFINITY : out[count - 1].score;
        bool any = false;
        const vf x = load(logits + i);
        const auto above = x > splat(least);
        for (int lane = 0; lane < LANES; ++lane) any |= above[lane] != 0;
        if (!any) continue;
        for (int64_t j = i; j < i + LANES; ++j)
            if (found < count || logits[j] > out[count - 1].score) take(j);
    }
    for (; i < n; ++i)
        if (found < count || logits[i] > out[count - 1].score) take(i);
    const float top = out[0].score;
    vf sums = splat(0.0f);
    for (i = 0; i + LANES <= n; i += LANES) sums += vexp(load(logits + i) - splat(top));
    float sum = sum_lanes(sums);
    for (; i < n; ++i) sum += std::exp(logits[i] - top);
    const float normaliser = top + std::log(sum);
    for (int64_t c = 0; c < found; ++c) out[c].score -= normaliser;
}

}  // namespace
