"""The gate by decoding: a toy target, drafters that know it and drafters that do not. Time is counted in passes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafters.acceptance import Acceptance
from drafters.checkpoint import save_checkpoint
from drafters.drafter import DraftReply, DraftRequest
from drafters.drafter_module import DrafterModule
from drafters.target import Target, load_model, load_target, target_fingerprint
from pipelines import gate, gate_decoding
from pipelines.gate import GateConfig, GateError, GatePrompt, GateReport, regression_prompts, run_gate
from pipelines.gate_decoding import PromptResult, SideBySide, parted_answers
from pipelines.gate_lines import FALLBACKS, HELD_OUT, LOADS, LOSSLESS, PARITY, REGRESSION, SPEED
from pipelines.gate_prompts import usable_prompts
from pipelines.paired_bootstrap import PLAIN_ROUNDS
from pipelines.step_config import StepConfig
from serving.engine.torch_rows import TorchRows
from tests.toy_folder import save_toy_target
from tests.toy_mtp import continued, tokens_of, toy_mtp, toy_trainer
from tests.toy_target import toy_prompts

PROMPTS = toy_prompts(8, low=2, high=30)
HELD_OUT_PROMPTS = [GatePrompt(ids) for ids in PROMPTS]
REGRESSION_PROMPTS = [
    *(GatePrompt(ids, "known") for ids in PROMPTS[:3]),
    *(GatePrompt(ids, "new") for ids in toy_prompts(3, seed=5)),
]
CONFIG = GateConfig(
    batch=4, max_new_tokens=16, num_draft_tokens=3, tree_nodes=5, backend="torch", bootstrap_samples=1000,
    min_prompts=6, min_category_prompts=3, min_batches=2, most_speed_tolerance=0.9, regression_tolerance=0.1,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(toy_target_dir: Path) -> Target:
    return load_target(str(toy_target_dir))


def saved(folder: Path, module: DrafterModule, target: Target) -> Path:
    fingerprint = target_fingerprint(target.path, module.config.target_layer_ids)
    save_checkpoint(folder, module, {"target_fingerprint": fingerprint})
    return folder


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that has learned the held-out prompts' continuations, half of them."""
    model = load_model(target.path, torch.float32)
    sequences = continued(model, PROMPTS, max_new_tokens=24)
    module = toy_mtp(model, vocab_size=260, draft_vocab_size=260)
    config = StepConfig(epochs=25, tokens_per_step=tokens_of(sequences), learning_rate=1e-2, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    return saved(tmp_path_factory.mktemp("drafters") / "trained", module.eval(), target)


@pytest.fixture(scope="module")
def untrained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that knows nothing, and reads other layers."""
    model = load_model(target.path, torch.float32)
    module = toy_mtp(model, "independent", vocab_size=260, draft_vocab_size=260, target_layer_ids=(1,))
    return saved(tmp_path_factory.mktemp("drafters") / "untrained", module, target)


@pytest.fixture(autouse=True)
def _time_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, forward = [0], TorchRows.forward

    def counted(self, rows):
        passes[0] += 1
        return forward(self, rows)

    monkeypatch.setattr(TorchRows, "forward", counted)
    monkeypatch.setattr(gate_decoding, "time", SimpleNamespace(perf_counter=lambda: passes[0]))


def held(target, champion, challenger, held_out=HELD_OUT_PROMPTS, regression=REGRESSION_PROMPTS, config=CONFIG):
    return run_gate(target, champion, challenger, held_out, regression, config)


def by_name(report: GateReport):
    return {line.name: line for line in report.lines}


def test_a_better_drafter_passes_every_line(target, trained, untrained):
    seen = []
    report = run_gate(target, untrained, trained, HELD_OUT_PROMPTS, REGRESSION_PROMPTS, CONFIG, seen.append)
    lines = by_name(report)
    assert list(lines) == [
        HELD_OUT, REGRESSION, f"{REGRESSION}, known", f"{REGRESSION}, new", SPEED, LOSSLESS, PARITY, FALLBACKS,
    ]  # fmt: skip
    assert report.passed, report.table()
    tau = lines[HELD_OUT]
    assert 1 <= tau.champion < 1.1
    assert tau.challenger > 1.4
    assert tau.threshold == pytest.approx(1.02 * tau.champion)
    assert lines[SPEED].challenger == pytest.approx(tau.challenger, rel=0.3)  # in passes the one follows from the other
    assert lines[SPEED].champion == pytest.approx(1, abs=0.1)
    assert (lines[LOSSLESS].champion, lines[LOSSLESS].challenger, lines[LOSSLESS].threshold) == (14, 14, 14)
    assert (lines[FALLBACKS].champion, lines[FALLBACKS].challenger) == (0, 0)
    assert [(p.prompts_done, p.prompts_total) for p in seen] == [(n, 14) for n in (4, 8, 12, 14)]
    assert report.figures["tokens_per_s"]["challenger"] > report.figures["tokens_per_s"]["plain"]
    assert report.reason().startswith("passed all of 8: held-out tau: ")


def test_a_worse_drafter_fails_with_every_figure_in_one_line(target, trained, untrained):
    report = held(target, trained, untrained)
    lines = by_name(report)
    assert not report.passed
    assert [name for name, line in lines.items() if not line.passed] == [
        HELD_OUT, REGRESSION, f"{REGRESSION}, known", SPEED,
    ]  # fmt: skip
    assert lines[PARITY].passed, "it is bad, and served as it is"
    reason = report.reason()
    assert "\n" not in reason
    for name in (HELD_OUT, REGRESSION, SPEED):
        assert f"{name}: {lines[name].says}" in reason
        assert f"{lines[name].challenger:.2f}" in lines[name].says
        assert f"{lines[name].champion:.2f}" in lines[name].says
    assert LOSSLESS not in reason
    written = json.loads(json.dumps(report.as_json()))
    assert written["figures"]["conditions"] == report.figures["conditions"], "what later gates compare"
    assert (written["passed"], written["reason"]) == (False, reason)
    assert GateReport.from_json(written) == report
    assert len(report.table().splitlines()) == 1 + 2 * len(lines)
    with pytest.raises(ValueError, match="no gate report"):
        GateReport.from_json({"lines": [{}]})


def test_without_a_champion_plain_decoding_is_the_one_to_beat(target, trained):
    better = held(target, None, trained)
    assert better.passed, better.table()
    assert by_name(better)[HELD_OUT].champion == by_name(better)[SPEED].champion == 1
    assert by_name(better)[LOSSLESS].champion is None
    assert "against 1.00 of plain decoding" in by_name(better)[HELD_OUT].says


class Faulty:
    """A drafter that is handed what training never showed it, and fails now and then."""

    def __init__(self, inner):
        self.inner, self.asked = inner, 0
        self.name, self.target_layer_ids = inner.name, inner.target_layer_ids
        self.max_draft_tokens, self.max_tree_nodes = inner.max_draft_tokens, inner.max_tree_nodes

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.inner.allocate(num_slots, max_len)

    def draft(self, request: DraftRequest) -> DraftReply:
        self.asked += 1
        if self.asked == 20:
            raise RuntimeError("out of order")
        return self.inner.draft(replace(request, features_NF=request.features_NF.roll(32, dims=1)))


def test_what_goes_wrong_in_service_only_is_found(target, trained, monkeypatch):
    load = gate.load_drafter_for
    monkeypatch.setattr(gate, "load_drafter_for", lambda *arguments: Faulty(load(*arguments)))
    report = held(target, None, trained)
    assert by_name(report)[FALLBACKS].says == "challenger fell back to plain decoding, rounds by reason: RuntimeError 1"
    assert re.search(r"served, 1\.\d\d expected .* apart, so training and serving disagree", report.reason())
    assert not by_name(report)[FALLBACKS].passed
    assert not by_name(report)[PARITY].passed
    assert by_name(report)[LOSSLESS].passed


def test_a_challenger_that_cannot_be_loaded_is_a_verdict(target, trained, untrained, tmp_path: Path):
    foreign, cut, garbled = (Path(shutil.copytree(trained, tmp_path / n)) for n in ("foreign", "cut", "garbled"))
    (foreign / "provenance.json").write_text('{"target_fingerprint": "of another"}')
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-9])
    config = json.loads((garbled / "config.json").read_text())
    (garbled / "config.json").write_text(json.dumps(config | {"num_draft_tokens": -1}))
    for folder, word in (
        (foreign, "made for another target"),
        (cut, "cannot be loaded"),
        (garbled, "num_draft_tokens"),
        (tmp_path / "nowhere", "no drafter at"),
    ):
        report = held(target, untrained, folder)
        assert [line.name for line in report.lines] == [LOADS]
        assert not report.passed
        assert "the challenger cannot be loaded" in report.reason()
        assert word in report.reason()
        assert "\n" not in report.reason()
    without = held(target, cut, trained)  # a broken champion must not keep out all others
    assert (without.champion, without.lines[0].name, without.lines[0].passed) == (None, LOADS, True)
    assert "the champion cannot be loaded" in without.lines[0].says


def test_too_few_prompts_are_no_decision(target, trained, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "build_engine", None)  # nothing is decoded for that
    repeated = HELD_OUT_PROMPTS[:5] * 3
    report = held(target, None, trained, held_out=repeated, regression=[])
    assert not report.passed
    assert [line.name for line in report.lines] == [HELD_OUT, REGRESSION]
    assert "held-out tau: too few to decide: 5 prompts (left out: 10 repeated), 6 are needed" in report.reason()
    assert "regression tau: too few to decide: 0 prompts, 3 are needed" in report.reason()


def test_prompts_that_cannot_be_decoded_are_left_out_and_counted():
    given = [GatePrompt(ids) for ids in ([1, 2], [], [3] * 9, [1, 300], [-1], [1, 2], [4])]
    usable = usable_prompts(given, most_tokens=8, vocab_size=260)
    assert [p.prompt_ids for p in usable.prompts] == [[1, 2], [4]]
    assert usable.left_out == {
        "empty": 1, "longer than 8 tokens": 1, "with tokens that are not the target's": 2, "repeated": 1,
    }  # fmt: skip


def test_the_ways_are_taken_in_every_order_in_turn():
    """Whoever always came last would meet another machine than the others."""
    taken: list[str] = []
    engine = SimpleNamespace(stats=SimpleNamespace(fallbacks={}), set_drafter=taken.append)

    def generate(prompts, _sampling):
        empty = Acceptance()
        return [SimpleNamespace(token_ids=[1], acceptance=empty) for _ in prompts]

    engine.generate = generate
    both = SideBySide(engine, {"champion": "champion", "challenger": "challenger"}, 8)
    both.decode(HELD_OUT_PROMPTS[:6], 1, lambda _: None)
    orders = [tuple(taken[i : i + 3]) for i in range(3, len(taken), 3)]  # the first three warm up
    assert sorted(orders, key=str) == sorted(permutations([None, "champion", "challenger"]), key=str)


def told(plain: list[int], champion: list[int], challenger: list[int]) -> PromptResult:
    answers = {"plain": plain, "champion": champion, "challenger": challenger}
    return PromptResult(prompt=HELD_OUT_PROMPTS[0], answers=answers, rounds=dict.fromkeys(answers, PLAIN_ROUNDS))


ROUNDINGS = (None, torch.float32, torch.bfloat16)


def test_answers_that_part_are_judged_by_the_target(target):
    model = load_model(target.path, torch.float32)
    plain = continued(model, PROMPTS[:1], max_new_tokens=6)[0].ids.tolist()[len(PROMPTS[0]) :]
    wrong = [*plain[:3], (plain[3] + 1) % 256, *plain[4:]]
    both = [told(plain, plain, wrong), told(plain, wrong, plain)]
    for rounding in ROUNDINGS:
        assert parted_answers([told(plain, plain, plain)], target.path, rounding=rounding, device="cpu") == []
        found = parted_answers(both, target.path, rounding=rounding, device="cpu")
        assert [(answer.way, answer.near_tie) for answer in found] == [("challenger", False), ("champion", False)]


@pytest.mark.parametrize(("apart", "near"), [(1e-7, (False, True, True)), (1e-3, (False, False, True))])
def test_a_near_tie_has_the_size_of_the_dtype_s_rounding(tmp_path: Path, apart: float, near: tuple[bool, ...]):
    """Two tokens whose logits lie so far apart, as a share: float32 confuses the first two, bfloat16 the others too."""
    folder = save_toy_target(tmp_path / "toy", eos_token_id=None, tie_word_embeddings=False)
    model = load_model(folder, torch.float32)
    plain = continued(model, PROMPTS[:1], max_new_tokens=4)[0].ids.tolist()[len(PROMPTS[0]) :]
    twin = next(token for token in range(256) if token not in plain)
    model.lm_head.weight[twin] = model.lm_head.weight[plain[3]] * (1 - apart)  # the last token: nothing follows it
    model.save_pretrained(folder)
    for rounding, expected in zip(ROUNDINGS, near, strict=True):
        [found] = parted_answers([told(plain, plain, [*plain[:3], twin])], folder, rounding=rounding, device="cpu")
        assert (found.way, found.near_tie) == ("challenger", expected), rounding


def test_a_regression_set_has_the_categories_of_its_file(target, tmp_path: Path):
    rows = [{"category": c, "messages": [{"role": "user", "content": f"{c} {i}"}]} for i in range(3) for c in "ab"]
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "raw"}]))
    everything = regression_prompts(str(file), target)
    assert [p.category for p in everything] == [*"ababab", ""]
    assert target.tokenizer.decode(everything[2].prompt_ids).endswith("a 1<|im_end|>\n<|im_start|>assistant\n")
    assert regression_prompts(str(file), target, per_category=2) == [*everything[:4], everything[6]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 0}, "batch is 0; give at least 1"),
        ({"margin": -0.1}, "margin is -0.1; give a share"),
        ({"min_prompts": 1}, "min_prompts is 1; give at least 2"),
        ({"speed_tolerance": 0.2, "most_speed_tolerance": 0.1}, "most_speed_tolerance is 0.1; give speed_tolerance"),
    ],
)
def test_a_config_that_cannot_work_names_the_mend(change, says):
    with pytest.raises(GateError, match=says):
        GateConfig(**change)


def test_answers_that_leave_no_room_are_an_error(target, trained):
    with pytest.raises(GateError, match="leaves no room for prompts in max_len 2048"):
        held(target, None, trained, config=replace(CONFIG, max_new_tokens=600))
