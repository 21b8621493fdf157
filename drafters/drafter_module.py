"""What every trained drafter is made of: weights borrowed from the target, a draft vocabulary, what a trainer asks.

In: a training batch. Out: logits of all draft positions at all anchors over the draft vocabulary. Position k = 1..K of
an anchor at pair p predicts the token at p + 1 + k, for every kind of drafter (training_batch.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.packed_linear import PackedLinear, PackLinear, pack_linears
from drafters.target import SharedWeights
from drafters.training_batch import IGNORED, TrainingBatch


class DrafterConfig(Protocol):
    """What the config of any kind says."""

    @property
    def hidden_size(self) -> int: ...  # of the target (D)
    @property
    def vocab_size(self) -> int: ...  # of the target (V)
    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...  # tapped layers
    @property
    def num_draft_tokens(self) -> int: ...  # K, the drafts it is trained for
    @property
    def draft_vocab_size(self) -> int: ...  # W, the tokens that can be drafted


class DraftLogits(NamedTuple):
    """A training forward pass."""

    logits_BAKW: Tensor  # of every draft position over the draft vocabulary
    auxiliary: dict[str, Tensor]  # further losses by name (scalars, already weighted), added to the drafts' own


class DrafterModule(nn.Module):
    """What all kinds share: the borrowed weights, the draft vocabulary, labels, and what the trainer asks of them."""

    config: DrafterConfig
    draft_vocab_ids: Tensor  # int64 [draft_vocab_size], ascending token ids
    embedding_VD: Tensor
    embedding_scale: Tensor  # [1], by which the target multiplies its embeddings
    lm_head_WD: Tensor  # rows of the target's LM head for the draft vocabulary
    slot_weights_K: Tensor | None = None  # of auxiliary losses by draft position, as training sets them

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self._packed_head: PackedLinear | None = None
        self._scales_embedding = False
        self.register_buffer("draft_vocab_ids", torch.arange(config.draft_vocab_size))
        self.register_buffer("embedding_VD", torch.empty(0), persistent=False)
        self.register_buffer("embedding_scale", torch.ones(1), persistent=False)
        self.register_buffer("lm_head_WD", torch.empty(0), persistent=False)
        self.register_buffer("index_of_token_V", torch.empty(0, dtype=torch.int64), persistent=False)

    def bind(self, shared: SharedWeights) -> None:
        """Borrow the target's embedding and LM head; call again after `draft_vocab_ids` changed."""
        vocab_size, width = self.config.vocab_size, self.config.hidden_size
        if tuple(shared.embedding_VD.shape) != (vocab_size, width):
            raise ValueError(
                f"the target's embedding is {tuple(shared.embedding_VD.shape)}, the drafter was made for "
                f"({vocab_size}, {width}); load it with its own target"
            )
        self.embedding_VD = shared.embedding_VD
        self.embedding_scale = torch.full((1,), shared.embedding_scale, dtype=shared.embedding_VD.dtype)
        self._scales_embedding = shared.embedding_scale != 1
        whole = len(self.draft_vocab_ids) == vocab_size
        self.lm_head_WD = shared.lm_head_VD if whole else shared.lm_head_VD[self.draft_vocab_ids.cpu()].contiguous()
        index = torch.full((vocab_size,), IGNORED, dtype=torch.int64)
        index[self.draft_vocab_ids.cpu()] = torch.arange(len(self.draft_vocab_ids))
        self.index_of_token_V = index

    def bind_layers(self, target_path: Path) -> None:
        """Borrow what a kind needs of the target's layers, from the target's files. Call after `bind`."""

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., D] of token ids, as its first layer gets them."""
        embedded = F.embedding(tokens, self.embedding_VD)
        return embedded * self.embedding_scale if self._scales_embedding else embedded

    def scaled_embedding(self) -> Tensor:
        """[V, D] what `embed` gives for every token; a copy only if the target scales its embeddings."""
        return self.embedding_VD * self.embedding_scale if self._scales_embedding else self.embedding_VD

    def start_from_target(self) -> None:
        """Give fresh weights the values that follow from the target, where a kind has such. Call after `bind`."""

    def pack(self, pack: PackLinear) -> None:
        """Run all matrix products with another kernel from now on (inference only). Call after `bind`."""
        pack_linears(self, pack)
        self._packed_head = PackedLinear(self.lm_head_WD, None, pack)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., W] over the draft vocabulary from normalised hidden states [..., D], by the target's LM head."""
        return self._packed_head(hidden) if self._packed_head is not None else F.linear(hidden, self.lm_head_WD)

    def draft_labels(self, labels: Tensor) -> Tensor:
        """Token ids as indices into the draft vocabulary; IGNORED where unknown or outside it."""
        return torch.where(labels == IGNORED, IGNORED, self.index_of_token_V[labels.clamp(min=0)])

    def forward(self, batch: TrainingBatch) -> DraftLogits:
        """Logits of all draft positions at all anchors."""
        raise NotImplementedError

    @torch.no_grad()
    def propose(self, batch: TrainingBatch) -> Tensor:
        """The tokens [B, A, K] that the drafter would propose at every anchor, as it does in service."""
        return self.draft_vocab_ids[self(batch).logits_BAKW.argmax(dim=-1)]
