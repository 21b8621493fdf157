"""Which token stands in DFlash's undrafted slots: the target's tokenizer and all known text in, one id out.

It must never occur in text, or the drafter would take text for a slot to fill. Padding and end tokens are no choice:
they do occur, and other programs treat them in their own way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from drafters.target import Target
from pipelines.rollout_store import RolloutSet
from pipelines.train_config import TrainError


def mask_token(target: Target, sets: Sequence[RolloutSet], wanted: int | None) -> int:
    """The id to use: `wanted` if given, or by rule the first that there is of

    1. the tokenizer's own mask token,
    2. the first row of the embedding past the tokenizer's vocabulary,
    3. the last special token that is no beginning, end, padding or unknown token, and is not in the chat template,

    where an id that occurs in the rollouts is passed over. Raises TrainError if none is left, or if `wanted` occurs.
    """
    vocab_size = int(target.config.get_text_config().vocab_size)
    rows = (rollout for rollouts in sets for rollout in rollouts.rollouts(with_features=False))
    occurring = {int(t) for rollout in rows for t in rollout.prompt_ids + rollout.response_ids}
    if wanted is not None:
        if not 0 <= wanted < vocab_size:
            raise TrainError(f"mask_token_id is {wanted}; give an id below the vocabulary's {vocab_size}")
        if wanted in occurring or wanted in _taken(target):
            raise TrainError(f"mask_token_id is {wanted}, which occurs in text; give one that never does")
        return wanted
    for candidate in mask_candidates(target, vocab_size):
        if candidate not in occurring:
            return candidate
    raise TrainError("the target has no token that is never used, for DFlash's mask; give mask_token_id")


def mask_candidates(target: Target, vocab_size: int) -> list[int]:
    """The ids that the rule of `mask_token` would take, in its order, whatever occurs in text."""
    tokenizer, taken = target.tokenizer, _taken(target)
    own = [] if tokenizer.mask_token_id is None else [int(tokenizer.mask_token_id)]
    used = max([len(tokenizer) - 1, *tokenizer.get_vocab().values()])
    past = range(used + 1, vocab_size)[:1]
    template = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    special = sorted(
        (i for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in template),
        reverse=True,
    )
    return [i for i in (*own, *past, *special) if i not in taken and i < vocab_size]


def _taken(target: Target) -> set[int]:
    """Tokens with a meaning of their own."""
    tokenizer = target.tokenizer
    named = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *target.eos_token_ids)
    return {int(i) for i in named if i is not None}
