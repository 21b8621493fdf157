"""The parity gate: equal where training and serving agree, failed where they do not, silent where nothing compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.acceptance import Acceptance
from drafters.checkpoint import as_drafter, load_module, read_provenance, save_checkpoint
from drafters.drafter import DraftReply, DraftRequest
from drafters.drafter_module import DrafterModule
from drafters.target import load_model, target_fingerprint
from pipelines.expected_acceptance import expected_acceptance
from pipelines.parity import ParityCase, compare, measure_parity, parity_cases, room_needed, run_parity
from pipelines.step_config import StepConfig
from pipelines.training_sequence import TrainingSequence
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sequence import Progress
from serving.engine.torch_rows import TorchRows
from tests.toy_dflash import VARIANTS, toy_dflash
from tests.toy_mtp import TAPS, continued, tokens_of, toy_mtp, toy_trainer
from tests.toy_target import toy_prompts

STEPS = 3  # K of the toy drafters


@pytest.fixture(scope="module")
def target(toy_target_dir: Path):
    return load_model(toy_target_dir, torch.float32)


@pytest.fixture(scope="module")
def sequences(target) -> list[TrainingSequence]:
    return continued(target, toy_prompts(8, low=2, high=30), max_new_tokens=30)


@pytest.fixture(scope="module")
def trained(target, sequences) -> DrafterModule:
    """Half learned: right now and then."""
    module = toy_mtp(target, vocab_size=260, draft_vocab_size=260)
    config = StepConfig(epochs=25, tokens_per_step=tokens_of(sequences), learning_rate=1e-2, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    return module.eval()


@pytest.fixture(scope="module")
def cases(trained, sequences) -> list[ParityCase]:
    return parity_cases(trained, sequences, STEPS, 32)


def engine_with(toy_target_dir: Path, drafter, cases: list[ParityCase]) -> Engine:
    rows = TorchRows(
        load_model(toy_target_dir, torch.float32),
        num_slots=3,
        max_len=room_needed(cases, STEPS),
        target_layer_ids=TAPS,
    )
    return Engine(rows, drafter, config=EngineConfig(num_draft_tokens=STEPS))


def test_the_engine_accepts_what_training_expects_round_by_round(toy_target_dir, trained, sequences, cases):
    result = measure_parity(engine_with(toy_target_dir, as_drafter(trained), cases), cases, STEPS)
    assert result.expected == expected_acceptance(trained, sequences, STEPS).tau
    assert result.served == result.expected
    assert (result.passed, result.prompts) == (True, 8)
    assert 1.3 < result.expected < STEPS + 0.9, "a drafter that is always right or wrong would prove little"
    assert "within 5%" in result.verdict()


@pytest.mark.learning
@pytest.mark.parametrize("variant", ["plain", "selector", "everything"])
def test_dflash_is_served_as_trained(variant, toy_target_dir, target, sequences):
    options = VARIANTS[variant] | {"vocab_size": 260, "block_size": STEPS + 1}
    module = toy_dflash(target, **({"draft_vocab_size": 260} | options))
    config = StepConfig(epochs=40, tokens_per_step=tokens_of(sequences), learning_rate=1e-2, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    cases = parity_cases(module.eval(), sequences, STEPS, 32)
    result = measure_parity(engine_with(toy_target_dir, as_drafter(module), cases), cases, STEPS)
    assert result.served == result.expected > 1.2


class Spoiled:
    """A drafter that is handed what training never showed it."""

    def __init__(self, module: DrafterModule, how: str):
        self.inner, self.how = as_drafter(module), how
        self.name, self.target_layer_ids = self.inner.name, self.inner.target_layer_ids
        self.max_draft_tokens, self.max_tree_nodes = self.inner.max_draft_tokens, 0

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.inner.allocate(num_slots, max_len)

    def draft(self, request: DraftRequest) -> DraftReply:
        if self.how == "layers swapped":
            request = replace(request, features_NF=request.features_NF.roll(32, dims=1))
        if self.how == "no features":
            request = replace(request, features_NF=torch.zeros_like(request.features_NF))
        if self.how == "failing":
            raise RuntimeError("out of order")
        if self.how == "tokens shifted":
            request = replace(request, tokens_N=request.tokens_N.roll(1))
        return self.inner.draft(request)


@pytest.mark.parametrize("how", ["layers swapped", "no features", "failing", "tokens shifted"])
def test_a_drafter_that_is_served_otherwise_than_trained_fails(how, toy_target_dir, trained, cases):
    result = measure_parity(engine_with(toy_target_dir, Spoiled(trained, how), cases), cases, STEPS)
    assert result.passed is False
    assert result.served < 0.9 * result.expected
    assert "more than 5% apart" in result.verdict()
    assert f"{result.served:.2f}" in result.verdict()


def test_sampled_rollouts_are_not_compared(trained, sequences, toy_target_dir):
    sampled = [replace(s, greedy=False) for s in sequences]
    assert parity_cases(trained, sampled, STEPS, 32) == []
    mixed = parity_cases(trained, [*sampled[:4], *sequences[4:]], STEPS, 32)
    assert [case.prompt_ids for case in mixed] == [s.ids[: s.prompt_len].tolist() for s in sequences[4:]]


def test_cases_are_spread_over_the_held_out_sequences(trained, sequences):
    chosen = parity_cases(trained, sequences, STEPS, 3)
    assert [case.prompt_ids for case in chosen] == [
        sequences[i].ids[: sequences[i].prompt_len].tolist() for i in (0, 2, 5)
    ]


# -- by hand ----------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine that decodes one request in given rounds of (tokens, drafts kept)."""

    def __init__(self, rounds: list[tuple[list[int], int]]):
        self.rounds = rounds

    def add(self, prompt_ids, sampling, *, request_id):
        assert sampling.temperature == 0
        return request_id

    @property
    def has_work(self) -> bool:
        return bool(self.rounds)

    def step(self) -> list[Progress]:
        tokens, accepted = self.rounds.pop(0)
        return [Progress(request_id="parity-0", token_ids=tokens, num_accepted=accepted)]


RESPONSE = [1, 2, 3, 4, 5, 6, 7, 8]  # with two drafts a round, rounds after tokens 0..5 are known to their end
CASE = ParityCase(prompt_ids=[9], response_ids=RESPONSE, accepted=[1, 0, 2, 0, 0, 1])


def parity_of(rounds: list[tuple[list[int], int]], case: ParityCase = CASE):
    return measure_parity(Scripted(rounds), [case], 2)


def test_rounds_by_hand():
    # expected: after token 0 one draft is kept, after token 2 two, after token 5 one: 3 rounds, 4 drafts, tau 7/3
    same = parity_of([([1], 0), ([2, 3], 1), ([4, 5, 6], 2), ([7, 8], 1)])
    assert (same.expected, same.served, same.passed) == (pytest.approx(7 / 3), pytest.approx(7 / 3), None)
    assert "too little text" in same.verdict()  # a third of seven tokens may be chance
    # served: none kept after token 0, 1, 2, ...: the rounds after tokens 6 and 7 would draft past the end and are out
    worse = parity_of([([t], 0) for t in RESPONSE])
    assert (worse.served, worse.passed) == (1.0, False)


def test_a_text_that_parts_is_compared_up_to_there():
    # the fourth token differs: known are three, so only the round after token 0 lies within
    parted = parity_of([([1], 0), ([2, 3], 1), ([7, 5, 6], 2), ([7, 8], 1)])
    assert (parted.expected, parted.served, parted.passed) == (2.0, 2.0, None)
    at_once = parity_of([([5], 0), ([2, 3], 1), ([7, 5, 6], 2)])
    assert (at_once.served, at_once.passed) == (None, False)


def test_responses_too_short_for_a_round_measure_nothing():
    short = ParityCase(prompt_ids=[9], response_ids=[1, 2], accepted=[])
    result = parity_of([([1], 0), ([2], 0)], short)
    assert (result.expected, result.served, result.passed) == (None, None, None)
    assert "not measured" in result.verdict()


def rounds_of(rounds: int, accepted: int) -> Acceptance:
    """So many rounds of three drafts, of which so many were kept in all."""
    return Acceptance(rounds=rounds, accepted_by_position=[accepted, 0, 0], proposed_by_position=[rounds] * 3)


@pytest.mark.parametrize(("served", "passed"), [(920, True), (880, False), (1080, True), (1120, False)])
def test_five_percent_either_way(served, passed):
    result = compare(rounds_of(1000, 1000), rounds_of(1000, served), 1, STEPS)  # tau 2 against 1.92, 1.88, 2.08, 2.12
    assert (result.expected, result.tolerance, result.passed) == (2.0, 0.05, passed)


@pytest.mark.parametrize(("served", "passed"), [(8, None), (6, False)])
def test_on_a_short_text_one_rounds_drafts_may_differ(served, passed):
    result = compare(rounds_of(10, 10), rounds_of(10, served), 1, STEPS)  # 20 tokens expected: 3 of them are 15%
    assert (result.tolerance, result.passed) == (pytest.approx(0.15), passed)
    longer = compare(rounds_of(20, 20), rounds_of(20, 2 * served), 1, STEPS)
    assert (longer.tolerance, longer.passed) == (pytest.approx(0.075), False)
    assert compare(rounds_of(20, 20), rounds_of(20, 18), 1, STEPS).passed


# -- a saved drafter --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, trained: DrafterModule, toy_target_dir: Path) -> Path:
    folder = tmp_path / "drafter"
    fingerprint = target_fingerprint(toy_target_dir, TAPS)
    save_checkpoint(folder, trained, {"target_fingerprint": fingerprint, "seed": 7})
    return folder


def test_a_saved_drafter_passes_and_its_provenance_says_so(saved, toy_target_dir, cases):
    result = run_parity(toy_target_dir, saved, cases, STEPS)
    assert result.passed
    provenance = read_provenance(saved)
    assert provenance["parity"] == {
        "expected": result.expected, "served": result.served, "prompts": 8, "tolerance": 0.05, "passed": True,
    }  # fmt: skip
    assert provenance["seed"] == 7
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors", "provenance.json"]


def test_a_drafter_whose_served_weights_differ_fails_and_is_kept(
    saved, toy_target_dir, cases, monkeypatch: pytest.MonkeyPatch
):
    def spoiled(*arguments, **options):
        module = load_module(*arguments, **options)
        module.fc.weight.copy_(-module.fc.weight)
        return module

    monkeypatch.setattr("serving.engine.build.load_module", spoiled)
    result = run_parity(toy_target_dir, saved, cases, STEPS)
    assert result.passed is False
    assert read_provenance(saved)["parity"]["passed"] is False
    assert load_module(saved, toy_target_dir) is not None


def test_without_cases_nothing_is_decoded(saved, toy_target_dir):
    result = run_parity(toy_target_dir / "nowhere", saved, [], STEPS)
    assert (result.served, result.passed) == (None, None)
    assert "no held-out response is greedy" in result.verdict()
    assert read_provenance(saved)["parity"]["passed"] is None
