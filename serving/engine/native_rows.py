"""The `native` backend: rows through a C++ forward for Llama- and Qwen-like targets on x86 CPUs.

In: a Hugging Face causal LM, whose weights are packed at construction, then passes of rows. Out: logits, features.
Every output element is summed in one fixed order: a row's logits are the same bits alone and in any company.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from serving.engine import native_build
from serving.engine.native_linear import threads_for
from serving.engine.native_memory import Arena, aligned, kv_buffers
from serving.engine.native_pack import (
    LayerStruct,
    ModelStruct,
    Packer,
    PassStruct,
    StateDict,
    check_dtype,
    declare,
    pack_layer,
)
from serving.engine.rows import Move, Rows, RowsOutput, check_moves

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies never change


class NativeRows:
    """A target with its KV slots, run by the native forward. Keeps no reference to `model`.

    One call at a time per instance; several instances and threads are fine. `num_threads` None: torch's number, fewer
    for a tiny target. `isa` forces a lower instruction set level (native_build). Raises ValueError for a target that
    cannot run here and native_build.NativeBuildError when there is no library.
    """

    name = "native"
    device = torch.device("cpu")
    wants_equal_runs = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        num_slots: int,
        max_len: int,
        target_layer_ids: tuple[int, ...] = (),
        num_threads: int | None = None,
        isa: str | None = None,
    ):
        config = model.config
        _check(config, dtype, num_slots, max_len, target_layer_ids, num_threads)
        self._library = declare(native_build.load(isa))
        self.dtype, self.num_slots, self.max_len = dtype, num_slots, max_len
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.target_layer_ids = tuple(target_layer_ids)
        self._packer = Packer(dtype)
        lanes = (config.num_hidden_layers, num_slots, config.num_key_value_heads)
        self._keys, self._values = kv_buffers(Arena(), lanes, max_len=max_len, head_dim=_head_dim(config))
        self._layers, self._struct = self._pack(model)
        self.native_threads: int | None = num_threads or threads_for(self._packer.arena.bytes)
        floats = self._library.draftloop_workspace_floats(ctypes.byref(self._struct), self.native_threads)
        self._workspace = torch.zeros(floats + 16)
        self._logits, self._features = torch.empty(0), torch.empty(0)

    @staticmethod
    def unsupported_reason(config: Any) -> str | None:
        """Why a target with this config cannot run natively, in one line; None if it can."""
        rope = getattr(config, "rope_parameters", None) or {}
        experts = [
            name for name in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(config, name, 0)
        ]
        capped = [name for name in ("attn_logit_softcapping", "final_logit_softcapping") if getattr(config, name, None)]
        quantised = getattr(config, "quantization_config", None)
        if config.model_type not in _MODEL_TYPES:
            return f"model type {config.model_type} is not one of {', '.join(_MODEL_TYPES)}"
        if config.hidden_act not in ("silu", "swish"):
            return f"activation {config.hidden_act} is not silu"
        if experts:
            return f"mixture of experts ({experts[0]}={getattr(config, experts[0])})"
        if capped:
            return f"soft-capping ({capped[0]}={getattr(config, capped[0])})"
        if _window(config) < config.max_position_embeddings:
            return f"sliding-window attention ({_window(config)} of {config.max_position_embeddings} tokens)"
        if rope.get("rope_type", "default") not in _ROPE_TYPES:
            return f"rope type {rope['rope_type']} is not one of {', '.join(_ROPE_TYPES)}"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return f"rope over a part of the head (partial_rotary_factor={rope['partial_rotary_factor']})"
        if _head_dim(config) % 2:
            return f"odd head_dim {_head_dim(config)}"
        if quantised and _quant_method(quantised) != "gguf":  # GGUF weights are de-quantised when loaded
            return f"quantised weights ({_quant_method(quantised)})"
        return None

    def kv_bytes(self) -> int:
        """Bytes that the KV slots take."""
        return self._keys.nbytes + self._values.nbytes

    def forward(self, rows: Rows) -> RowsOutput:
        """Run the rows through the target. Raises ValueError, before anything is written, for rows out of range."""
        ids, slots, positions = (_int64(t) for t in (rows.ids_R, rows.slots_R, rows.positions_R))
        parents = None if rows.parents_R is None else _int64(rows.parents_R)
        if not len(ids) == len(slots) == len(positions) == len(positions if parents is None else parents):
            raise ValueError(f"{len(ids)} ids, {len(slots)} slots and {len(positions)} positions: give as many of each")
        wanted = torch.arange(len(ids)) if rows.logit_rows is None else _int64(rows.logit_rows)
        taps = len(self.target_layer_ids) * self.hidden_size
        self._logits, logits_NV = _reuse(self._logits, len(wanted), self.vocab_size)
        best_N = torch.zeros(len(wanted), dtype=torch.int64)
        wants_features = bool(taps) and rows.with_features
        self._features, features_RF = _reuse(self._features, len(ids) if wants_features else 0, taps)
        task = PassStruct(
            *(t.data_ptr() for t in (ids, slots, positions)), None if parents is None else parents.data_ptr(),
            wanted.data_ptr(), len(ids), len(wanted),
            logits_NV.data_ptr(), features_RF.data_ptr() if wants_features else None, best_N.data_ptr(),
        )  # fmt: skip
        bad = ctypes.c_int64()
        error = self._library.draftloop_forward(
            ctypes.byref(self._struct),
            ctypes.byref(task),
            aligned(self._workspace),
            self.native_threads,
            ctypes.byref(bad),
        )
        if error:
            raise ValueError(self._explain(error, bad.value, ids, slots, positions, wanted))
        return RowsOutput(logits_NV=logits_NV, features_RF=features_RF if wants_features else None, best_N=best_N)

    def move_entries(self, moves: Sequence[Move]) -> None:
        """See `RowsBackend`."""
        check_moves(self, moves)
        for slot, start, entries in moves:
            moved = torch.tensor(entries, dtype=torch.int64)
            self._library.draftloop_move_entries(
                ctypes.byref(self._struct), slot, start, moved.data_ptr(), len(entries)
            )

    def _explain(self, error: int, i: int, ids: Tensor, slots: Tensor, positions: Tensor, wanted: Tensor) -> str:
        if error == 1:
            return f"row {i}: token id {ids[i]} is outside the vocabulary of {self.vocab_size}"
        if error == 2:
            return f"row {i}: slot {slots[i]} is not one of the {self.num_slots} slots"
        if error == 3:
            return f"row {i}: position {positions[i]} is outside a slot of {self.max_len} tokens"
        if error == 4:
            return f"row {i}: the rows of slot {slots[i]} must lie together, each one position past the row it follows"
        return f"logit row {wanted[i]} is not one of the {len(ids)} rows, or not ascending"

    def _pack(self, model: PreTrainedModel) -> tuple[ctypes.Array[LayerStruct], ModelStruct]:
        config, packer = model.config, self._packer
        state = StateDict(model.state_dict())
        layers = (LayerStruct * config.num_hidden_layers)()
        for i in range(config.num_hidden_layers):
            layers[i] = pack_layer(packer, state, f"model.layers.{i}")
            layers[i].keys, layers[i].values = self._keys[i].data_ptr(), self._values[i].data_ptr()
            layers[i].tap = self.target_layer_ids.index(i) if i in self.target_layer_ids else -1
        embedding, head = state.take("model.embed_tokens.weight"), state.find("lm_head.weight")
        tied = head is None or head.data_ptr() == embedding.data_ptr()
        cos, sin = _rope_tables(model, self.max_len)
        struct = ModelStruct(
            layers=layers,
            num_layers=len(layers),
            width=self.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            vocab=self.vocab_size,
            num_slots=self.num_slots,
            max_len=self.max_len,
            taps=len(self.target_layer_ids),
            embedding=None if tied else packer.keep(embedding.detach().to(self.dtype)),
            head=packer.linear(embedding if head is None else head, state.find("lm_head.bias")),
            final_norm=packer.vector(state.take("model.norm.weight")),
            cos=packer.vector(cos),
            sin=packer.vector(sin),
            eps=config.rms_norm_eps,
            bf16=self.dtype == torch.bfloat16,
        )
        if state.tensors:
            raise ValueError(f"the target has weights that the native backend does not know: {min(state.tensors)}")
        return layers, struct


def _check(
    config: Any, dtype: torch.dtype, num_slots: int, max_len: int, taps: tuple[int, ...], num_threads: int | None
) -> None:
    reason = NativeRows.unsupported_reason(config)
    if reason:
        raise ValueError(f"the native backend cannot run this target: {reason}")
    check_dtype(dtype)
    if num_slots < 1 or max_len < 1 or (num_threads is not None and num_threads < 1):
        raise ValueError(f"num_slots {num_slots}, max_len {max_len}, num_threads {num_threads}: give 1 or more")
    if max_len > _window(config):
        raise ValueError(f"max_len {max_len} reaches past the target's sliding window of {_window(config)} tokens")
    if len(set(taps)) != len(taps) or any(not 0 <= i < config.num_hidden_layers for i in taps):
        raise ValueError(f"target_layer_ids {taps}: give different layers of 0 to {config.num_hidden_layers - 1}")


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _window(config: Any) -> float:
    """Tokens that attention reaches back; infinite without a sliding window."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not window or (layer_types and "sliding_attention" not in layer_types):
        return math.inf
    return window


def _quant_method(quantised: Any) -> str:
    found = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    return str(getattr(found, "value", found))


def _rope_tables(model: PreTrainedModel, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin [max_len, head_dim / 2], as the target's own rotary module computes them."""
    rotary = model.model.rotary_emb
    freqs = torch.arange(max_len, dtype=torch.float32)[:, None] * rotary.inv_freq.detach().cpu().float()[None, :]
    return freqs.cos() * rotary.attention_scaling, freqs.sin() * rotary.attention_scaling


def _int64(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.int64).contiguous()


def _reuse(buffer: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """The buffer, grown if it was too small, and its first rows * width elements as a matrix."""
    if buffer.numel() < rows * width:
        buffer = torch.empty(rows * width)
    return buffer, buffer[: rows * width].view(rows, width)
