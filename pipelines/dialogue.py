"""One row on its way through its turns: replies of the target in, the next prompt out, and at the end the rollout.

A row without further turns is a dialogue of one. Seeds follow from the run's seed, the row's id and the turn, and from
nothing else. No Ray.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch import Tensor

from pipelines.prompts import PromptRow
from pipelines.rollout_schema import Rollout
from serving.engine.sampling import Sampling
from serving.engine.sequence import Completion, FinishReason

if TYPE_CHECKING:
    from pipelines.generate_config import GenerateConfig


def row_seed(seed: int, row_id: str) -> int:
    """The seed of a row's random stream: the same whichever shard or run the row is in."""
    return _hashed(f"{seed}\0{row_id}")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of turn 1, 2, ... of a row with this seed; the first turn's is the row's own."""
    return seed if turn == 1 else _hashed(f"{seed}\0turn\0{turn}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Dialogue:
    """A row and what came of it so far. `ids` is the next prompt, once finished the whole sequence."""

    def __init__(self, row: PromptRow, config: GenerateConfig, max_len: int):
        """`max_len`: tokens that the engine's context holds."""
        self.row = row
        self.ids = list(row.prompt_ids)
        self.loss_mask = [0] * len(row.prompt_ids)  # 1 where the target wrote
        self.features_TF: Tensor | None = None  # of the last turn, whose prompt is all that came before
        self.finish_reason: FinishReason | None = None
        self.num_replies = 0
        self._config, self._max_len = config, max_len
        self._seed = row_seed(config.seed, row.id)

    def sampling(self) -> Sampling:
        """Of the next turn."""
        return self._config.sampling(turn_seed(self._seed, self.num_replies + 1))

    def take(self, completion: Completion) -> bool:
        """Take a reply over; whether another turn follows it.

        The dialogue ends early, with "length", where the context would not hold the next reply at its longest.
        """
        reply = completion.token_ids
        self.ids += reply
        self.loss_mask += [1] * len(reply)
        self.features_TF, self.finish_reason = completion.features_TF, completion.finish_reason
        self.num_replies += 1
        if self.num_replies > len(self.row.follow_ups) or self.finish_reason not in ("stop", "length"):
            return False
        between = self.row.follow_ups[self.num_replies - 1].after(reply)
        if len(self.ids) + len(between) + self._config.max_new_tokens > self._max_len:
            self.finish_reason = "length"
            return False
        self.ids += between
        self.loss_mask += [0] * len(between)
        return True

    def rollout(self, features_TF: Tensor | None) -> Rollout:
        """The finished row, with the features that are to be stored."""
        sampling = self._config.sampling(self._seed)
        return Rollout(
            id=self.row.id,
            category=self.row.category,
            prompt_ids=self.row.prompt_ids,
            response_ids=self.ids[len(self.row.prompt_ids) :],
            loss_mask=self.loss_mask,
            finish_reason=self.finish_reason or "error",
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            max_new_tokens=sampling.max_new_tokens,
            features_TF=features_TF,
        )
