"""The `torch` backend: any Hugging Face decoder with full or sliding-window attention, on CPU or GPU.

The model's own modules do everything but attention, which is replaced by `slot_attention`: it writes the rows' keys and
values into the slots and lets every row attend to its own slot. Source of the hook: transformers' AttentionInterface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.packed_linear import PackLinear, pack_linears
from serving.engine.kv_layout import UnsupportedTargetError, kv_layout
from serving.engine.rows import Move, Rows, RowsOutput, check_moves, entries_of
from serving.engine.torch_attention import ATTENTION_NAME, SlotPass, group_rows
from serving.engine.torch_graphs import Capture, GraphedForward

LAYER_TYPES = {"full_attention", "sliding_attention"}
RECURRENT_TYPES = {"mamba", "mamba2", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2"}
KV_SHARING_TYPES = {"gemma4_text", "gemma4_unified_text"}  # a layer gets the keys and values of the pass it attends to
RECURRENT_KEYS = ("ssm_cfg", "mamba_d_state", "linear_num_key_heads", "rwkv_hidden_size")  # of other families


def unsupported_reason(config: Any) -> str | None:
    """Why a target with this text config cannot be served, in one line; None if it can."""
    types = set(getattr(config, "layer_types", None) or ["full_attention"]) - LAYER_TYPES
    if types:
        return f"{config.model_type} has layers of type {', '.join(sorted(types))}, whose state cannot be rolled back"
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} is an encoder-decoder; Draftloop decodes decoder-only targets"
    if config.model_type in RECURRENT_TYPES or any(hasattr(config, key) for key in RECURRENT_KEYS):
        return f"{config.model_type} has recurrent or linear-attention state, which cannot be rolled back"
    if getattr(config, "num_kv_shared_layers", 0) and config.model_type not in KV_SHARING_TYPES:
        return f"{config.model_type} shares keys and values between layers, which the slot cache does not hold"
    return None


class TorchRows:
    """`RowsBackend` over a Hugging Face causal LM. The model is taken over: its attention implementation changes.

    With `pack` (CPU) its linear layers run on that kernel, in `native_threads`, and their own weights are freed. With
    `capture` (GPU) passes whose layout repeats are captured once and replayed.
    """

    name = "torch"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_len: int,
        target_layer_ids: tuple[int, ...] = (),
        pack: PackLinear | None = None,
        native_threads: int | None = None,
        capture: Capture | None = None,
    ):
        config = model.config.get_text_config()
        reason = unsupported_reason(config)
        if reason:
            raise UnsupportedTargetError(f"{reason}; choose another target")
        _check_taps(target_layer_ids, config.num_hidden_layers)
        self.model = model.eval().requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.num_slots, self.max_len = num_slots, max_len
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.target_layer_ids = tuple(target_layer_ids)
        self.dtype, self.device = model.dtype, model.device
        self.native_threads = native_threads if pack else None
        if pack:
            pack_linears(self.model, pack, only=self.dtype)
        layout = kv_layout(config)
        self._sources = sorted({kv.source for kv in layout})
        # a layer that keeps nothing has the buffers of its source, and writes there what stands there already
        self._keys = self._buffers([(kv.source, (kv.kv_heads, kv.key_dim)) for kv in layout])
        self._values = self._buffers([(kv.source, (kv.kv_heads, kv.value_dim)) for kv in layout])
        self._tapped: dict[int, Tensor] = {}
        decoder_layers = _decoder_layers(model, config.num_hidden_layers)
        for layer in self.target_layer_ids:
            decoder_layers[layer].register_forward_hook(self._tap(layer))
        self._graphs = GraphedForward(self._run, self._keys, self._values, capture) if capture else None
        self.wants_equal_runs = capture is not None  # others have no graph

    def _buffers(self, layers: list[tuple[int, tuple[int, int]]]) -> list[Tensor]:
        """Per layer [slots, max_len, kv_heads, head_dim] zeros, one tensor for all layers of a source."""
        sizes = dict(layers)
        made = {
            source: torch.zeros((self.num_slots, self.max_len, *size), dtype=self.dtype, device=self.device)
            for source, size in sizes.items()
        }
        return [made[source] for source, _ in layers]

    def _tap(self, layer: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:  # a reference, no copy
            self._tapped[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    @torch.inference_mode()
    def forward(self, rows: Rows) -> RowsOutput:
        """One pass; see `RowsBackend`. Raises ValueError if a row's slot or position does not exist."""
        if len(rows.ids_R) == 0:
            raise ValueError("a pass needs at least one row")
        entries_R = entries_of(rows)
        if int(entries_R.max()) >= self.max_len or int(rows.slots_R.max()) >= self.num_slots:
            raise ValueError(f"a row lies outside the {self.num_slots} slots of {self.max_len} tokens")
        output = self._graphs.forward(rows) if self._graphs else None
        if output is None:
            flat_R = (rows.slots_R * self.max_len + entries_R).to(self.device)
            slot_pass = SlotPass(self._keys, self._values, flat_R, group_rows(rows, self.device))
            keep = None if rows.logit_rows is None else rows.logit_rows.to(self.device)
            ids_R, positions_R = rows.ids_R.to(self.device), rows.positions_R.to(self.device)
            output = self._run(ids_R, positions_R, slot_pass, keep, rows.with_features)
        return output if rows.with_features else RowsOutput(logits_NV=output.logits_NV, features_RF=None)

    def _run(
        self,
        ids_R: Tensor,
        positions_R: Tensor,
        slot_pass: SlotPass,
        logit_rows: Tensor | None = None,
        with_features: bool = True,
    ) -> RowsOutput:
        """The model over rows on its device; nothing here waits for the device, so that a graph can be captured."""
        output = self.model(
            input_ids=ids_R[None],
            position_ids=positions_R[None],
            use_cache=False,
            logits_to_keep=self._all_rows(ids_R) if logit_rows is None else logit_rows,
            slot_pass=slot_pass,
        )
        taps = [self._tapped.pop(layer) for layer in self.target_layer_ids if with_features]
        return RowsOutput(logits_NV=output.logits[0], features_RF=torch.cat(taps, dim=-1) if taps else None)

    def _all_rows(self, ids_R: Tensor) -> int | Tensor:
        """As transformers wants them named: 0, which costs nothing, but not where layers attend to others' keys: with a
        number Gemma 4 cuts the rows of those, and what it cuts need not be there."""
        shared = len(self._sources) < len(self._keys)
        return torch.arange(len(ids_R), device=ids_R.device) if shared else 0

    def move_entries(self, moves: Sequence[Move]) -> None:
        """See `RowsBackend`. One gather and one scatter per buffer for all moves."""
        check_moves(self, moves)
        pairs = [
            (slot * self.max_len + entry, slot * self.max_len + start + i)
            for slot, start, entries in moves
            for i, entry in enumerate(entries)
        ]
        old, new = torch.tensor(pairs, device=self.device).unbind(dim=1)
        for buffer in self._kept():
            flat = buffer.flatten(0, 1)
            flat.index_copy_(0, new, flat.index_select(0, old))

    def kv_bytes(self) -> int:
        """Bytes that the KV slots take."""
        return sum(t.numel() * t.element_size() for t in self._kept())

    def _kept(self) -> list[Tensor]:
        """Every buffer once."""
        return [buffers[layer] for buffers in (self._keys, self._values) for layer in self._sources]


def _check_taps(layers: tuple[int, ...], count: int) -> None:
    for layer in layers:
        if not 0 <= layer < count:
            raise ValueError(f"tapped layer {layer} does not exist: the target has {count} layers")


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The model's list of decoder layers, found by its length."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and name.endswith("layers"):
            return module
    raise UnsupportedTargetError(f"no list of {count} decoder layers in {type(model).__name__}; choose another target")
