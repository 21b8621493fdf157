"""The torch backend with its linear layers on the native kernel: the logits of transformers' own forward, in every
family and dtype, with the layers' own weights gone; and what the engine's builder makes of the options."""

from __future__ import annotations

import functools
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from drafters.packed_linear import PackedLinear, pack_linears
from serving.engine import native_build
from serving.engine.build import EngineBuildError, build_engine
from serving.engine.native_linear import LinearMemory, NativeLinear
from serving.engine.rows import make_rows
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.serving.test_families import FAMILIES, make
from tests.toy_folder import save_toy_target
from tests.toy_target import toy_model, toy_prompts

DTYPES = [torch.float32, torch.bfloat16]
native = pytest.mark.skipif(native_build.unavailable_reason() is not None, reason="no native library here")


def packer(dtype: torch.dtype):
    return functools.partial(NativeLinear, dtype=dtype, num_threads=2, memory=LinearMemory(dtype))


def linears(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


@native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_packed_rows_are_as_close_to_the_model_as_its_own_forward(family, dtype):
    prompt = toy_prompts(1, low=40, high=40)[0]
    reference = make(FAMILIES[family]).to(dtype)
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt]), use_cache=False).logits[0].float()
        exact = reference.float()(torch.tensor([prompt]), use_cache=False).logits[0].float()
    rows = TorchRows(make(FAMILIES[family]).to(dtype), num_slots=2, max_len=64, pack=packer(dtype))
    assert not linears(rows.model)
    assert any(isinstance(m, PackedLinear) for m in rows.model.modules())
    first = rows.forward(make_rows([(1, 0, prompt[:36])])).logits_NV.clone()
    mine = torch.cat([first, rows.forward(make_rows([(1, 36, prompt[36:])])).logits_NV])
    assert mine.dtype == dtype
    mine = mine.float()
    if dtype == torch.float32:
        torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-3)
    else:
        error = (mine - exact).norm()
        assert error < 1.5 * (theirs - exact).norm()  # of either, it is rounding: chance decides which is larger


@native
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_frees_the_weights_and_keeps_a_tied_embedding(dtype):
    model = toy_model().to(dtype)
    embedding = model.model.embed_tokens.weight
    assert model.lm_head.weight is embedding
    freed = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    rows = TorchRows(model, num_slots=1, max_len=32, pack=packer(dtype))
    gc.collect()
    assert freed() is None
    assert rows.model.model.embed_tokens.weight is embedding
    assert rows.dtype == dtype
    names = {name for name, _ in rows.model.named_parameters()}
    assert all("embed_tokens" in name or "norm" in name for name in names)


@native
def test_subclasses_and_other_dtypes_stay():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    module = nn.ModuleDict({"plain": nn.Linear(8, 8), "scaled": Scaled(8, 8), "wide": nn.Linear(8, 8).double()})
    pack_linears(module, packer(torch.float32), only=torch.float32)
    assert [type(m) for m in module.values()] == [PackedLinear, Scaled, nn.Linear]


@native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_code_that_reads_a_layers_weight_finds_it(dtype, bias):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(7, 33, bias=bias, dtype=dtype)

        def forward(self, x):
            return nn.functional.linear(x.to(self.gate.weight.dtype), self.gate.weight, self.gate.bias)

    module, x = Reader(), torch.randn(2, 3, 7)
    want, weight = module(x), module.gate.weight
    gate = module.gate
    pack_linears(module, packer(dtype))
    assert torch.equal(module.gate.weight, weight)
    assert torch.equal(module(x), want)
    assert (module.gate.in_features, module.gate.out_features) == (7, 33)
    assert module.gate(x.to(dtype)).dtype == dtype
    torch.testing.assert_close(module.gate(x.to(dtype)), gate(x.to(dtype)))


@native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_builder_packs_on_cpus_and_says_so(tmp_path, dtype, caplog):
    folder = save_toy_target(tmp_path)
    with caplog.at_level(logging.INFO, logger="serving.engine.build"):
        engine = build_engine(folder, dtype=dtype, backend="torch", max_len=64)
    assert not linears(engine.backend.model)
    assert f"the torch backend's linear layers run on the native kernel in {dtype}" in caplog.messages
    assert len(engine.generate([[1, 2, 3]], Sampling(max_new_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_without_the_native_library_the_model_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(native_build, "unavailable_reason", lambda: "no C++ compiler found")
    engine = build_engine(save_toy_target(tmp_path), backend="torch", max_len=64)
    assert linears(engine.backend.model)


@pytest.mark.parametrize("backend", ["auto", "torch", "native"])
def test_cuda_graphs_without_a_cuda_device_are_refused(tmp_path, backend):
    with pytest.raises(EngineBuildError, match="cuda_graphs needs a CUDA device, not cpu; give"):
        build_engine(save_toy_target(tmp_path), backend=backend, cuda_graphs=True)
