"""Features as bytes: the hidden states of one sequence in, what its Parquet row holds of them out, and back.

bfloat16 and float32 keep the bits. int8 keeps one scale per token and tapped layer, since layers differ in scale by
orders of magnitude: value = round(x / scale), scale = max|x| / 127. No element is off by more than half a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

FEATURE_DTYPES = ("bfloat16", "float32", "int8")
ENGINE_DTYPE = "bfloat16"  # what the decode engine keeps; float32 holds no more than that, only wider

LARGEST_CODE = 127
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # below it float32 loses digits; such a tap counts as zero

# numpy type that carries each dtype's bits
_CARRIERS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "int8": np.dtype("i1"),
}
_SCALE = np.dtype("<f4")


@dataclass(frozen=True)
class EncodedFeatures:
    """The bytes of features [T, F] and what it takes to read them."""

    data: bytes  # row-major
    dtype: str  # one of FEATURE_DTYPES
    shape: tuple[int, int]
    scale: bytes | None = None  # int8 only: float32 [T, taps], row-major, little-endian


def bytes_per_token(dtype: str, taps: int, width: int) -> int:
    """Bytes that one token's features take before compression; `width` is that of one tapped layer."""
    scales = taps * _SCALE.itemsize if dtype == "int8" else 0
    return taps * width * _CARRIERS[dtype].itemsize + scales


def encode_features(features_TF: Tensor, dtype: str | None = None, *, taps: int = 1) -> EncodedFeatures:
    """The features in `dtype`; None: as they are. `taps` layers lie side by side in F, each with scales of its own.

    The same features give the same bytes. Raises ValueError for an unknown dtype, a shape that is not [T, F] with F
    divisible by `taps`, or features that are not finite and are to be quantised.
    """
    given = str(features_TF.dtype).removeprefix("torch.")
    dtype = dtype or given
    if dtype not in _CARRIERS or not features_TF.dtype.is_floating_point or features_TF.ndim != 2:
        raise ValueError(f"features {given}{list(features_TF.shape)} cannot be stored as {dtype}")
    shape = (features_TF.shape[0], features_TF.shape[1])
    if dtype == "int8":
        codes_TF, scale_TN = quantise(features_TF, taps)
        return EncodedFeatures(_bytes(codes_TF, "int8"), dtype, shape, scale_TN.numpy().astype(_SCALE).tobytes())
    return EncodedFeatures(_bytes(features_TF.to(getattr(torch, dtype)), dtype), dtype, shape)


def quantise(features_TF: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """(int8 codes [T, F], float32 scales [T, taps]); a tap of zeros has scale 0. Raises ValueError."""
    if taps < 1 or features_TF.shape[1] % taps:
        raise ValueError(f"features of width {features_TF.shape[1]} are not those of {taps} layers")
    taps_TND = features_TF.detach().cpu().float().unflatten(1, (taps, features_TF.shape[1] // taps))
    scale_TN = taps_TND.abs().amax(-1) / LARGEST_CODE
    if not bool(torch.isfinite(scale_TN).all()):
        raise ValueError("features that are not finite cannot be stored as int8")
    scale_TN = torch.where(scale_TN < SMALLEST_SCALE, 0.0, scale_TN)
    divisor_TN1 = torch.where(scale_TN == 0, 1.0, scale_TN)[..., None]  # of what rounds to 0 anyway
    return (taps_TND / divisor_TN1).round().to(torch.int8).flatten(1), scale_TN


def _bytes(values_TF: Tensor, dtype: str) -> bytes:
    values = values_TF.detach().cpu().contiguous()
    array = (values.view(torch.int16) if dtype == "bfloat16" else values).numpy()
    return array.astype(_CARRIERS[dtype], copy=False).tobytes()


def decode_features(data: Any, dtype: str, shape: Sequence[int], scale: Any = None) -> Tensor:
    """A tensor [T, F] that owns its memory, from raw bytes (anything with the buffer protocol); int8 gives float32.

    Raises ValueError for an unknown dtype, bytes that do not fit the shape, or int8 without scales.
    """
    if dtype not in _CARRIERS:
        raise ValueError(f"features of dtype {dtype} are not known; known are {', '.join(_CARRIERS)}")
    values = np.frombuffer(data, dtype=_CARRIERS[dtype]).reshape(tuple(shape))
    if dtype == "bfloat16":
        return torch.from_numpy(values.copy().view(np.int16)).view(torch.bfloat16)
    if dtype == "float32":
        return torch.from_numpy(values.copy())
    if scale is None:
        raise ValueError("int8 features come without their scales")
    scales = np.frombuffer(scale, dtype=_SCALE)
    tokens, width = shape
    if not tokens:
        return torch.zeros(0, width)
    per_tap = values.reshape(tokens, len(scales) // tokens, -1)
    return torch.from_numpy((per_tap * scales.reshape(tokens, -1, 1)).reshape(tokens, width))
