"""The target's own MTP layers as a drafter that can be trained on: N layers, each for the token one further ahead.

Indexing as for every kind: pair p joins the target's features at p with the token at p + 1. Layer i = 0..N-1 has a row
for every pair: it joins the embedding of the token at p + 1 + i with what layer i - 1 put out for the pair (layer 0:
the target's last hidden state, normalised as for its LM head), stands at position p + 1 + i, sees the rows up to its
own, and predicts the token at p + 2 + i, which is step k = i + 1. Source: DeepSeek-V3 (arXiv 2412.19437) and
transformers' `MtpModel`, whose layers these are.

A lone layer (N = 1) drafts further by being applied again, as vLLM does it: step k > 1 takes the token that step k - 1
drafted and that step's output (normalised, as it goes from layer to layer where there are several), one position on.
Several layers draft N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters import config_keys as keys
from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.own_mtp_layers import CacheWidths, cache_argument, empty_layers, rope_options, windows
from drafters.target import SharedWeights
from drafters.training_batch import TrainingBatch

ARCHITECTURE = "DraftloopOwnMtpModel"


@dataclass(frozen=True, kw_only=True)
class OwnMtpConfig:
    """What a drafter of a target's own MTP layers adds to the target's config, which says all else."""

    hidden_size: int  # of the target (D)
    vocab_size: int  # of the target (V)
    target_layer_ids: tuple[int, ...]  # the target's last layer
    num_draft_tokens: int  # K, the drafts it is trained for
    draft_vocab_size: int  # V: all tokens
    num_mtp_layers: int  # N
    cache_widths: CacheWidths  # by layer, of what is kept for a token: heads and width of keys, and of values

    def __post_init__(self) -> None:
        if self.num_mtp_layers > 1 and self.num_draft_tokens > self.num_mtp_layers:
            raise ValueError(f"has num_draft_tokens {self.num_draft_tokens} with {self.num_mtp_layers} MTP layers")
        if [len(widths) for widths in self.cache_widths] != [4] * self.num_mtp_layers:
            raise ValueError(f"has cache_widths that are not four numbers for each of {self.num_mtp_layers} MTP layers")

    def to_json(self) -> dict[str, Any]:
        """The config as plain JSON values."""
        widths = [list(widths) for widths in self.cache_widths]
        return asdict(self) | {"target_layer_ids": list(self.target_layer_ids), "cache_widths": widths}


def config_from_json(raw: dict[str, Any]) -> OwnMtpConfig:
    """The reverse of `to_json`. Raises ValueError, naming what is wrong."""
    checks: dict[str, keys.Check] = {field.name: keys.is_count for field in fields(OwnMtpConfig)}
    checks["target_layer_ids"] = keys.is_list_of(keys.is_natural)
    checks["cache_widths"] = keys.is_list_of(keys.is_list_of(keys.is_count))
    raw = keys.take_keys(raw, checks, {})
    widths = tuple(tuple(widths) for widths in raw["cache_widths"])
    return OwnMtpConfig(**raw | {"target_layer_ids": tuple(raw["target_layer_ids"]), "cache_widths": widths})


class OwnMtpModule(DrafterModule):
    """The layers, which are on the meta device until a state dict is loaded. `target_config` is the whole target's."""

    config: OwnMtpConfig

    def __init__(self, config: OwnMtpConfig, target_config: Any):
        super().__init__(config)
        model, self.rotary_emb = empty_layers(target_config)
        self.layers = model.layers
        self.shared_post_norm = model.shared_post_norm if model.use_shared_post_norm else None
        self.windows = windows(model.config, config.num_mtp_layers)
        self.rms_eps = float(model.config.rms_norm_eps)
        self._rope_options = [rope_options(model, i) for i in range(config.num_mtp_layers)]
        self._takes_flags = model.config._attn_implementation == "sdpa"  # others want masks that are added
        self._cache_argument = cache_argument()
        self.register_buffer("final_norm_D", torch.ones(config.hidden_size), persistent=False)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """The first weights are taken as they are, since there is nothing to copy them into."""
        bare = any(parameter.is_meta for parameter in self.parameters())
        return super().load_state_dict(state_dict, strict, assign or bare)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnMtpModule:
        parts = ("layers.", "rotary_emb.")  # angles and routing biases keep their precision, whatever the weights' is
        exact = {name: buffer for name, buffer in self.named_buffers() if name.startswith(parts)}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, buffer.to(self.get_buffer(name).device))
        return self

    def bind(self, shared: SharedWeights) -> None:
        super().bind(shared)
        self.final_norm_D = shared.final_norm_D

    # -- the parts that training and service share ---------------------------------------------------------------------

    def enter(self, features: Tensor) -> Tensor:
        """What layer 0 takes as hidden states [..., D]: the target's own final norm of its last layer's output."""
        return F.rms_norm(features, (self.config.hidden_size,), self.final_norm_D, self.rms_eps)

    def run_layer(
        self, index: int, tokens_BW: Tensor, hidden_BWD: Tensor, positions_BW: Tensor, seen_BWL: Tensor, cache: Any
    ) -> Tensor:
        """A layer over W rows: [B, W, D], which the LM head reads and the next layer takes.

        `cache` takes the rows' keys and values and hands back the L that `seen_BWL` (bool) speaks of; None: the rows'.
        """
        embedded = F.embedding(tokens_BW, self.embedding_VD)
        angles = None
        if self.rotary_emb is not None:
            angles = self.rotary_emb(embedded, position_ids=positions_BW, **self._rope_options[index])
        mask = seen_BWL[:, None]
        if not self._takes_flags:
            mask = torch.zeros_like(mask, dtype=embedded.dtype).masked_fill(~mask, float("-inf"))
        out = self.layers[index](
            embedded,
            hidden_BWD,
            position_embeddings=angles,
            attention_mask=mask,
            position_ids=positions_BW,
            **{self._cache_argument: cache},
        )
        return out if self.shared_post_norm is None else self.shared_post_norm(out)

    # -- training ------------------------------------------------------------------------------------------------------

    def forward(self, batch: TrainingBatch) -> DraftLogits:
        """Every step takes the target's own token where service takes the draft before it: the two are one as long as
        drafts are accepted."""
        rows_B1 = torch.arange(len(batch.ids_BT), device=batch.ids_BT.device)[:, None]
        place_T = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device)
        begin_BT = place_T - batch.positions_BT
        behind_TT = place_T[:, None] - place_T
        seen_BTT = (begin_BT[:, :, None] == begin_BT[:, None, :]) & (behind_TT >= 0)
        layers, steps = self.config.num_mtp_layers, self.config.num_draft_tokens
        cache = GrowingCache() if steps > layers else None
        hidden, outputs = self.enter(batch.features_BTF), []
        for i in range(min(layers, steps)):
            seen = seen_BTT & within(self.windows[i], behind_TT)
            tokens_BT = batch.ids_BT.roll(-1 - i, dims=1)  # past a document's end they are no one's, and no anchor's
            hidden = self.run_layer(i, tokens_BT, hidden, batch.positions_BT + 1 + i, seen, cache)
            outputs.append(hidden[rows_B1, batch.anchors_BA])
        for step in range(layers + 1, steps + 1):
            outputs.append(self._again(batch, step, outputs[-1], cache))
        return DraftLogits(self.head(torch.stack(outputs, dim=2)), {})

    def _again(self, batch: TrainingBatch, step: int, hidden_BAD: Tensor, cache: Any) -> Tensor:
        """Step 2, 3, .. of a lone layer: each anchor sees the pairs up to its own, and its own earlier steps."""
        anchors, length = batch.anchors_BA, batch.ids_BT.shape[1]
        rows_B1 = torch.arange(len(anchors), device=anchors.device)[:, None]
        place_T = torch.arange(length, device=anchors.device)
        behind_BAT = (anchors + step - 1)[:, :, None] - place_T
        own_BAA = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).expand(len(anchors), -1, -1)
        window = self.windows[0]
        seen = [~batch.pairs_hidden() & within(window, behind_BAT)]
        seen += [own_BAA & (window is None or step - past < window) for past in range(2, step + 1)]
        tokens_BA = batch.ids_BT[rows_B1, (anchors + step).clamp(max=length - 1)]
        return self.run_layer(0, tokens_BA, hidden_BAD, batch.anchor_positions() + step, torch.cat(seen, dim=2), cache)


def within(window: int | None, behind: Tensor) -> Tensor:
    """Which keys so many places behind their query it may see, as far as the window goes."""
    return torch.ones_like(behind, dtype=torch.bool) if window is None else behind < window


class GrowingCache:
    """Keys and values of one layer's passes over a batch, one after another: each pass sees those before it too."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, key_BHWD: Tensor, value_BHWD: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """As decoder layers of transformers call it."""
        self._keys.append(key_BHWD)
        self._values.append(value_BHWD)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)
