"""The recursive MTP head on the native kernels: one call a round takes note of the new pairs and drafts K tokens.

In: a bound `RecursiveHead`, whose weights are packed in bfloat16 at construction. Out: a `Drafter` that proposes its
argmax. A sequence's drafts do not depend on the company: the kernels sum in one fixed order.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from drafters.draft_tree import MAX_TREE_NODES
from drafters.drafter import DraftReply, DraftRequest, empty_reply
from drafters.mtp import MtpConfig, RecursiveHead
from drafters.mtp_drafter import MAX_DRAFT_TOKENS, MAX_FRONTIER
from drafters.pair_ledger import PairLedger
from serving.engine import native_build
from serving.engine.native_memory import Arena, aligned, kv_buffers, kv_slot_bytes
from serving.engine.native_pack import (
    DraftTaskStruct,
    LayerStruct,
    ModelStruct,
    Packer,
    RecursiveHeadStruct,
    declare,
    interleave,
)


class NativeRecursiveDrafter:
    """`Drafter` over the native library. Raises native_build.NativeBuildError when there is none.

    Weights are bfloat16 unless `dtype` says float32: half the bytes, and what is only proposed need not be exact.
    """

    def __init__(
        self,
        module: RecursiveHead,
        *,
        num_threads: int,
        name: str = "mtp-recursive",
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
        dtype: torch.dtype = torch.bfloat16,
        isa: str | None = None,
    ):
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self.max_draft_tokens = max_draft_tokens
        self.max_tree_nodes = MAX_TREE_NODES
        self._config = module.config
        self._frequency = module.inverse_frequency.detach().cpu()
        self._num_threads = num_threads
        self._library = declare(native_build.load(isa))
        self._packer = Packer(dtype)
        self._layer = (LayerStruct * 1)(_pack_layer(self._packer, module))
        self._struct = self._pack(module)
        self._slots = Arena()
        self._ledger = PairLedger(0)
        self._workspace = torch.empty(0)

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Room for every slot's pairs, and for drafts that reach past a full slot."""
        config, capacity = self._config, max_len + self.max_draft_tokens * MAX_FRONTIER
        self._slots = Arena()
        keys, values = kv_buffers(
            self._slots, (1, num_slots, config.num_key_value_heads), max_len=capacity, head_dim=config.head_dim
        )
        self._layer[0].keys, self._layer[0].values = keys.data_ptr(), values.data_ptr()
        cos, sin = _rope_tables(self._slots, self._frequency, capacity)
        model = self._struct.model
        model.num_slots, model.max_len, model.cos, model.sin = num_slots, capacity, cos.data_ptr(), sin.data_ptr()
        floats = self._library.draftloop_draft_workspace_floats(ctypes.byref(self._struct), self._num_threads)
        self._workspace = torch.zeros(floats + 16)
        self._kept = (keys, values, cos, sin)
        self._ledger = PairLedger(num_slots)

    @staticmethod
    def slot_bytes(config: MtpConfig, max_len: int) -> int:
        """Bytes of keys and values that `allocate` takes for a slot."""
        capacity = max_len + MAX_DRAFT_TOKENS * MAX_FRONTIER
        return kv_slot_bytes((1, config.num_key_value_heads), max_len=capacity, head_dim=config.head_dim)

    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. Raises ValueError if pairs are missing or more drafts are asked for than there is room."""
        steps = request.num_draft_tokens
        if steps > self.max_draft_tokens:
            raise ValueError(f"{steps} drafts asked for, this drafter makes at most {self.max_draft_tokens}")
        assert request.features_NF is not None
        self._ledger.note(request)
        counts = np.array(request.counts)
        slots_N = np.repeat(np.array(request.slots, dtype=np.int64), counts)
        before = np.repeat(counts.cumsum() - counts, counts)
        positions_N = np.repeat(np.array(request.starts, dtype=np.int64), counts) + np.arange(len(slots_N)) - before
        tokens_N = request.tokens_N.contiguous()
        features_NF = request.features_NF.detach().to("cpu", torch.float32).contiguous()
        if len(tokens_N) != len(slots_N):
            raise ValueError(f"{len(tokens_N)} tokens for {len(slots_N)} pairs")
        if features_NF.shape != (len(slots_N), len(self.target_layer_ids) * self._config.hidden_size):
            raise ValueError(f"features of shape {tuple(features_NF.shape)} for {len(slots_N)} pairs")
        nodes = min(request.tree_nodes, MAX_TREE_NODES)
        out = _Out.make(len(counts), nodes or steps)
        task = DraftTaskStruct(
            tokens_N.data_ptr(), slots_N.ctypes.data, positions_N.ctypes.data, features_NF.data_ptr(),
            len(slots_N), len(counts), steps, nodes, *(part.data_ptr() for part in out),
        )  # fmt: skip
        bad = ctypes.c_int64()
        error = self._library.draftloop_draft(
            ctypes.byref(self._struct), ctypes.byref(task), aligned(self._workspace), self._num_threads,
            ctypes.byref(bad),
        )  # fmt: skip
        if error:
            wrong = ("", "token id", "slot", "position", "order of the slots' rows", "number of sequences")[error]
            raise ValueError(f"pair {bad.value} does not fit the drafter: {wrong}")
        if steps == 0:
            return empty_reply(len(counts))
        return out.trees() if nodes else DraftReply(tokens_BK=out.drafts_BK)

    def _pack(self, module: RecursiveHead) -> RecursiveHeadStruct:
        config, packer = module.config, self._packer
        self._embedding_VD = module.scaled_embedding().detach().to("cpu", torch.float32).contiguous()
        self._token_of_W = module.draft_vocab_ids.detach().to("cpu", torch.int64).contiguous()
        model = ModelStruct(
            layers=self._layer,
            num_layers=1,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab=len(self._token_of_W),
            head=packer.linear(module.lm_head_WD),
            final_norm=packer.vector(module.norm.weight),
            eps=config.rms_eps,
            bf16=packer.dtype == torch.bfloat16,
        )
        return RecursiveHeadStruct(
            model=model,
            fuse=packer.linear(module.fc.weight),
            enter=packer.linear(module.input_proj.weight),
            tap_norm=packer.vector(module.tap_norm),
            embedding_norm=packer.vector(module.embedding_norm.weight),
            hidden_norm=packer.vector(module.hidden_norm.weight),
            embedding=self._embedding_VD.data_ptr(),
            token_of=self._token_of_W.data_ptr(),
            taps=len(config.target_layer_ids),
            num_tokens=config.vocab_size,
        )


class _Out(NamedTuple):
    """What the native call writes, in the order of its struct."""

    drafts_BK: torch.Tensor
    parents_BK: torch.Tensor
    counts_B: torch.Tensor
    confidence_BK: torch.Tensor

    @classmethod
    def make(cls, batch: int, width: int) -> _Out:
        ids = torch.zeros((2, batch, width), dtype=torch.int64)
        return cls(ids[0], ids[1], torch.zeros(batch, dtype=torch.int64), torch.zeros((batch, width)))

    def trees(self) -> DraftReply:
        return DraftReply(
            tokens_BK=self.drafts_BK,
            counts=self.counts_B.tolist(),
            parents_BK=self.parents_BK,
            confidence_BK=self.confidence_BK,
        )


def _pack_layer(packer: Packer, module: RecursiveHead) -> LayerStruct:
    gate, up = module.gate_up_proj.weight.chunk(2)
    pad = -module.config.intermediate_size % 16  # gates and ups come in sixteens, see native_pack.interleave
    return LayerStruct(
        qkv=packer.linear(torch.cat([module.q_proj.weight, module.kv_proj.weight])),
        o=packer.linear(module.o_proj.weight),
        gate_up=packer.linear(interleave([gate, up])),
        down=packer.linear(torch.nn.functional.pad(module.down_proj.weight, (0, pad))),
        attention_norm=packer.vector(module.attention_norm.weight),
        mlp_norm=packer.vector(module.mlp_norm.weight),
        tap=-1,
    )


def _rope_tables(arena: Arena, frequency: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, head_dim / 2] in float32, as `RecursiveHead.rotate` computes them."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    tables = []
    for values in (angles.cos(), angles.sin()):
        kept = arena.zeros(values.shape, torch.float32)
        kept.copy_(values)
        tables.append(kept)
    return tables[0], tables[1]
