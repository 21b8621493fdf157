"""A Gemma 4 assistant: a small model without keys and values of its own, which attends to those of its target.

Pair p joins the target's features at position p with the verified token at p + 1, the anchor. Step k = 1..K predicts
the token at p + 1 + k from [scaled embedding of the token before it ; hidden]: hidden is the target's normalised last
hidden state at p, then the projected output of the step before. All steps stand at the anchor's position and see the
target's keys and values up to p, sliding layers the newest `sliding_window` + 1 of them. Reference: Gemma4Assistant in
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.gemma_assistant_kv import (
    BorrowedKV,
    ExactRotary,
    SharedLayer,
    gemma_norm,
    layer_tensors,
    target_text_config,
)
from drafters.packed_linear import PackLinear, pack_linears
from drafters.target import SharedWeights
from drafters.target_source import quiet_transformers
from drafters.training_batch import IGNORED, TrainingBatch

SLIDING = "sliding_attention"
MODEL_TYPE = "gemma4_assistant"


@dataclass(frozen=True, kw_only=True)
class GemmaAssistantConfig:
    """The assistant's own config, and what it takes to draft for one target with it."""

    published: Mapping[str, Any]  # config.json as its makers wrote it
    hidden_size: int  # of the target (D)
    vocab_size: int  # of both (V)
    num_target_layers: int
    shared_layers: Mapping[str, SharedLayer]  # by type of the assistant's layers
    num_draft_tokens: int  # K, the drafts it is trained for; it can go on

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Ascending: the layers below those whose keys and values are shared, and the last one."""
        return (*sorted(shared.layer - 1 for shared in self.shared_layers.values()), self.num_target_layers - 1)

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size


def transformers_config(published: Mapping[str, Any]) -> Any:
    """The config as transformers has it. Raises ValueError for one that it refuses, or a version that has no such."""
    try:
        from transformers import Gemma4AssistantConfig
    except ImportError:
        raise ValueError("needs a transformers that knows Gemma 4 assistants; install a newer one") from None
    try:
        with quiet_transformers():
            config = Gemma4AssistantConfig.from_dict(dict(published))
    except Exception as error:  # transformers raises several kinds for a config that it cannot make sense of
        raise ValueError(f"is no config of a Gemma 4 assistant ({' '.join(str(error).split())[:200]})") from None
    config._attn_implementation = "sdpa"
    return config


@dataclass(frozen=True)
class Sight:
    """What the rows [B, Q] of a step see, by layer type; the same in all steps of a round."""

    keys_values: dict[str, tuple[Tensor, Tensor]]  # of the target, [B, G, L, head_dim] each
    visible: Mapping[str, Tensor | None]  # bool [B, 1, 1 or Q, L]; None: everything
    angles: dict[str, tuple[Tensor, Tensor]]  # (cos, sin) [B, Q, head_dim] of the rows' positions


class _Layers(nn.Module):
    """The decoder layers and the norm behind them, under the names that checkpoints have."""

    def __init__(self, text_config: Any):
        from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextDecoderLayer

        super().__init__()
        count = text_config.num_hidden_layers
        self.layers = nn.ModuleList(Gemma4TextDecoderLayer(text_config, i) for i in range(count))
        self.norm = Gemma4RMSNorm(text_config.hidden_size, eps=text_config.rms_norm_eps)


class GemmaAssistant(DrafterModule):
    """The assistant's weights, its steps and its training pass; gemma_assistant_drafter.py serves it."""

    config: GemmaAssistantConfig
    final_norm_D: Tensor  # of the target

    def __init__(self, config: GemmaAssistantConfig):
        """Raises ValueError if transformers cannot make sense of the published config."""
        super().__init__(config)
        whole = transformers_config(config.published)
        text: Any = whole.get_text_config()
        self.model = _Layers(text)
        self.lm_head = nn.Linear(text.hidden_size, config.vocab_size, bias=False)
        self.pre_projection = nn.Linear(2 * config.hidden_size, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, config.hidden_size, bias=False)
        self.masked_embedding: Any = None
        if whole.use_ordered_embeddings:
            from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder

            self.masked_embedding = Gemma4AssistantMaskedEmbedder(whole)
        self.sliding_window = int(text.sliding_window)
        self._rotary = ExactRotary(text)
        self._target_eps = 1e-6
        self.register_buffer("final_norm_D", torch.ones(config.hidden_size), persistent=False)
        self.borrowed = nn.ModuleDict({kind: BorrowedKV(kind, at) for kind, at in config.shared_layers.items()})
        for layer in self.stack():  # the target's KV heads count, whatever the assistant's config says of its own
            shared = config.shared_layers[layer.self_attn.layer_type]
            layer.self_attn.num_key_value_groups = text.num_attention_heads // shared.num_key_value_heads

    def stack(self) -> list[Any]:
        """The decoder layers, of transformers."""
        return list(self.model.layers)

    def bind(self, shared: SharedWeights) -> None:
        super().bind(shared)
        self.final_norm_D, self._target_eps = shared.final_norm_D, shared.rms_eps

    def bind_layers(self, target_path: Path) -> None:
        """Borrow what makes keys and values in the shared layers. Raises ValueError if they do not fit."""
        text = target_text_config(target_path)
        rotary = ExactRotary(text)
        for kind, layer in self.borrowed.items():
            assert isinstance(layer, BorrowedKV)
            tensors = layer_tensors(target_path, self.config.shared_layers[kind].layer)
            like = self.embedding_VD
            layer.borrow({n: t.to(like.device, like.dtype) for n, t in tensors.items()}, rotary, text.rms_norm_eps)

    def pack(self, pack: PackLinear) -> None:
        if self.masked_embedding is None:
            pack_linears(self, pack)
            return
        head = self.lm_head  # an ordered embedding reads single rows of it
        del self.lm_head
        pack_linears(self, pack)
        self.lm_head = head

    # -- the parts that training and service share ---------------------------------------------------------------------

    def first_hidden(self, features: Tensor) -> Tensor:
        """[..., D] the target's last hidden state, normalised as its LM head gets it, from features [..., taps * D]."""
        return gemma_norm(features[..., -self.config.hidden_size :], self.final_norm_D, self._target_eps)

    def keys_values(self, features: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """By layer type, the target's keys and values [..., G, head_dim] at positions [...] with these features."""
        width, taps = self.config.hidden_size, self.config.target_layer_ids
        found = {}
        for kind, layer in self.borrowed.items():
            place = width * taps.index(self.config.shared_layers[kind].layer - 1)
            found[kind] = layer(features[..., place : place + width], positions)
        return found

    def angles(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary angles of queries at positions [B, Q]."""
        return {kind: self._rotary(kind, positions, self.embedding_VD.dtype) for kind in self.borrowed}

    def step(self, tokens: Tensor, hidden: Tensor, sight: Sight) -> Tensor:
        """Normalised output [B, Q, width] from the tokens [B, Q] before and hidden states [B, Q, D]."""
        x = self.pre_projection(torch.cat([self.embed(tokens), hidden], dim=-1))
        for layer in self.stack():
            kind = layer.self_attn.layer_type
            x = layer(
                x,
                shared_kv_states=sight.keys_values,
                position_embeddings=sight.angles[kind],
                attention_mask=sight.visible[kind],
                is_causal=False,  # rows of a step do not see each other, whatever is said of masks
            )
        return self.model.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of outputs [..., width], by the assistant's own LM head."""
        return self.lm_head(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V]. With an ordered embedding tokens outside the chosen clusters get one below the lowest inside."""
        scores = self.head(hidden)
        if self.masked_embedding is None:
            return scores
        chosen = self.masked_embedding.centroids(hidden)
        best = chosen.topk(self.masked_embedding.centroid_intermediate_top_k, dim=-1).indices
        inside = torch.zeros_like(chosen, dtype=torch.bool).scatter(-1, best, True)[..., self._cluster_of_token()]
        lowest = scores.detach().masked_fill(~inside, torch.inf).amin(dim=-1, keepdim=True) - 1
        return torch.where(inside, scores, lowest)

    def scores(self, hidden: Tensor) -> Tensor:
        """`logits` of a few rows [B, Q, width]: with an ordered embedding only the chosen clusters' are computed."""
        if self.masked_embedding is None:
            return self.head(hidden)
        return self.masked_embedding(hidden, self.lm_head.weight)

    def _cluster_of_token(self) -> Tensor:
        """int64 [V]."""
        order = self.masked_embedding.token_ordering.long()
        size = self.masked_embedding.vocab_size_per_centroid
        return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device) // size)

    # -- training ------------------------------------------------------------------------------------------------------

    def forward(self, batch: TrainingBatch) -> DraftLogits:
        """Logits of all steps at all anchors, each step fed with the target's token before it."""
        rows_B1 = torch.arange(len(batch.ids_BT), device=batch.ids_BT.device)[:, None]
        sight, last = self._training_sight(batch), batch.ids_BT.shape[1] - 1
        hidden_BAD = self.first_hidden(batch.features_BTF[rows_B1, batch.anchors_BA])
        outputs: list[Tensor] = []
        for k in range(self.config.num_draft_tokens):
            if k > 0:
                hidden_BAD = self.post_projection(outputs[-1])
            tokens_BA = batch.ids_BT[rows_B1, (batch.anchors_BA + 1 + k).clamp(max=last)]
            outputs.append(self.step(tokens_BA, hidden_BAD, sight))
        output_BAK = torch.stack(outputs, dim=2)
        return DraftLogits(self.logits(output_BAK), self._auxiliary(batch, output_BAK))

    @torch.no_grad()
    def _training_sight(self, batch: TrainingBatch) -> Sight:
        """Every anchor sees its own document up to its pair. What no anchor sees is not computed: there keys are 0."""
        seen_BT = batch.pairs_seen()
        made = self.keys_values(batch.features_BTF[seen_BT], batch.positions_BT[seen_BT])
        keys_values = {}
        for kind, parts in made.items():
            whole = [part.new_zeros((*seen_BT.shape, *part.shape[1:])).index_put((seen_BT,), part) for part in parts]
            keys_values[kind] = (whole[0].transpose(1, 2), whole[1].transpose(1, 2))
        visible_BAT = ~batch.pairs_hidden()
        place_T = torch.arange(batch.ids_BT.shape[1], device=seen_BT.device)
        near_BAT = visible_BAT & (batch.anchors_BA[:, :, None] - place_T <= self.sliding_window)
        visible: dict[str, Tensor | None] = {
            kind: (near_BAT if kind == SLIDING else visible_BAT)[:, None] for kind in made
        }
        return Sight(keys_values, visible, self.angles(batch.anchor_positions() + 1))

    def _auxiliary(self, batch: TrainingBatch, output_BAK: Tensor) -> dict[str, Tensor]:
        """Of an ordered embedding: the cross-entropy of the label's cluster, summed over steps like the drafts' own.

        Labels in clusters that were not chosen move nothing in the logits: this is what gets them chosen.
        """
        if self.masked_embedding is None:
            return {}
        labels_NK = batch.labels(self.config.num_draft_tokens).flatten(0, 1)
        known_NK = labels_NK != IGNORED
        cluster_NK = torch.where(known_NK, self._cluster_of_token()[labels_NK.clamp(min=0)], IGNORED)
        scores = self.masked_embedding.centroids(output_BAK.flatten(0, 1)).float()
        loss_NK = F.cross_entropy(
            scores.flatten(0, 1), cluster_NK.flatten(), ignore_index=IGNORED, reduction="none"
        ).view(labels_NK.shape)
        if self.slot_weights_K is not None:
            loss_NK = loss_NK * self.slot_weights_K.to(loss_NK)
        labels_K = known_NK.sum(dim=0) if batch.step_labels_K is None else batch.step_labels_K
        return {"clusters": (loss_NK.sum(dim=0) / labels_K.clamp(min=1)).sum()}
