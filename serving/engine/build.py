"""An engine from folders: the target's backend with its KV slots, and the drafter if there is one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from drafters.checkpoint import load_drafter, read_config
from drafters.target import load_model, load_target
from serving.engine.engine import Engine, EngineConfig
from serving.engine.rows import RowsBackend
from serving.engine.torch_rows import TorchRows

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_engine(
    target_path: Path,
    *,
    dtype: str = "float32",
    backend: str = "auto",
    device: str = "cpu",
    num_slots: int = 8,
    max_len: int = 2048,
    drafter_path: Path | None = None,
    target_layer_ids: Sequence[int] | None = None,
    num_threads: int | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """Load a target (a folder from `resolve_target`) and a drafter into a new engine.

    `target_layer_ids` are tapped beside those that the drafter needs. `max_len` is cut to the target's own context.
    Raises TargetError, CheckpointError, UnsupportedTargetError, or ValueError for an unknown dtype or backend.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; give one of {', '.join(DTYPES)}")
    if num_threads:
        torch.set_num_threads(num_threads)
    target = load_target(str(target_path))
    taps = set(target_layer_ids or ())
    if drafter_path is not None:
        taps |= set(read_config(drafter_path).target_layer_ids)
    rows = build_rows(
        target.path,
        dtype=DTYPES[dtype],
        backend=backend,
        device=device,
        num_slots=num_slots,
        max_len=min(max_len, target.max_len),
        target_layer_ids=tuple(sorted(taps)),
    )
    drafter = None
    if drafter_path is not None:
        drafter = load_drafter(drafter_path, target.path, dtype=DTYPES[dtype], device=device)
    return Engine(rows, drafter, config=config, eos_token_ids=target.eos_token_ids)


def build_rows(
    target_path: Path,
    *,
    dtype: torch.dtype,
    backend: str,
    device: str,
    num_slots: int,
    max_len: int,
    target_layer_ids: tuple[int, ...],
) -> RowsBackend:
    """The backend that runs the target's forward passes."""
    if backend not in ("auto", "torch"):
        raise ValueError(f"unknown backend {backend!r}; give auto or torch")
    model = load_model(target_path, dtype, device)
    return TorchRows(model, num_slots=num_slots, max_len=max_len, target_layer_ids=target_layer_ids)
