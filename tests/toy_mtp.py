"""MTP drafters for the toy target, its continuations as training sequences, and a drafter that is overheard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from drafters.checkpoint import as_drafter, save_checkpoint
from drafters.drafter import DraftReply, DraftRequest
from drafters.drafter_module import DrafterModule
from drafters.mtp import IndependentHeads, MtpConfig, RecursiveHead, make_mtp
from drafters.target import SharedWeights, shared_weights, target_fingerprint
from drafters.training_batch import TrainingBatch
from pipelines.pack_source import memory_source
from pipelines.step_config import StepConfig
from pipelines.training import Trainer
from pipelines.training_sequence import TrainingSequence

TAPS = (0, 1)


def toy_mtp_config(kind: str = "recursive", **changes: Any) -> MtpConfig:
    """Fits `tests.toy_target.toy_model`; `changes` override fields."""
    fields: dict[str, Any] = {
        "kind": kind,
        "hidden_size": 32,
        "vocab_size": 256,
        "target_layer_ids": TAPS,
        "num_draft_tokens": 3,
        "draft_vocab_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rms_eps": 1e-6,
    }
    return MtpConfig(**(fields | changes))


def shared_of(model: LlamaForCausalLM) -> SharedWeights:
    """What drafters borrow from a target in memory."""
    head = model.get_output_embeddings().weight.detach()
    return SharedWeights(model.model.embed_tokens.weight.detach(), head, model.model.norm.weight.detach(), 1e-6)


def toy_mtp(
    model: LlamaForCausalLM,
    kind: str = "recursive",
    vocab_ids: Sequence[int] | None = None,
    seed: int = 0,
    **changes: Any,
) -> RecursiveHead | IndependentHeads:
    """A drafter with random weights everywhere (fresh ones start as the identity), bound to `model`."""
    if vocab_ids is not None:
        changes["draft_vocab_size"] = len(vocab_ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = make_mtp(toy_mtp_config(kind, **changes))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    if vocab_ids is not None:
        module.draft_vocab_ids.copy_(torch.tensor(vocab_ids))
    module.bind(shared_of(model))
    return module.eval()


def features_of(model: LlamaForCausalLM, ids: Sequence[int], taps: Sequence[int] = TAPS) -> Tensor:
    """[T, taps * D] outputs of the tapped layers in a plain forward pass of a model that no engine has taken."""
    caught: list[Tensor] = []
    hooks = [
        model.model.layers[layer].register_forward_hook(
            lambda _m, _a, out: caught.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in taps
    ]
    with torch.no_grad():
        model(torch.tensor([list(ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([c.reshape(len(ids), -1) for c in caught], dim=-1)


def rows_of(ids_BT: Tensor, features_BTF: Tensor, anchors_BA: Tensor, lengths_B: Tensor | None = None) -> TrainingBatch:
    """A training batch with one document a row, which the target wrote to its end."""
    lengths_B = torch.full((len(ids_BT),), ids_BT.shape[1]) if lengths_B is None else lengths_B
    place_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    return TrainingBatch(
        ids_BT=ids_BT,
        features_BTF=features_BTF,
        positions_BT=place_BT * (place_BT < lengths_B[:, None]),
        anchors_BA=anchors_BA,
        anchor_mask_BA=torch.ones_like(anchors_BA, dtype=torch.bool),
        ends_BA=lengths_B[:, None].expand_as(anchors_BA),
    )


def sequence_of(model: LlamaForCausalLM, ids: Sequence[int], prompt_len: int) -> TrainingSequence:
    """A rollout in memory, with features in float32."""
    return TrainingSequence(torch.tensor(list(ids)), prompt_len, features_of(model, ids)[:-1])


def continued(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[TrainingSequence]:
    """The target's own greedy continuations, one sequence per prompt."""
    out = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([list(prompt)]), max_new_tokens=max_new_tokens, do_sample=False)[0]
        out.append(sequence_of(model, ids.tolist(), len(prompt)))
    return out


def toy_trainer(
    module: DrafterModule,
    sequences: Sequence[TrainingSequence],
    held_out: Sequence[TrainingSequence],
    config: StepConfig,
    *,
    workers: int = 1,
    **options: Any,
) -> Trainer:
    """A trainer on sequences in memory."""
    return Trainer(module, memory_source(sequences, config.order(workers)), held_out, config, **options)


def tokens_of(sequences: Sequence[TrainingSequence]) -> int:
    """A step of so many tokens is an epoch."""
    return sum(len(s.ids) for s in sequences)


class Overheard:
    """A drafter that notes, by (slot, epoch), what it was told and at which pair it proposed which tokens."""

    def __init__(self, module: RecursiveHead | IndependentHeads):
        self.inner = as_drafter(module)
        self.name = self.inner.name
        self.target_layer_ids = self.inner.target_layer_ids
        self.max_draft_tokens = self.inner.max_draft_tokens
        self.max_tree_nodes = self.inner.max_tree_nodes
        self.told: dict[tuple[int, int], list[int]] = {}  # verified tokens so far
        self.rounds: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}  # (anchor pair p, drafts)

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.inner.allocate(num_slots, max_len)

    def draft(self, request: DraftRequest) -> DraftReply:
        reply = self.inner.draft(request)
        parts = request.tokens_N.split(request.counts)
        for i, key in enumerate(zip(request.slots, request.epochs, strict=True)):
            begun = self.told.get((key[0], request.reused_epoch(i)), [request.first_tokens[i]])
            self.told.setdefault(key, begun[: request.starts[i] + 1]).extend(parts[i].tolist())
            anchor = request.starts[i] + request.counts[i] - 1
            self.rounds.setdefault(key, []).append((anchor, reply.tokens_BK[i].tolist()))
        return reply

    def rounds_of(self, ids: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The rounds of the sequence that begins with `ids`, or that `ids` goes on from."""
        keys = [key for key, told in self.told.items() if all(a == b for a, b in zip(told, ids, strict=False))]
        assert len(keys) == 1, "prompts must differ"
        return self.rounds[keys[0]]


def save_toy_drafter(folder: Path, target_path: Path, kind: str = "recursive") -> Path:
    """A checkpoint with random weights for the toy target in `target_path`."""
    shared = shared_weights(target_path, torch.float32)
    vocab_size = len(shared.embedding_VD)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make_mtp(toy_mtp_config(kind, vocab_size=vocab_size, draft_vocab_size=vocab_size))
    module.bind(shared)
    save_checkpoint(folder, module, {"target_fingerprint": target_fingerprint(target_path, TAPS)})
    return folder
