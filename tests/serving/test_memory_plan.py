"""The memory plan against what is allocated, and how many slots a budget holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from drafters.checkpoint import save_checkpoint
from drafters.packed_linear import PackedLinear
from drafters.target import shared_weights, target_fingerprint
from serving.engine import available_memory, build, native_build
from serving.engine.available_memory import available_bytes
from serving.engine.build import EngineBuildError, build_engine
from serving.engine.engine import Engine
from serving.engine.native_recursive_drafter import NativeRecursiveDrafter
from serving.engine.native_rows import NativeRows
from tests.toy_dflash import TAPS, toy_dflash_config
from tests.toy_folder import save_toy_target
from tests.toy_mtp import save_toy_drafter

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 200,
    "head_dim": 24,
}  # sizes that packing pads


@pytest.fixture(scope="module")
def drafters(toy_target_dir, tmp_path_factory) -> dict[str, Path | None]:
    from drafters.dflash import DFlashModule

    folder = tmp_path_factory.mktemp("drafters")
    shared = shared_weights(toy_target_dir, torch.float32)
    module = DFlashModule(toy_dflash_config(vocab_size=260, draft_vocab_size=130, selector_top_k=4, selector_rank=6))
    module.bind(shared)
    save_checkpoint(folder / "dflash", module, {"target_fingerprint": target_fingerprint(toy_target_dir, TAPS)})
    made = {kind: save_toy_drafter(folder / kind, toy_target_dir, kind) for kind in ("recursive", "independent")}
    return {"none": None, "dflash": folder / "dflash"} | made


def tensors(module: torch.nn.Module) -> int:
    """Bytes of parameters, buffers and packed weights, each once."""
    found = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers()) if t.numel() > 1}
    memories = {m._product._memory for m in module.modules() if isinstance(m, PackedLinear)}  # type: ignore[attr-defined]  # of NativeLinear
    if getattr(module, "_packed_head", None) is not None:
        memories.add(module._packed_head._product._memory)
    return sum(found.values()) + sum(memory.packer.arena.bytes for memory in memories)


def target_bytes(engine: Engine) -> int:
    rows = engine.backend
    return rows._packer.arena.bytes if isinstance(rows, NativeRows) else tensors(rows.model)


def drafter_bytes(engine: Engine) -> tuple[int, int]:
    """Of weights, of slots."""
    drafter = engine.drafter
    if drafter is None:
        return 0, 0
    if isinstance(drafter, NativeRecursiveDrafter):
        keys, values, *_ = drafter._kept
        weights = drafter._packer.arena.bytes + drafter._embedding_VD.nbytes + drafter._token_of_W.nbytes
        return weights, keys.nbytes + values.nbytes
    state = [getattr(drafter, name) for name in vars(drafter) if name.startswith(("_keys", "_values"))]
    return tensors(drafter.module), sum(t.nbytes for t in state)


@pytest.mark.parametrize(
    ("backend", "dtype", "kind"),
    [
        ("native", "float32", "recursive"),
        ("native", "bfloat16", "none"),
        ("native", "float32", "dflash"),
        ("native", "float32", "independent"),
        ("torch", "float32", "none"),
        ("plain", "float32", "recursive"),
        ("plain", "bfloat16", "dflash"),
    ],
)
def test_the_plan_is_what_is_allocated(backend, dtype, kind, toy_target_dir, drafters, monkeypatch):
    if backend == "plain":  # as on a machine without a compiler
        monkeypatch.setattr(native_build, "unavailable_reason", lambda *_: "no compiler")
        backend = "torch"
    elif native_build.unavailable_reason():
        pytest.skip(str(native_build.unavailable_reason()))
    engine = build_engine(
        toy_target_dir,
        dtype=dtype,
        backend=backend,
        num_slots=3,
        max_len=100,
        num_threads=1,
        drafter_path=drafters[kind],
    )
    plan = engine.memory
    assert plan is not None
    weights, state = drafter_bytes(engine)
    assert plan.kv_bytes == engine.backend.kv_bytes()
    assert plan.drafter_kv_bytes == state
    assert plan.target_bytes == pytest.approx(target_bytes(engine), rel=0.02)
    assert plan.drafter_bytes == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_tied_head_is_counted_as_it_is_held(tied, backend, tmp_path):
    if native_build.unavailable_reason():
        pytest.skip(str(native_build.unavailable_reason()))
    folder = save_toy_target(tmp_path, tie_word_embeddings=tied, **WIDE)
    engine = build_engine(folder, backend=backend, num_slots=2, max_len=50, num_threads=1)
    assert engine.memory is not None
    assert engine.memory.target_bytes == pytest.approx(target_bytes(engine), rel=0.03)
    assert engine.memory.kv_bytes == engine.backend.kv_bytes()


def test_slots_follow_from_the_budget(toy_target_dir, drafters, monkeypatch):
    options = {"backend": "torch", "max_len": 100, "num_threads": 1, "drafter_path": drafters["recursive"]}

    def plan(**changes):
        found = build_engine(toy_target_dir, **(options | changes))
        assert found.num_slots == found.memory.num_slots
        return found.memory

    three = plan(num_slots=3)
    assert three.budget_bytes is None
    assert plan(num_slots=None, memory_bytes=three.total_bytes).num_slots == 3
    assert plan(num_slots=None, memory_bytes=three.total_bytes - 1).num_slots == 2
    assert plan(num_slots=None, memory_bytes=10**12).num_slots == 64
    assert plan(num_slots=3, memory_bytes=three.total_bytes) == three.__class__(
        **{**vars(three), "budget_bytes": three.total_bytes}
    )
    with pytest.raises(
        EngineBuildError, match=r"KV 3 slots x 100 tokens.* give num_slots 2, .* memory_bytes \d+$"
    ) as bad:
        plan(num_slots=3, memory_bytes=three.total_bytes - 1)
    assert "\n" not in str(bad.value)
    with pytest.raises(EngineBuildError, match="give a smaller max_len"):
        plan(num_slots=None, memory_bytes=1000)
    monkeypatch.setattr(build, "available_bytes", lambda device: three.total_bytes / build.CPU_SHARE + 10)
    assert plan(num_slots=None).num_slots == 3
    monkeypatch.setattr(build, "available_bytes", lambda device: 1000)
    assert plan(num_slots=None).num_slots == 1, "without a budget of its own it tries"


def test_the_line_that_is_shown(toy_target_dir, drafters):
    engine = build_engine(toy_target_dir, backend="torch", max_len=64, num_threads=1, drafter_path=drafters["dflash"])
    line = engine.memory.describe()
    size = r"[\d.]+ [MG]B"
    slots = f"KV 8 slots x 64 tokens: {size} \\+ {size}, features {size}"
    assert re.fullmatch(f"target {size}, drafter {size}, {slots}, a pass {size}; {size} in all", line)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4000 * 1024),
        ({"sys/fs/cgroup/memory.max": "max"}, 4000 * 1024),
        ({"sys/fs/cgroup/memory.max": "2000000", "sys/fs/cgroup/memory.current": "500000"}, 1500000),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/memory.max": "2000000",
                "sys/fs/cgroup/a/memory.current": "500000",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 300000",
                "sys/fs/cgroup/a/b/memory.max": "max",
            },
            1800000,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n7:memory:/y",
                "sys/fs/cgroup/memory/y/memory.limit_in_bytes": "1000000",
                "sys/fs/cgroup/memory/y/memory.usage_in_bytes": "2000000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            0,
        ),
    ],
)
def test_what_a_control_group_leaves(files, expected, tmp_path):
    for name, text in ({"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert available_bytes("cpu", root=tmp_path) == expected


def test_this_machine_has_some():
    assert available_memory.available_bytes("cpu") > 1 << 20
