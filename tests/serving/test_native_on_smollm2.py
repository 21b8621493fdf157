"""The native backend on the real target: logits of 32 questions against transformers, and rows in any company."""

from __future__ import annotations

import pytest
import torch

from drafters.target import load_model, load_target
from pipelines.prompts import read_prompts
from serving.engine import native_build
from serving.engine.native_rows import NativeRows
from serving.engine.rows import make_rows

NO_LIBRARY = native_build.unavailable_reason() or ""
pytestmark = [pytest.mark.model, pytest.mark.skipif(bool(NO_LIBRARY), reason=NO_LIBRARY)]

PROMPTS = 32


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2")


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    return [row.prompt_ids for row in read_prompts("gsm8k_test", target, limit=PROMPTS).rows]


@torch.inference_mode()
def test_logits_of_real_prompts_are_those_of_transformers(target, prompts):
    model = load_model(target.path, torch.float32)
    rows = NativeRows(model, dtype=torch.float32, num_slots=1, max_len=512)
    worst = 0.0
    for ids in prompts:
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
        got = rows.forward(make_rows([(0, 0, ids)])).logits_NV
        worst = max(worst, float((got - expected).abs().max()))
        assert torch.equal(got.argmax(dim=-1), expected.argmax(dim=-1))
    assert worst < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_real_prompt_has_the_same_logits_alone_and_in_a_pass_of_2_to_32_rows(target, prompts, dtype):
    rows = NativeRows(load_model(target.path, dtype), dtype=dtype, num_slots=8, max_len=256)
    context, last = prompts[0][:-1], prompts[0][-1]
    for slot, ids in enumerate(prompts[:8]):  # every slot its own context, all of it but the last token
        rows.forward(make_rows([(slot, 0, ids[:-1])], logit_rows=[0]))
    alone = rows.forward(make_rows([(0, len(context), [last])])).logits_NV[0].clone()
    for drafts in (1, 4, 11, 31):  # the row and drafts after it
        run = (0, len(context), [last, *prompts[1][:drafts]])
        assert torch.equal(rows.forward(make_rows([run])).logits_NV[0], alone)
    for others in (1, 3, 7):  # rows of other sequences, each with three drafts
        runs = [(slot, len(prompts[slot]) - 1, [prompts[slot][-1], 5, 6, 7]) for slot in range(others + 1)]
        assert torch.equal(rows.forward(make_rows(runs)).logits_NV[0], alone)
