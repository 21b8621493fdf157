"""Accept/reject: hand values, and the emitted distribution against the target's by chi-square.

Every chi-square test here has a false-alarm rate of 1e-4 on fixed seeds: the draws are the same in every run.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from drafters import random_stream
from drafters.drafter import SparseProbs
from drafters.verify import (
    TreeVerdict,
    Verdict,
    residual,
    sample,
    verify_sampled,
    verify_tokens,
    verify_tree_sampled,
    verify_tree_tokens,
)

ALPHA = 1e-4
SAMPLES = 50_000


def test_greedy_verdicts_by_hand():
    target = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    drafts = torch.tensor([[5, 6], [5, 9], [9, 6], [5, 6]])
    verdict = verify_tokens(target, drafts, torch.tensor([2, 2, 2, 1]))
    assert verdict.accepted_B.tolist() == [2, 1, 0, 1]
    assert verdict.bonus_B.tolist() == [7, 6, 5, 6]


def test_no_drafts_is_plain_decoding():
    verdict = verify_tokens(torch.tensor([[3], [4]]), torch.empty((2, 0), dtype=torch.int64), torch.tensor([0, 0]))
    assert verdict.accepted_B.tolist() == [0, 0]
    assert verdict.bonus_B.tolist() == [3, 4]


def test_residual_by_hand():
    target = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    left = residual(target, torch.tensor([[0, 3]]), torch.tensor([[0.6, 0.4]], dtype=torch.float64))
    torch.testing.assert_close(left, torch.tensor([[0.0, 0.3, 0.2, 0.0]], dtype=torch.float64))


def test_residual_of_equal_distributions_is_the_target():
    target = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    assert torch.equal(residual(target, torch.tensor([[0, 1]]), target), target)


def test_sample_inverts_the_cumulative_sum_and_never_returns_weight_zero():
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).expand(4, -1)
    drawn = sample(weights, torch.tensor([0.0, 0.2499, 0.25, 1 - 2**-53], dtype=torch.float64))
    assert drawn.tolist() == [1, 1, 3, 3]


# -- the emitted distribution ------------------------------------------------------------------------------------------

VOCAB, WIDTH = 12, 3  # draft positions: two drafts and the bonus


def toy_distributions(seed: int) -> torch.Tensor:
    """Target distributions over (first, second, third token), each conditioned on the tokens before it."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.dirichlet(np.full(VOCAB, 0.5), size=(VOCAB + 1, VOCAB + 1)))


def target_rows(tables: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """[N, 3, V] target rows along each draft path: no token before, the first draft, the second draft before."""
    none = torch.full((len(drafts),), VOCAB)
    return torch.stack([tables[none, none], tables[none, drafts[:, 0]], tables[drafts[:, 0], drafts[:, 1]]], dim=1)


def uniforms(stream: int, width: int, seed: int) -> torch.Tensor:
    seeds = np.broadcast_to(np.arange(SAMPLES)[:, None] + seed * SAMPLES, (SAMPLES, width))
    return torch.from_numpy(random_stream.uniforms(seeds, np.broadcast_to(np.arange(width), seeds.shape), stream))


def p_value(tables: torch.Tensor, drafts: torch.Tensor, verdict: Verdict) -> float:
    """Chi-square of the first two emitted tokens (jointly, where two came out) against the target."""
    none = VOCAB
    emitted = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    emitted[torch.arange(len(drafts)), verdict.accepted_B] = verdict.bonus_B
    first = np.bincount(emitted[:, 0].numpy(), minlength=VOCAB)
    p_first = chi_square(first, tables[none, none].numpy())
    two = verdict.accepted_B >= 1  # the round brought a second token: it must follow the target given the first
    p_second = []
    for token in range(VOCAB):
        chosen = emitted[two & (emitted[:, 0] == token), 1].numpy()
        if len(chosen) > 500:
            p_second.append(chi_square(np.bincount(chosen, minlength=VOCAB), tables[none, token].numpy()))
    return min([p_first, *(min(1.0, p * max(1, len(p_second))) for p in p_second)])


def chi_square(observed: np.ndarray, probs: np.ndarray) -> float:
    """p-value of the counts of one distribution."""
    statistic, degrees = chi_square_parts(observed, probs)
    return float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0


def chi_square_parts(observed: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom, with rare cells pooled so that every expectation is at least 5.

    Parts of independent samples may be added up. Too few samples for two cells give (0, 0).
    """
    expected = probs / probs.sum() * observed.sum()
    order = np.argsort(expected)
    observed, expected = observed[order].astype(float), expected[order]
    if np.searchsorted(expected, 5.0):
        pooled = int(np.searchsorted(expected.cumsum(), 5.0)) + 1
        pooled = max(pooled, int(np.searchsorted(expected, 5.0)))
        observed = np.concatenate([[observed[:pooled].sum()], observed[pooled:]])
        expected = np.concatenate([[expected[:pooled].sum()], expected[pooled:]])
    return float(((observed - expected) ** 2 / expected).sum()) if len(expected) > 1 else 0.0, len(expected) - 1


def argmax_drafts(tables: torch.Tensor, kind: str) -> torch.Tensor:
    """Drafts of the three test drafters, the same path for every sample."""
    none = VOCAB
    first = int(tables[none, none].argmax())
    if kind == "always-wrong":
        first = int(tables[none, none].argmin())
    second = int(tables[none, first].argmin() if kind != "always-right" else tables[none, first].argmax())
    return torch.tensor([[first, second]]).expand(SAMPLES, -1)


@pytest.mark.parametrize("kind", ["always-right", "always-wrong", "half-right"])
@pytest.mark.parametrize("seed", [0, 1])
def test_argmax_drafters_leave_the_targets_distribution(kind, seed):
    tables = toy_distributions(seed)
    drafts = argmax_drafts(tables, kind)
    rows = target_rows(tables, drafts)
    u = uniforms(random_stream.TARGET, WIDTH, seed)
    tokens = sample(rows.flatten(0, 1), u.flatten()).view(SAMPLES, WIDTH)
    verdict = verify_tokens(tokens, drafts, torch.full((SAMPLES,), 2))
    assert p_value(tables, drafts, verdict) > ALPHA


def random_drafts(tables: torch.Tensor, kind: str, seed: int) -> tuple[torch.Tensor, SparseProbs]:
    """Drafts sampled from a distribution over six candidates: a random one, or the target's own (truncated)."""
    rng = np.random.default_rng(seed + 100)
    ids = torch.from_numpy(rng.choice(VOCAB, 6, replace=False))
    probs = torch.from_numpy(rng.dirichlet(np.ones(6), size=2))
    if kind == "target":
        none = VOCAB
        probs = torch.stack([tables[none, none][ids], tables[none].mean(dim=0)[ids]])
        probs = probs / probs.sum(dim=1, keepdim=True)
    if kind == "one-hot":
        probs = torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 1.0, 0, 0, 0, 0]], dtype=torch.float64)
    u = uniforms(random_stream.DRAFT, 2, seed)
    drafts = torch.stack([ids[sample(probs[j].expand(SAMPLES, -1), u[:, j])] for j in range(2)], dim=1)
    sparse = SparseProbs(ids_BKC=ids.expand(SAMPLES, 2, -1), probs_BKC=probs.expand(SAMPLES, -1, -1))
    return drafts, sparse


def accept_always(rows, drafts, sparse, counts, accept_u, bonus_u) -> Verdict:
    """A planted fault: every draft is kept."""
    return verify_sampled(rows, drafts, sparse, counts, torch.full_like(accept_u, -1.0), bonus_u)


def resample_from_target(rows, drafts, sparse, counts, accept_u, bonus_u) -> Verdict:
    """A planted fault: after a rejection the token comes from the target instead of the residual."""
    verdict = verify_sampled(rows, drafts, sparse, counts, accept_u, bonus_u)
    at = torch.arange(len(rows))
    return Verdict(verdict.accepted_B, sample(rows[at, verdict.accepted_B], bonus_u[at, verdict.accepted_B]))


def verdict_of(rule, kind: str, seed: int) -> float:
    tables = toy_distributions(seed)
    drafts, sparse = random_drafts(tables, kind, seed)
    verdict = rule(
        target_rows(tables, drafts),
        drafts,
        sparse,
        torch.full((SAMPLES,), 2),
        uniforms(random_stream.ACCEPT, 2, seed),
        uniforms(random_stream.TARGET, WIDTH, seed),
    )
    return p_value(tables, drafts, verdict)


@pytest.mark.parametrize("kind", ["random", "target", "one-hot"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rejection_rule_leaves_the_targets_distribution(kind, seed):
    assert verdict_of(verify_sampled, kind, seed) > ALPHA


@pytest.mark.parametrize("rule", [accept_always, resample_from_target])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wrong_rules_are_found_out(rule, seed):
    assert verdict_of(rule, "random", seed) < 1e-8


def test_rows_with_fewer_drafts_than_the_widest_are_bounded_by_their_count():
    rows = torch.full((2, 3, 4), 0.25, dtype=torch.float64)
    drafts = torch.tensor([[1, 1], [1, 1]])
    ids = torch.tensor([0, 1, 2, 3]).expand(2, 2, -1)
    sparse = SparseProbs(ids_BKC=ids, probs_BKC=torch.full((2, 2, 4), 0.25, dtype=torch.float64))
    zeros = torch.zeros((2, 2), dtype=torch.float64)
    verdict = verify_sampled(rows, drafts, sparse, torch.tensor([0, 2]), zeros, torch.full((2, 3), 0.99))
    assert verdict.accepted_B.tolist() == [0, 2]
    assert verdict.bonus_B.tolist() == [3, 3]


# -- trees -------------------------------------------------------------------------------------------------------------

PARENTS = [-1, -1, 0, -1, 0, 1, 5]  # three children of the anchor, two of node 0, one of node 1 and one of that


def test_greedy_trees_by_hand():
    drafts = torch.tensor([[5, 6, 7, 8, 9, 7, 4]]).expand(6, -1)
    parents = torch.tensor([PARENTS]).expand(6, -1)
    # the target's token after the anchor, and after each node
    target = torch.tensor(
        [
            [5, 9, 0, 0, 0, 3, 0, 0],  # 5, then 9, then 3 that nobody drafted
            [6, 0, 7, 0, 0, 0, 4, 2],  # 6, 7, 4, and one more
            [6, 0, 9, 0, 0, 0, 0, 0],  # 6; its child is not 9, though node 0 has such a child
            [8, 0, 0, 0, 1, 0, 0, 0],  # 8, a leaf
            [1, 5, 5, 5, 5, 5, 5, 5],  # nothing
            [8, 0, 0, 0, 1, 0, 0, 0],  # 8 would be right, but only three nodes are meant
        ]
    )
    verdict = verify_tree_tokens(target, drafts, parents, torch.tensor([7, 7, 7, 7, 7, 3]))
    assert verdict.accepted_B.tolist() == [2, 3, 1, 1, 0, 0]
    assert verdict.bonus_B.tolist() == [3, 2, 9, 1, 1, 8]
    paths = [[n for n in path if n >= 0] for path in verdict.path_BD.tolist()]
    assert paths == [[0, 4], [1, 5, 6], [1], [3], [], []]


def test_a_chain_is_a_tree():
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, 3, (200, 5), generator=generator)
    drafts = torch.randint(0, 3, (200, 4), generator=generator)
    counts = torch.randint(0, 5, (200,), generator=generator)
    chain = verify_tokens(target, drafts, counts)
    tree = verify_tree_tokens(target, drafts, torch.arange(-1, 3).expand(200, -1), counts)
    assert torch.equal(tree.accepted_B, chain.accepted_B)
    assert torch.equal(tree.bonus_B, chain.bonus_B)


def test_no_nodes_is_plain_decoding():
    empty = torch.empty((2, 0), dtype=torch.int64)
    verdict = verify_tree_tokens(torch.tensor([[3], [4]]), empty, empty, torch.tensor([0, 0]))
    assert (verdict.accepted_B.tolist(), verdict.bonus_B.tolist()) == ([0, 0], [3, 4])


TREE = [-1, -1, -1, 0, 0, 1]  # three siblings, two, one: drawn without replacement


def sampled_tree(tables: torch.Tensor, seed: int) -> tuple[torch.Tensor, SparseProbs, torch.Tensor]:
    """(drafts [N, K], their distributions, target rows [N, K + 1, V]) for N samples of the tree."""
    rng = np.random.default_rng(seed + 100)
    ids = torch.from_numpy(rng.choice(VOCAB, 6, replace=False))
    by_depth = torch.from_numpy(rng.dirichlet(np.ones(6), size=2))
    depth = [0 if parent < 0 else 1 for parent in TREE]
    u = uniforms(random_stream.DRAFT, len(TREE), seed)
    chosen: list[torch.Tensor] = []
    for node, parent in enumerate(TREE):
        left = by_depth[depth[node]].repeat(SAMPLES, 1)
        for sibling in range(node):
            if TREE[sibling] == parent:
                left[torch.arange(SAMPLES), chosen[sibling]] = 0.0
        chosen.append(sample(left, u[:, node]))
    drafts = ids[torch.stack(chosen, dim=1)]
    probs = by_depth[depth].expand(SAMPLES, -1, -1)
    none = torch.full((SAMPLES,), VOCAB)
    rows = [tables[none, none]]
    for node, parent in enumerate(TREE):
        rows.append(tables[none, drafts[:, node]] if parent < 0 else tables[drafts[:, parent], drafts[:, node]])
    return drafts, SparseProbs(ids_BKC=ids.expand(SAMPLES, len(TREE), -1), probs_BKC=probs), torch.stack(rows, dim=1)


def tree_p_value(tables: torch.Tensor, drafts: torch.Tensor, verdict: TreeVerdict) -> float:
    """As `p_value`, with the accepted path in place of the first drafts."""
    along = torch.gather(drafts, 1, verdict.path_BD.clamp(min=0)[:, :2])
    return p_value(tables, along, Verdict(verdict.accepted_B, verdict.bonus_B))


def tree_verdict_of(rule, seed: int) -> float:
    tables = toy_distributions(seed)
    drafts, sparse, rows = sampled_tree(tables, seed)
    verdict = rule(
        rows,
        drafts,
        torch.tensor(TREE).expand(SAMPLES, -1),
        sparse,
        torch.full((SAMPLES,), len(TREE)),
        uniforms(random_stream.ACCEPT, len(TREE), seed),
        uniforms(random_stream.TARGET, len(TREE) + 1, seed),
    )
    return tree_p_value(tables, drafts, verdict)


def as_if_with_replacement(rows, drafts, parents, sparse, counts, accept_u, bonus_u) -> TreeVerdict:
    """A planted fault: every sibling is judged by the distribution of the first, as if it could have come up again."""
    chances = (sparse.probs_BKC * (sparse.ids_BKC == drafts[:, :, None])).sum(dim=2)
    left = torch.ones_like(chances)
    for j, parent in enumerate(TREE):
        for sibling in range(j):
            if TREE[sibling] == parent:
                left[:, j] -= chances[:, sibling]
    return verify_tree_sampled(rows, drafts, parents, sparse, counts, accept_u * left.clamp(min=0.05), bonus_u)


def siblings_by_the_whole_target(rows, drafts, parents, sparse, counts, accept_u, bonus_u) -> TreeVerdict:
    """A planted fault: a later sibling is kept by its chance under the target, not under what rejections left of it."""
    first = verify_tree_sampled(rows, drafts, parents, sparse, counts, accept_u, bonus_u)
    draft_prob = (sparse.probs_BKC[:, 1] * (sparse.ids_BKC[:, 1] == drafts[:, 1, None])).sum(dim=1)
    lucky = (first.accepted_B == 0) & (accept_u[:, 1] * draft_prob < rows[torch.arange(len(rows)), 0, drafts[:, 1]])
    path = torch.where(lucky[:, None] & (torch.arange(len(TREE)) == 0), 1, first.path_BD)
    bonus = torch.where(lucky, sample(rows[:, 2], bonus_u[:, 2]), first.bonus_B)
    return TreeVerdict(path, torch.where(lucky, 1, first.accepted_B), bonus)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_recursive_rejection_leaves_the_targets_distribution(seed):
    assert tree_verdict_of(verify_tree_sampled, seed) > ALPHA


@pytest.mark.parametrize("rule", [as_if_with_replacement, siblings_by_the_whole_target])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_wrong_sibling_rules_are_found_out(rule, seed):
    assert tree_verdict_of(rule, seed) < 1e-8


@pytest.mark.parametrize("seed", [0, 1])
def test_siblings_proposed_with_certainty_leave_the_targets_distribution(seed):
    """The coupled rule, for the target's likeliest and least likely tokens as siblings."""
    tables = toy_distributions(seed)
    order = tables[VOCAB, VOCAB].argsort(descending=True)
    drafts = torch.tensor([[int(order[0]), int(order[-1]), int(order[1]), 0, 1, 0]]).expand(SAMPLES, -1)
    none = torch.full((SAMPLES,), VOCAB)
    rows = [tables[none, none]]
    for node, parent in enumerate(TREE):
        rows.append(tables[none, drafts[:, node]] if parent < 0 else tables[drafts[:, parent], drafts[:, node]])
    u = uniforms(random_stream.TARGET, len(TREE) + 1, seed)
    tokens = sample(torch.stack(rows, dim=1).flatten(0, 1), u.flatten()).view(SAMPLES, -1)
    parents = torch.tensor(TREE).expand(SAMPLES, -1)
    verdict = verify_tree_tokens(tokens, drafts, parents, torch.full((SAMPLES,), len(TREE)))
    assert verdict.path_BD.shape[1] <= len(TREE)
    padded = torch.nn.functional.pad(verdict.path_BD, (0, len(TREE)), value=-1)
    assert tree_p_value(tables, drafts, TreeVerdict(padded, verdict.accepted_B, verdict.bonus_B)) > ALPHA
