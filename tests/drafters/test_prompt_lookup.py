"""Prompt lookup by hand, and in an engine."""

from __future__ import annotations

import pytest
import torch

from drafters.drafter import DraftRequest
from drafters.prompt_lookup import PromptLookupDrafter
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_target import toy_model


def request(tokens: list[int], start: int = 0, epoch: int = 1, number: int = 3) -> DraftRequest:
    """All of `tokens` from position `start`, whose own token the drafter knows already."""
    return DraftRequest(
        slots=[0], epochs=[epoch], counts=[len(tokens) - 1], starts=[start], first_tokens=[tokens[0]],
        tokens_N=torch.tensor(tokens[1:]), features_NF=None, num_draft_tokens=number, temperatures=[0.0], seeds=[0],
    )  # fmt: skip


def offered(drafter: PromptLookupDrafter, *args, **kwargs) -> list[int]:
    reply = drafter.draft(request(*args, **kwargs))
    return reply.tokens_BK[0, : reply.counts[0]].tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),  # a 2-gram from the front
        ([1, 2, 9, 7, 1, 2, 3, 7, 1, 2], [3, 7, 1]),  # the longest gram (7 1 2), and the latest one
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 4], []),  # never seen
        ([5, 5, 5], [5]),  # what follows the earlier pair is the newest token
        ([8, 9], []),
    ],
)
def test_by_hand(tokens, expected):
    drafter = PromptLookupDrafter()
    assert offered(drafter, tokens) == expected


def test_goes_on_where_it_stopped_and_forgets_an_older_epoch():
    drafter = PromptLookupDrafter()
    assert offered(drafter, [1, 2, 3, 4]) == []
    assert offered(drafter, [4, 1, 2], start=3) == [3, 4, 1]
    assert offered(drafter, [7, 1, 2], epoch=2) == []
    with pytest.raises(ValueError, match="knows 2 pairs"):
        drafter.draft(request([2, 3], start=5, epoch=2))


def test_never_changes_greedy_output_and_helps_on_a_loop():
    prompt = [10, 20, 30, 40] * 6
    shape = {"initializer_range": 0.1}
    rows = TorchRows(toy_model(**shape), num_slots=1, max_len=256)
    plain = Engine(rows).generate([prompt], Sampling(max_new_tokens=100))
    engine = Engine(rows, PromptLookupDrafter())
    drafted = engine.generate([prompt], Sampling(max_new_tokens=100))
    assert drafted[0].token_ids == plain[0].token_ids
    assert engine.stats.fallbacks == {}
    assert engine.stats.acceptance.tau > 1.5  # greedy text of a toy soon repeats itself
