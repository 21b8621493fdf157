"""The target's own greedy answers, decoded once, with the features of every layer that some trial wants to tap.

In: an engine without a drafter that taps those layers, prompts. Out: answers; what a drafter is shown of them is cut
from their features, so that a trial costs no pass of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.target import SharedWeights
from pipelines.prompts import PromptRow
from pipelines.training_sequence import TrainingSequence
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling

EMBEDDING = -1  # in place of a layer: what the first one reads

OnAnswer = Callable[[int, int], None]  # answers decoded, of so many


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """One prompt and what the target said to it."""

    prompt_id: str
    category: str
    ids_T: Tensor  # int64, prompt and response
    prompt_len: int
    layers: tuple[int, ...]  # ascending
    features_TLD: Tensor  # [T - 1, layers, D], as the engine keeps them

    def places(self, num_draft_tokens: int) -> int:
        """Rounds that begin after response token 0, 1, 2 ...: those whose drafts are known to their end, and one
        token beyond."""
        return max(0, len(self.ids_T) - self.prompt_len - num_draft_tokens - 1)

    def tapped(self, layers: Sequence[int], shared: SharedWeights | None = None) -> Tensor:
        """[T - 1, taps * D] features as a drafter that taps these layers is given them; EMBEDDING needs `shared`."""
        parts = []
        for layer in layers:
            if layer == EMBEDDING:
                assert shared is not None
                embedded_TD = F.embedding(self.ids_T[:-1].to(shared.embedding_VD.device), shared.embedding_VD)
                parts.append((embedded_TD * shared.embedding_scale).to("cpu", self.features_TLD.dtype))
            else:
                parts.append(self.features_TLD[:, self.layers.index(layer)])
        return torch.cat(parts, dim=-1) if parts else self.features_TLD.new_zeros((len(self.features_TLD), 0))

    def sequence(self, features_TF: Tensor) -> TrainingSequence:
        """As the trainer would have it."""
        return TrainingSequence(self.ids_T, self.prompt_len, features_TF, self.category)


def decode_answers(
    engine: Engine, rows: Sequence[PromptRow], max_new_tokens: int, on_answer: OnAnswer | None = None
) -> list[Answer]:
    """Answers to all prompts, in their order; those with features that are not finite are left out."""
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        if on_answer:
            on_answer(done, len(rows))

    layers = engine.target_layer_ids
    completions = engine.generate(
        [row.prompt_ids for row in rows],
        Sampling(max_new_tokens=max_new_tokens),
        keep_features=bool(layers),
        on_completion=count,
    )
    answers = []
    for row, completion in zip(rows, completions, strict=True):
        ids_T = torch.tensor(completion.prompt_ids + completion.token_ids)
        features = completion.features_TF
        if features is None:
            features = torch.zeros((len(ids_T) - 1, 0))
        if bool(torch.isfinite(features.float()).all()):
            answers.append(
                Answer(
                    prompt_id=row.id,
                    category=row.category,
                    ids_T=ids_T,
                    prompt_len=len(row.prompt_ids),
                    layers=layers,
                    features_TLD=features.unflatten(-1, (len(layers), -1)) if layers else features[:, None],
                )
            )
    return answers
