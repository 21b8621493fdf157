"""What a drafter is trained on: documents packed into rows with their features, and the anchors that drafts start from.

A document is one sequence of the target: a prompt and what the target wrote, in one span or (several turns) in more.
Rows hold whole documents one after another; nothing of a document is seen from another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

IGNORED = -1  # label of a draft position without a known token

Span = tuple[int, int]  # places [first, end) of tokens in a row or document that the target wrote in one go


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """B rows of T tokens, A anchors each. Anchor pair p joins features at place p with the token at place p + 1."""

    ids_BT: Tensor  # int64; padding is 0
    features_BTF: Tensor  # hidden states; 0 in the padding and at a document's last token, which was never fed
    positions_BT: Tensor  # int64, of every token in its own document, from 0; padding is 0
    anchors_BA: Tensor  # int64, place p of every anchor pair; unused ones repeat a used one
    anchor_mask_BA: Tensor  # bool, which anchors are used
    ends_BA: Tensor  # int64, the place after the span that the anchor's drafts continue
    # labels of each position in the whole training step, if this batch is a part of it [K]; None: it is the whole
    step_labels_K: Tensor | None = None

    def document_starts(self) -> Tensor:
        """[B, A] the place where each anchor's document begins."""
        return self.anchors_BA - self.positions_BT.gather(1, self.anchors_BA)

    def pairs_seen(self) -> Tensor:
        """[B, T] bool: the pairs that some anchor sees, those of its document up to itself."""
        place_BT = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device).expand_as(self.ids_BT)
        last_BT = torch.full_like(self.ids_BT, -1)  # at a document's first place: its last anchor
        last_BT = last_BT.scatter_reduce(1, self.document_starts(), self.anchors_BA, "amax")
        return place_BT <= last_BT.gather(1, place_BT - self.positions_BT)

    def pairs_hidden(self) -> Tensor:
        """[B, A, T] bool: the pairs that an anchor does not see, later ones and other documents'."""
        place_T = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device)
        return (place_T > self.anchors_BA[:, :, None]) | (place_T < self.document_starts()[:, :, None])

    def anchor_positions(self) -> Tensor:
        """[B, A] position of each anchor pair in its document."""
        return self.positions_BT.gather(1, self.anchors_BA)

    def documents_used(self) -> Tensor:
        """How many documents have an anchor."""
        first_BA = torch.where(self.anchor_mask_BA, self.document_starts(), -1)
        return torch.stack([(row.unique() >= 0).sum() for row in first_BA]).sum()

    def labels(self, num_draft_tokens: int) -> Tensor:
        """[B, A, K] the token that step k (1-based) predicts, at p + 1 + k; IGNORED past the end of the span."""
        ahead_K = torch.arange(2, num_draft_tokens + 2, device=self.ids_BT.device)
        place_BAK = self.anchors_BA[:, :, None] + ahead_K
        known = (place_BAK < self.ends_BA[:, :, None]) & self.anchor_mask_BA[:, :, None]
        batch_B11 = torch.arange(len(self.ids_BT), device=self.ids_BT.device)[:, None, None]
        labels = self.ids_BT[batch_B11, place_BAK.clamp(max=self.ids_BT.shape[1] - 1)]
        return torch.where(known, labels, IGNORED)

    def features_before_labels(self, num_draft_tokens: int, width: int) -> Tensor:
        """[B, A, K, width] the last tap at p + k, from which the target predicts step k's label.

        Past the end of a span, where no label is known, the rows mean nothing.
        """
        place_BAK = self.anchors_BA[:, :, None] + torch.arange(1, num_draft_tokens + 1, device=self.ids_BT.device)
        batch_B11 = torch.arange(len(self.ids_BT), device=self.ids_BT.device)[:, None, None]
        return self.features_BTF[:, :, -width:][batch_B11, place_BAK.clamp(max=self.ids_BT.shape[1] - 1)]

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The same batch on another device."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **{name: tensor.to(device) for name, tensor in given.items()})


@dataclass(frozen=True, kw_only=True)
class Document:
    """One sequence, and the anchors to train on."""

    ids_T: Tensor  # int64
    features_TF: Tensor  # T - 1 rows (the last token was never fed); any dtype
    anchors_A: Tensor  # int64, pair p of each
    ends_A: Tensor  # int64, the end of the span that each anchor's drafts continue


def pack_documents(documents: Sequence[Document], row_tokens: int, dtype: torch.dtype = torch.float32) -> TrainingBatch:
    """Lay documents, none cut, into the rows that first fit finds: of `row_tokens`, or of the longest document."""
    return lay_out(documents, first_fit([len(d.ids_T) for d in documents], row_tokens), dtype)


def pad_documents(documents: Sequence[Document], dtype: torch.dtype = torch.float32) -> TrainingBatch:
    """A row for every document, padded to the longest: for a trunk that knows nothing of documents."""
    return lay_out(documents, [[d] for d in range(len(documents))], dtype)


def lay_out(documents: Sequence[Document], rows: Sequence[Sequence[int]], dtype: torch.dtype) -> TrainingBatch:
    """The documents of each row (indices), one after another."""
    length = max(sum(len(documents[d].ids_T) for d in row) for row in rows)
    count = max(1, *(sum(len(documents[d].anchors_A) for d in row) for row in rows))
    shape, places = (len(rows), length), (len(rows), count)
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    features = torch.zeros((*shape, documents[0].features_TF.shape[1]), dtype=dtype)
    anchors, ends = torch.zeros(places, dtype=torch.int64), torch.zeros(places, dtype=torch.int64)
    mask = torch.zeros(places, dtype=torch.bool)
    for b, row in enumerate(rows):
        start = used = 0
        for document in (documents[d] for d in row):
            tokens, number = len(document.ids_T), len(document.anchors_A)
            ids[b, start : start + tokens] = document.ids_T
            positions[b, start : start + tokens] = torch.arange(tokens)
            features[b, start : start + len(document.features_TF)] = document.features_TF
            anchors[b, used : used + number] = document.anchors_A + start
            ends[b, used : used + number] = document.ends_A + start
            mask[b, used : used + number] = True
            start, used = start + tokens, used + number
        if used:
            anchors[b, used:], ends[b, used:] = anchors[b, used - 1], ends[b, used - 1]
    return TrainingBatch(
        ids_BT=ids, features_BTF=features, positions_BT=positions, anchors_BA=anchors, anchor_mask_BA=mask, ends_BA=ends
    )


def first_fit(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the lengths by row: each goes into the first row with room. A row holds `row_tokens`, or the longest
    length if that is more."""
    room = max(row_tokens, *lengths)
    rows: list[list[int]] = []
    left: list[int] = []
    for index, length in enumerate(lengths):
        row = next((r for r, free in enumerate(left) if free >= length), None)
        if row is None:
            rows.append([])
            left.append(room)
            row = len(rows) - 1
        rows[row].append(index)
        left[row] -= length
    return rows


def anchor_places(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """(pairs p [N], the ends of their spans [N]): all places in a document where drafting happens.

    The first round of a request starts from the pair of the last prompt token and the first emitted one, and a pair is
    of use while the token after next is known: in a span [first, end), p runs from first - 1 to end - 3.
    """
    parts = [torch.arange(first - 1, max(first - 1, end - 2)) for first, end in spans]
    ends = [torch.full_like(part, end) for part, (_, end) in zip(parts, spans, strict=True)]
    empty = torch.empty(0, dtype=torch.int64)
    return torch.cat([empty, *parts]), torch.cat([empty, *ends])


def random_anchors(spans: Sequence[Span], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(pairs p [<= count], the ends of their spans): up to `count` distinct ones of a document, in order."""
    places, ends = anchor_places(spans)
    drawn = torch.randperm(len(places), generator=generator)[:count].sort().values
    return places[drawn], ends[drawn]
