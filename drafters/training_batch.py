"""What a drafter is trained on: padded sequences with their features, and the anchors that drafts start from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -1  # label of a draft position without a known token


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """B sequences padded to T tokens, A anchors each. Anchor pair p joins features at p with the token at p + 1."""

    ids_BT: Tensor  # int64, prompt and response; padding is 0
    features_BTF: Tensor  # hidden states at every position but the last (padding and the last row are 0)
    lengths_B: Tensor  # int64, tokens per sequence
    anchors_BA: Tensor  # int64, pair index p of every anchor; unused places repeat a used one
    anchor_mask_BA: Tensor  # bool, which places are used

    def labels(self, num_draft_tokens: int) -> Tensor:
        """[B, A, K] the token that step k (1-based) predicts, at p + 1 + k; IGNORED past the end of the sequence."""
        ahead_K = torch.arange(2, num_draft_tokens + 2, device=self.ids_BT.device)
        position_BAK = self.anchors_BA[:, :, None] + ahead_K
        known = (position_BAK < self.lengths_B[:, None, None]) & self.anchor_mask_BA[:, :, None]
        batch_B11 = torch.arange(len(self.ids_BT), device=self.ids_BT.device)[:, None, None]
        labels = self.ids_BT[batch_B11, position_BAK.clamp(max=self.ids_BT.shape[1] - 1)]
        return torch.where(known, labels, IGNORED)

    def features_before_labels(self, num_draft_tokens: int, width: int) -> Tensor:
        """[B, A, K, width] the last tap at p + k, from which the target predicts step k's label.

        Past the end of a sequence, where no label is known, the rows mean nothing.
        """
        position_BAK = self.anchors_BA[:, :, None] + torch.arange(1, num_draft_tokens + 1, device=self.ids_BT.device)
        batch_B11 = torch.arange(len(self.ids_BT), device=self.ids_BT.device)[:, None, None]
        return self.features_BTF[:, :, -width:][batch_B11, position_BAK.clamp(max=self.ids_BT.shape[1] - 1)]

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The same batch on another device."""
        return TrainingBatch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


def pad_sequences(ids: list[Tensor], features: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [B, T], features [B, T, F], lengths [B]) from sequences of T_b tokens and T_b - 1 rows of features."""
    lengths = torch.tensor([len(i) for i in ids])
    longest = int(lengths.max())
    ids_BT = torch.zeros((len(ids), longest), dtype=torch.int64)
    features_BTF = torch.zeros((len(ids), longest, features[0].shape[1]), dtype=dtype)
    for b, (sequence, rows) in enumerate(zip(ids, features, strict=True)):
        ids_BT[b, : len(sequence)] = sequence
        features_BTF[b, : len(rows)] = rows
    return ids_BT, features_BTF, lengths


def random_anchors(
    prompt_lens: list[int], lengths: list[int], count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(anchors [B, A], mask [B, A]): up to `count` distinct pairs per sequence, drawn where drafting happens.

    The first round of a request starts from the pair of the last prompt token and the first emitted one, and a pair is
    of use while the token after next is known: p runs from prompt_len - 1 to length - 3.
    """
    anchors = torch.zeros((len(lengths), count), dtype=torch.int64)
    mask = torch.zeros((len(lengths), count), dtype=torch.bool)
    for b, (prompt_len, length) in enumerate(zip(prompt_lens, lengths, strict=True)):
        choices = length - 2 - (prompt_len - 1)
        if choices < 1:
            continue
        drawn = torch.randperm(choices, generator=generator)[:count].sort().values + prompt_len - 1
        anchors[b, : len(drawn)], mask[b, : len(drawn)] = drawn, True
        anchors[b, len(drawn) :] = drawn[-1]
    return anchors, mask
