"""The training step: reproducible, resumable, shared evenly among workers; and it learns."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice

import pytest
import torch

from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.losses import FinalNorm, LossConfig, supervise
from drafters.training_batch import Document, pad_documents
from pipelines import training
from pipelines.curve_point import CurvePoint
from pipelines.expected_acceptance import expected_acceptance, walk_rounds
from pipelines.step_config import StepConfig
from pipelines.training import MAX_SKIPPED_STEPS, Team, Trainer, TrainingFailedError
from pipelines.training_sequence import TrainingSequence
from tests.toy_dflash import toy_dflash
from tests.toy_mtp import continued, toy_mtp, toy_trainer
from tests.toy_target import toy_model, toy_prompts

KINDS = ["recursive", "independent"]
CONFIG = StepConfig(
    precision="float32",
    epochs=4,
    tokens_per_step=80,  # about four sequences
    row_tokens=40,
    anchors_per_sequence=6,
    learning_rate=5e-3,
    evaluations=2,
    seed=5,
)


def final_norm(model) -> FinalNorm:
    return FinalNorm(model.model.norm.weight.detach(), model.model.norm.variance_epsilon)


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def sequences(model) -> list[TrainingSequence]:
    return continued(model, toy_prompts(10, low=2, high=9), max_new_tokens=14)


@pytest.fixture
def held_out(sequences) -> list[TrainingSequence]:
    return sequences[:2]


def curve_of(trainer: Trainer) -> list[CurvePoint]:
    return [replace(point, seconds=0, waited_seconds=0) for point in trainer.run()]


def weights(module: DrafterModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_curve_whatever_the_process_did_before(kind, model, sequences, held_out):
    runs = []
    for process_seed in (1, 2):
        torch.manual_seed(process_seed)
        state = torch.get_rng_state()
        module = toy_mtp(model, kind)
        runs.append((curve_of(toy_trainer(module, sequences, held_out, CONFIG)), weights(module)))
        assert torch.equal(torch.get_rng_state(), state), "training drew from the process's random stream"
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])
    other = curve_of(toy_trainer(toy_mtp(model, kind), sequences, held_out, replace(CONFIG, seed=6)))
    assert [p.loss for p in other] != [p.loss for p in runs[0][0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 3, 9])
def test_resumed_training_ends_with_the_weights_of_an_undisturbed_run(kind, cut, model, sequences, held_out):
    undisturbed = toy_mtp(model, kind)
    curve = curve_of(toy_trainer(undisturbed, sequences, held_out, CONFIG))

    killed = toy_trainer(toy_mtp(model, kind), sequences, held_out, CONFIG)
    state = None
    for point in killed.run():
        if point.step == cut:
            state = copy.deepcopy(killed.state_dict())
        if point.step == cut + 1:  # work after the last saved state is lost
            break
    resumed = toy_trainer(toy_mtp(model, kind, seed=99), sequences, held_out, CONFIG)
    resumed.load_state_dict(state)
    rest = curve_of(resumed)
    assert [p.step for p in rest] == list(range(cut + 1, len(curve) + 1))
    assert_equal(weights(resumed.module), weights(undisturbed))
    assert rest[-1].expected_tau == curve[-1].expected_tau
    assert rest[-1].tokens == curve[-1].tokens
    assert list(resumed.run()) == []


# -- a step is the sum of its parts, whoever computes them ------------------------------------------------------------

MAKERS = {
    "recursive": lambda model: toy_mtp(model),
    "independent": lambda model: toy_mtp(model, "independent"),
    "dflash": lambda model: toy_dflash(model, confidence_head=True, selector_top_k=4, selector_rank=6),
}
PARTS = replace(CONFIG, micro_batches=4, clip_norm=1e9)


class Together:
    """Workers that run in one thread, one after another: a sum over them is known once all have said their part."""

    def __init__(self, world: int):
        self.world, self.said, self.known = world, [[] for _ in range(world)], []

    def team(self, rank: int) -> Team:
        def add(tensor: torch.Tensor) -> torch.Tensor:
            self.said[rank].append(tensor)
            place = len(self.said[rank]) - 1
            return self.known[place] if place < len(self.known) else tensor

        return Team(rank, self.world, add)

    def learn(self) -> bool:
        """Take the sums of what was said in this attempt; whether anything new was learned."""
        sums = [torch.stack(parts).sum(dim=0) for parts in zip(*self.said, strict=True)]
        new = len(sums) != len(self.known) or any(
            not torch.equal(one, other) for one, other in zip(sums, self.known, strict=True)
        )
        self.said, self.known = [[] for _ in range(self.world)], sums
        return new


def first_step(name: str, model, sequences, world: int) -> tuple[torch.Tensor, CurvePoint]:
    """(the mean of the workers' gradients, as distributed training takes it; the first point) of so many workers."""
    together = Together(world)
    while True:
        gradients, points = [], []
        for rank in range(world):
            trainer = toy_trainer(MAKERS[name](model), sequences, [], PARTS, team=together.team(rank))
            points.append(next(trainer.run()))
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.parameters]))
        if not together.learn():
            return torch.stack(gradients).mean(dim=0), points[0]


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_workers_takes_the_same_step(world, name, model, sequences):
    alone, one = first_step(name, model, sequences, 1)
    gradient, point = first_step(name, model, sequences, world)
    torch.testing.assert_close(gradient, alone, rtol=1e-3, atol=1e-4)
    assert point.loss == pytest.approx(one.loss, rel=1e-4)
    assert point.accuracy_by_position == pytest.approx(one.accuracy_by_position)
    assert point.tokens == one.tokens > 0


def test_a_step_that_is_computed_in_parts_is_that_of_the_whole(model, sequences):
    """Four packs as one batch, against one after another."""
    trainer = toy_trainer(toy_mtp(model), sequences, [], PARTS)
    packs = next(trainer.source.steps(range(4), 1, 1))
    documents = []
    for pack in packs:
        generator = torch.Generator().manual_seed((PARTS.seed * 1_000_003 + 1) * 1009 + pack.lane)
        documents += [s.document(PARTS.anchors_per_sequence, generator) for s in pack.sequences]
    batch = pad_documents(documents)
    whole = trainer._backward(batch)
    expected = torch.cat([p.grad.flatten() for p in trainer.parameters])
    trainer.optimizer.zero_grad()
    facts = trainer._step(1, packs)
    parts = torch.cat([p.grad.flatten() for p in trainer.parameters])
    torch.testing.assert_close(parts, expected, rtol=1e-3, atol=1e-4)
    assert facts.loss == pytest.approx(float(whole[0]), rel=1e-4)


# -- what is not finite -----------------------------------------------------------------------------------------------


def test_a_sequence_whose_features_are_not_finite_is_left_out_and_counted(model, sequences):
    spoiled = [replace(s, features=s.features.clone()) for s in sequences]
    spoiled[3].features[2, 5] = float("nan")
    trainer = toy_trainer(toy_mtp(model), spoiled, [], replace(CONFIG, epochs=2))
    last = curve_of(trainer)[-1]
    assert (last.skipped_sequences, last.skipped_steps) == (2, 0)
    assert all(bool(torch.isfinite(p).all()) for p in trainer.parameters)


def test_many_such_sequences_end_the_run(model, sequences):
    spoiled = [replace(s, features=s.features * (float("inf") if i % 5 == 0 else 1)) for i, s in enumerate(sequences)]
    with pytest.raises(TrainingFailedError, match=r"the features of 2\d of 1\d\d sequences are not finite; generate"):
        curve_of(toy_trainer(toy_mtp(model), spoiled, [], replace(CONFIG, epochs=30)))


class Overflowing(Trainer):
    """Gradients are not finite in the steps that it is told."""

    bad: tuple[int, ...] = ()

    def _step(self, step, packs):
        handles = [p.register_hook(lambda g: g * float("inf")) for p in self.parameters if step in self.bad]
        facts = super()._step(step, packs)
        for handle in handles:
            handle.remove()
        return facts


def test_a_step_whose_gradient_is_not_finite_changes_nothing(model, sequences):
    plain = toy_trainer(toy_mtp(model), sequences, [], CONFIG)
    trainer = Overflowing(toy_mtp(model), plain.source, [], CONFIG)
    trainer.bad = (3,)
    seen = [weights(trainer.module) for _ in trainer.run()]
    assert_equal(seen[1], seen[2])
    assert not torch.equal(seen[2]["fc.weight"], seen[3]["fc.weight"])
    assert (trainer.skipped_steps, trainer.skipped_in_a_row) == (1, 0)


def test_many_such_steps_in_a_row_end_the_run(model, sequences):
    config = replace(CONFIG, epochs=8)
    trainer = Overflowing(toy_mtp(model), toy_trainer(toy_mtp(model), sequences, [], config).source, [], config)
    trainer.bad = tuple(range(4, 99))
    with pytest.raises(TrainingFailedError, match=f"{MAX_SKIPPED_STEPS} steps in a row, up to step 13; give a"):
        curve_of(trainer)
    assert trainer.done == 12


# -- it learns --------------------------------------------------------------------------------------------------------


@pytest.mark.learning
@pytest.mark.parametrize("kind", KINDS)
def test_loss_falls_and_acceptance_rises(kind, model, sequences):
    module = toy_mtp(model, kind)
    before = expected_acceptance(module, sequences, 3).tau
    config = replace(CONFIG, epochs=60, anchors_per_sequence=12, learning_rate=1e-2)
    curve = curve_of(toy_trainer(module, sequences, sequences, config))
    assert curve[-1].loss < curve[0].loss / 3
    assert curve[-1].accuracy_by_position[0] > curve[0].accuracy_by_position[0] + 0.3
    assert curve[-1].expected_tau > before + 0.5
    assert [p.expected_tau is not None for p in curve].count(True) == config.evaluations
    assert len(curve[-1].acceptance_by_position) == len(curve[-1].accuracy_by_position) == 3
    assert module.training is True


def test_learning_rate_warms_up_and_ends_near_zero(model, sequences):
    trainer = toy_trainer(toy_mtp(model), sequences, [], replace(CONFIG, epochs=80, warmup_fraction=0.1))
    trainer.total_steps = 200
    rates = [CONFIG.learning_rate * trainer._schedule(step) for step in range(1, 201)]
    assert rates[0] == pytest.approx(CONFIG.learning_rate / 20)
    assert max(rates) <= CONFIG.learning_rate
    assert rates[19] == max(rates)
    assert rates[-1] < CONFIG.learning_rate / 1000
    assert rates[19:] == sorted(rates[19:], reverse=True)


def test_expected_acceptance_by_hand(model):
    """Rounds of a made-up drafter over made-up continuations: from anchor to anchor, within what is known."""

    class Fixed(DrafterModule):
        """Says after token t: t + 1, then t + 2, ... whatever the truth is."""

        def forward(self, batch):
            anchor_BA = batch.ids_BT[torch.arange(len(batch.ids_BT))[:, None], batch.anchors_BA + 1]
            drafts_BAK = anchor_BA[:, :, None] + torch.arange(1, 4)
            return DraftLogits(torch.nn.functional.one_hot(drafts_BAK, 256).float(), {})

    module = Fixed(toy_mtp(model).config)
    module.lm_head_WD = torch.zeros(256, 32)
    ids = torch.tensor([9, 9, 1, 2, 3, 7, 8, 20, 30, 31, 32, 33, 34])
    # prompt 9 9; anchors: 1 (accepts 2 3 of 2 3 4), 7 (accepts 8), 20 (none), 30 (31 32 33), then nothing is known
    acceptance = expected_acceptance(module, [TrainingSequence(ids, 2, torch.zeros(12, 64))], 3)
    assert (acceptance.rounds, acceptance.accepted_by_position) == (4, [3, 2, 1])
    assert acceptance.tau == 2.5
    short = TrainingSequence(ids[:5], 2, torch.zeros(4, 64))  # no round lies within it
    assert expected_acceptance(module, [short], 3).tau is None


def test_held_out_responses_too_short_for_a_round_leave_tau_unknown(model, sequences):
    short = [TrainingSequence(s.ids[: s.prompt_len + 3], s.prompt_len, s.features) for s in sequences[:2]]
    last = curve_of(toy_trainer(toy_mtp(model), sequences, short, replace(CONFIG, epochs=0.4)))[-1]
    assert last.evaluated
    assert (last.expected_tau, last.acceptance_by_position) == (None, [])


@pytest.mark.learning
@pytest.mark.parametrize("weights", ["geometric", "exponential", "dpace"])
@pytest.mark.parametrize("kind", ["cross_entropy", "kl"])
def test_every_loss_teaches(kind, weights, model, sequences):
    module = toy_mtp(model)
    loss = LossConfig(kind=kind, weights=weights)
    config = replace(CONFIG, epochs=60, anchors_per_sequence=12, learning_rate=1e-2, loss=loss)
    before = expected_acceptance(module, sequences, 3).tau
    curve = curve_of(toy_trainer(module, sequences, sequences, config, final_norm=final_norm(model)))
    assert curve[-1].expected_tau > before + 0.5


def test_kl_is_towards_the_targets_own_logits(model, sequences):
    trainer = toy_trainer(
        toy_mtp(model), sequences, [], replace(CONFIG, loss=LossConfig(kind="kl")), final_norm=final_norm(model)
    )
    chosen = sequences[:2]
    anchors = torch.tensor([[s.prompt_len - 1, s.prompt_len + 3] for s in chosen])
    batch = pad_documents(
        [
            Document(ids_T=s.ids, features_TF=s.features, anchors_A=a, ends_A=torch.full((2,), len(s.ids)))
            for s, a in zip(chosen, anchors, strict=True)
        ]
    )
    supervision = supervise(trainer.module, batch, trainer.final_norm)
    with torch.no_grad():
        said = [model(s.ids[None]).logits[0] for s in chosen]
    for n, (b, a) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        p = int(anchors[b, a])
        torch.testing.assert_close(
            supervision.target_logits_NKW[n], said[b][p + 1 : p + 4], rtol=1e-4, atol=1e-4
        )  # the target's words after positions p + 1, p + 2, p + 3
        assert supervision.labels_NK[n].tolist() == said[b][p + 1 : p + 4].argmax(-1).tolist()  # it is greedy
    with pytest.raises(ValueError, match="give its final_norm"):
        toy_trainer(toy_mtp(model), sequences, [], replace(CONFIG, loss=LossConfig(kind="kl")))


def test_tau_by_category_is_that_of_each_part(model, sequences):
    module = toy_mtp(model)
    marked = [replace(s, category="abc"[i % 3]) for i, s in enumerate(sequences)]
    last = curve_of(toy_trainer(module, sequences, marked, replace(CONFIG, epochs=0.4)))[-1]
    assert last.tau_by_category == {c: expected_acceptance(module, marked[i::3], 3).tau for i, c in enumerate("abc")}
    assert last.expected_tau == expected_acceptance(module, sequences, 3).tau


def test_rounds_begin_where_the_one_before_ended():
    acceptance = walk_rounds([2, 9, 9, 0, 3, 9, 9, 9, 1], 3)  # begins at 0, 3, 4, 8
    assert (acceptance.rounds, acceptance.accepted_by_position) == (4, [3, 2, 1])
    assert walk_rounds([], 3).tau is None


def test_what_cannot_be_trained_is_refused(model, sequences):
    with pytest.raises(ValueError, match="5 workers cannot share 4 micro-batches"):
        toy_trainer(toy_mtp(model), sequences, [], PARTS, team=Team(4, 5))
    with pytest.raises(ValueError, match="0 chunks of rows cannot feed 1 parts of a step"):
        toy_trainer(toy_mtp(model), [], [], CONFIG)


@pytest.mark.learning
def test_bfloat16_products_teach_like_float32(model, sequences):
    """The weights stay in float32, and the loss falls as it does there."""
    curves = {}
    for precision in ("float32", "bfloat16"):
        trainer = toy_trainer(toy_mtp(model), sequences, [], replace(CONFIG, precision=precision, epochs=3))
        curves[precision] = [point.loss for point in curve_of(trainer)]
        assert {p.dtype for p in trainer.parameters} == {torch.float32}
        assert trainer.in_bfloat16 == (precision == "bfloat16")
    assert curves["bfloat16"] != curves["float32"]
    assert curves["bfloat16"][-1] == pytest.approx(curves["float32"][-1], rel=0.03)
    assert curves["bfloat16"][-1] < 0.97 * curves["bfloat16"][0]


def test_seconds_are_those_of_all_starts_and_of_steps_alone(model, sequences, held_out, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))  # a second from look to look
    first = toy_trainer(toy_mtp(model), sequences, held_out, CONFIG)
    points = list(islice(first.run(), 3))
    assert [point.seconds for point in points] == [2, 4, 6]
    assert [point.waited_seconds for point in points] == [1, 2, 3], "half of it until the rows were there"
    second = toy_trainer(toy_mtp(model), sequences, held_out, CONFIG)
    second.load_state_dict(first.state_dict())
    assert next(second.run()).seconds == 8
