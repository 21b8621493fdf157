"""Weights in, C structs out: a Hugging Face state dict packed for the native forward (layout: native_kernels.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.engine.native_memory import Arena

TILE = 32  # outputs of a weight tile


class LinearStruct(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("in_features", c_int64), ("out_features", c_int64))


class LayerStruct(Structure):
    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "keys", "values")),
        ("tap", c_int64),
    )


class ModelStruct(Structure):
    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "width",
                "heads",
                "kv_heads",
                "head_dim",
                "vocab",
                "num_slots",
                "max_len",
                "taps",
            )
        ),
        ("embedding", c_void_p),
        ("head", LinearStruct),
        *((name, c_void_p) for name in ("final_norm", "cos", "sin")),
        ("eps", c_float),
        ("bf16", c_int32),
    )


class PassStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("ids", "slots", "positions", "parents", "logit_rows")),
        *((name, c_int64) for name in ("rows", "num_logit_rows")),
        *((name, c_void_p) for name in ("logits", "features", "best")),
    )


class RecursiveHeadStruct(Structure):
    _fields_ = (
        ("model", ModelStruct),
        *((name, LinearStruct) for name in ("fuse", "enter")),
        *((name, c_void_p) for name in ("tap_norm", "embedding_norm", "hidden_norm", "embedding", "token_of")),
        *((name, c_int64) for name in ("taps", "num_tokens")),
    )


class DraftTaskStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("ids", "slots", "positions", "features")),
        *((name, c_int64) for name in ("pairs", "sequences", "steps", "nodes")),
        *((name, c_void_p) for name in ("drafts", "parents", "counts", "confidences")),
    )


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the library's calls."""
    pointer = ctypes.POINTER
    library.draftloop_workspace_floats.argtypes = [pointer(ModelStruct), ctypes.c_int]
    library.draftloop_workspace_floats.restype = c_int64
    library.draftloop_forward.argtypes = [
        pointer(ModelStruct), pointer(PassStruct), c_void_p, ctypes.c_int, pointer(c_int64),
    ]  # fmt: skip
    library.draftloop_move_entries.argtypes = [pointer(ModelStruct), c_int64, c_int64, c_void_p, c_int64]
    library.draftloop_move_entries.restype = None
    library.draftloop_linear_workspace_floats.argtypes = [pointer(LinearStruct), ctypes.c_int]
    library.draftloop_linear_workspace_floats.restype = c_int64
    library.draftloop_linear.argtypes = [
        pointer(LinearStruct), ctypes.c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, ctypes.c_int,
    ]  # fmt: skip
    library.draftloop_linear.restype = None
    library.draftloop_draft_workspace_floats.argtypes = [pointer(RecursiveHeadStruct), ctypes.c_int]
    library.draftloop_draft_workspace_floats.restype = c_int64
    library.draftloop_draft.argtypes = [
        pointer(RecursiveHeadStruct), pointer(DraftTaskStruct), c_void_p, ctypes.c_int, pointer(c_int64),
    ]  # fmt: skip
    library.draftloop_isa.restype = ctypes.c_char_p
    return library


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the native backend runs float32 or bfloat16, not {str(dtype).removeprefix('torch.')}")


class Packer:
    """Packs tensors into an arena; the structs that it returns hold addresses there, so it must outlive them."""

    def __init__(self, dtype: torch.dtype):
        check_dtype(dtype)
        self.dtype = dtype
        self.arena = Arena()
        self._kept: list[Tensor] = []

    def keep(self, tensor: Tensor) -> int:
        """The address of a copy."""
        kept = self.arena.zeros(tensor.shape, tensor.dtype)
        kept.copy_(tensor)
        self._kept.append(kept)
        return kept.data_ptr()

    def vector(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self.keep(tensor.detach().float().contiguous())

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> LinearStruct:
        """[O, I] as [O / 32][I][32] in fp32 or [O / 32][I / 2][32][2] in bf16, padded with zeros to even I."""
        outputs, inputs = weight_OI.shape
        pad_out, pad_in = -outputs % TILE, inputs % 2
        weight = F.pad(weight_OI.detach().to(self.dtype), (0, pad_in, 0, pad_out))
        pair = 2 if self.dtype == torch.bfloat16 else 1
        tiles = weight.view(-1, TILE, (inputs + pad_in) // pair, pair).permute(0, 2, 1, 3)
        bias = None if bias_O is None else self.vector(F.pad(bias_O.detach().float(), (0, pad_out)))
        return LinearStruct(self.keep(tiles), bias, inputs + pad_in, outputs)


def packed_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of `Packer.linear` for a matrix [O, I] without bias."""
    outputs, inputs = shape
    return (outputs + -outputs % TILE) * (inputs + inputs % 2) * dtype.itemsize


class StateDict:
    """A state dict that is read by name, and knows what nobody has read."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = dict(tensors)

    def take(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"the target's weights lack {name}")
        tensor = self.tensors.pop(name)
        if not tensor.is_floating_point():
            raise ValueError(f"the target's {name} is {tensor.dtype}: quantised weights run on the torch backend")
        return tensor

    def find(self, name: str) -> Tensor | None:
        return self.take(name) if name in self.tensors else None


def pack_layer(packer: Packer, state: StateDict, prefix: str) -> LayerStruct:
    """One decoder layer: q, k, v in one matrix; 16 gates and their 16 ups in each tile of one matrix."""

    def linear(*names: str, join: Callable[[list[Tensor]], Tensor] = torch.cat, pad_in: int = 0) -> LinearStruct:
        weights = [state.take(f"{prefix}.{name}.weight") for name in names]
        biases = [state.find(f"{prefix}.{name}.bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            bias = join([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        return packer.linear(F.pad(join(weights), (0, pad_in)), bias)

    return LayerStruct(
        qkv=linear(*(f"self_attn.{name}_proj" for name in "qkv")),
        o=linear("self_attn.o_proj"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", join=interleave),
        down=linear("mlp.down_proj", pad_in=-state.tensors[f"{prefix}.mlp.down_proj.weight"].shape[1] % (TILE // 2)),
        attention_norm=packer.vector(state.take(f"{prefix}.input_layernorm.weight")),
        mlp_norm=packer.vector(state.take(f"{prefix}.post_attention_layernorm.weight")),
        q_norm=packer.vector(state.find(f"{prefix}.self_attn.q_norm.weight")),
        k_norm=packer.vector(state.find(f"{prefix}.self_attn.k_norm.weight")),
    )


def interleave(gate_up: list[Tensor]) -> Tensor:
    """[M, ...] gates and ups as [M / 16 * 32, ...]: 16 gates, 16 ups, and so on; M padded with zeros to 16."""
    half = TILE // 2
    padded = [F.pad(t, (*(0, 0) * (t.ndim - 1), 0, -len(t) % half)) for t in gate_up]
    return torch.stack([t.view(-1, half, *t.shape[1:]) for t in padded], dim=1).flatten(0, 2)
