"""An engine from folders: the target's backend with its KV slots, and the drafter if there is one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from drafters.checkpoint import as_drafter, load_module, read_config
from drafters.drafter import Drafter
from drafters.mtp import RecursiveHead
from drafters.packed_linear import PackLinear
from drafters.target import load_model, load_target
from serving.engine import native_build
from serving.engine.available_memory import available_bytes
from serving.engine.engine import Engine, EngineConfig
from serving.engine.memory_plan import Form, MemoryNeeds, MemoryPlan, memory_needs
from serving.engine.native_linear import LinearMemory, NativeLinear
from serving.engine.native_recursive_drafter import NativeRecursiveDrafter
from serving.engine.native_rows import NativeRows
from serving.engine.rows import RowsBackend
from serving.engine.torch_graphs import CudaCapture
from serving.engine.torch_rows import TorchRows

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EngineBuildError(ValueError):
    """An engine that cannot be built with these options; one line with the mend."""


TORCH_THREADS = torch.get_num_threads()  # torch's own choice, before an engine changes it
BACKENDS = ("auto", "native", "torch")
CPU_SHARE, GPU_SHARE = 0.6, 0.8  # of the memory that is free, for an engine that chooses its number of slots


def build_engine(
    target_path: Path,
    *,
    dtype: str = "float32",
    backend: str = "auto",
    device: str = "cpu",
    num_slots: int | None = 8,
    memory_bytes: int | None = None,
    max_len: int = 2048,
    drafter_path: Path | None = None,
    target_layer_ids: Sequence[int] | None = None,
    num_threads: int | None = None,
    config: EngineConfig | None = None,
    cuda_graphs: bool = False,
) -> Engine:
    """Load a target (a folder from `resolve_target`) and a drafter into a new engine.

    `target_layer_ids` are tapped beside those that the drafter needs. `max_len` is cut to the target's own context.
    `num_slots` None: as many as `memory_bytes` hold with all else, up to 64 (None: of 60% of the free memory, 80% on a
    GPU). Both given: an error if they do not fit. `engine.memory` says what it takes.
    `num_threads` are the forward pass's (None: torch's choice); where native kernels run, torch itself is set to one.
    `cuda_graphs` captures the decoding passes of a CUDA engine and replays them.
    Raises TargetError, CheckpointError, UnsupportedTargetError, or EngineBuildError.
    """
    if dtype not in DTYPES:
        raise EngineBuildError(f"unknown dtype {dtype!r}; give one of {', '.join(DTYPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineBuildError(f"no CUDA device for {device!r}; give cpu, or install a CUDA build of torch")
    threads = num_threads or TORCH_THREADS
    torch.set_num_threads(threads)
    target = load_target(str(target_path))
    taps = set(target_layer_ids or ())
    if drafter_path is not None:
        taps |= set(read_config(drafter_path).target_layer_ids)
    needs = memory_needs(
        target.path,
        target.config.get_text_config(),
        drafter_path,
        dtype=DTYPES[dtype],
        form=_form(target.path, backend, device),
        max_len=min(max_len, target.max_len),
        taps=tuple(sorted(taps)),
        engine_config=config or EngineConfig(),
    )
    memory = plan_memory(needs, num_slots, memory_bytes, device)
    rows = build_rows(
        target.path,
        dtype=DTYPES[dtype],
        backend=backend,
        device=device,
        num_slots=memory.num_slots,
        max_len=memory.max_len,
        target_layer_ids=tuple(sorted(taps)),
        num_threads=threads,
        cuda_graphs=cuda_graphs,
    )
    if rows.native_threads:
        # torch's own team of threads would spin on the cores for milliseconds after each of its operations, while the
        # native kernels want them: what is left to torch beside them is small.
        torch.set_num_threads(1)
    drafter = None
    if drafter_path is not None:
        drafter = load_drafter_for(rows, drafter_path, target.path)
    engine = Engine(rows, drafter, config=config, eos_token_ids=target.eos_token_ids)
    engine.memory = memory
    return engine


def plan_memory(needs: MemoryNeeds, num_slots: int | None, memory_bytes: int | None, device: str) -> MemoryPlan:
    """The slots that were asked for, or as many as fit; see `build_engine`. Raises EngineBuildError."""
    budget = memory_bytes
    if budget is None and num_slots is None:
        budget = int(available_bytes(device) * (GPU_SHARE if device.startswith("cuda") else CPU_SHARE))
    if budget is None:
        return needs.plan(num_slots or 1)
    most = needs.most_slots(budget)
    plan = needs.plan(num_slots or max(1, most), budget)
    if plan.total_bytes <= budget:
        return plan
    if memory_bytes is None:
        log.warning("memory is short for this target: %s", plan.describe())
        return plan
    fewer = f"num_slots {most}, " if most else ""  # all that fit
    raise EngineBuildError(
        f"the engine does not fit into its memory: {plan.describe()}; "
        f"give {fewer}a smaller max_len, or memory_bytes {plan.total_bytes}"
    )


def load_drafter_for(rows: RowsBackend, drafter_path: Path, target_path: Path) -> Drafter:
    """A drafter on the backend's device in its dtype or, where it runs on native kernels, on those. CheckpointError."""
    return load_drafter(drafter_path, target_path, rows.dtype, rows.device, rows.native_threads)


def load_drafter(
    drafter_path: Path, target_path: Path, dtype: torch.dtype, device: torch.device, native_threads: int | None
) -> Drafter:
    """A drafter for a target that may be elsewhere, on native kernels or in torch on a device. CheckpointError."""
    threads = native_threads
    if not threads:
        return as_drafter(load_module(drafter_path, target_path, dtype=dtype, device=device))
    module = load_module(drafter_path, target_path)
    # bfloat16 beside a float32 target too: half the bytes, and what is only proposed need not be exact
    if isinstance(module, RecursiveHead):
        return NativeRecursiveDrafter(module, num_threads=threads)
    module.pack(functools.partial(NativeLinear, dtype=torch.bfloat16, num_threads=threads))
    return as_drafter(module)


def build_rows(
    target_path: Path,
    *,
    dtype: torch.dtype,
    backend: str,
    device: str,
    num_slots: int,
    max_len: int,
    target_layer_ids: tuple[int, ...],
    num_threads: int | None = None,
    cuda_graphs: bool = False,
) -> RowsBackend:
    """The backend that runs the target's forward passes."""
    if cuda_graphs and not device.startswith("cuda"):
        raise EngineBuildError(f"cuda_graphs needs a CUDA device, not {device}; give device cuda or leave it off")
    _check_backend(backend)
    reason = _no_native_reason(target_path, device) if backend != "torch" else None
    if backend == "native" and reason:
        raise EngineBuildError(f"the native backend cannot run this target: {reason}; give --backend torch")
    model = load_model(target_path, dtype, device)
    if backend == "torch" or reason:
        if reason:
            log.warning("backend torch, since native cannot run here: %s", reason)
        return TorchRows(
            model,
            num_slots=num_slots,
            max_len=max_len,
            target_layer_ids=target_layer_ids,
            pack=_pack_for_torch(model.dtype, device, num_threads or TORCH_THREADS),
            native_threads=num_threads or TORCH_THREADS,
            capture=CudaCapture(device) if cuda_graphs else None,
        )
    return NativeRows(
        model,
        dtype=dtype,
        num_slots=num_slots,
        max_len=max_len,
        target_layer_ids=target_layer_ids,
        num_threads=num_threads or TORCH_THREADS,
    )


def _pack_for_torch(dtype: torch.dtype, device: str, num_threads: int) -> PackLinear | None:
    """The native kernel for the linear layers of the torch backend, where there is one: it streams weights faster."""
    if device != "cpu" or dtype not in DTYPES.values() or native_build.unavailable_reason():
        return None
    log.info("the torch backend's linear layers run on the native kernel in %s", str(dtype).removeprefix("torch."))
    return functools.partial(NativeLinear, dtype=dtype, num_threads=num_threads, memory=LinearMemory(dtype))


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise EngineBuildError(f"unknown backend {backend!r}; give one of {', '.join(BACKENDS)}")


def _form(target_path: Path, backend: str, device: str) -> Form:
    """How the target's linear layers will be held."""
    _check_backend(backend)
    if backend != "torch" and _no_native_reason(target_path, device) is None:
        return "native"
    return "plain" if device != "cpu" or native_build.unavailable_reason() else "packed"


def _no_native_reason(target_path: Path, device: str) -> str | None:
    """Why the native backend cannot serve this target here, in one line; None if it can."""
    if device != "cpu":
        return f"it runs on CPUs, not on {device}"
    return NativeRows.unsupported_reason(load_target(str(target_path)).config) or native_build.unavailable_reason()
