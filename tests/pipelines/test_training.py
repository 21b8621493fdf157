"""The training step: reproducible, resumable, shared evenly among workers; and it learns."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice

import pytest
import torch

from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.losses import FinalNorm, LossConfig, supervise
from pipelines.training import (
    CurvePoint,
    StepConfig,
    Trainer,
    TrainingSequence,
    expected_acceptance,
    make_batch,
    total_steps,
    walk_rounds,
)
from tests.toy_mtp import continued, toy_mtp
from tests.toy_target import toy_model, toy_prompts

KINDS = ["recursive", "independent"]
CONFIG = StepConfig(
    precision="float32",
    epochs=4,
    sequences_per_step=4,
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
    return [replace(point, seconds=0) for point in trainer.run()]


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
        runs.append((curve_of(Trainer(module, sequences, held_out, CONFIG)), weights(module)))
        assert torch.equal(torch.get_rng_state(), state), "training drew from the process's random stream"
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])
    other = curve_of(Trainer(toy_mtp(model, kind), sequences, held_out, replace(CONFIG, seed=6)))
    assert [p.loss for p in other] != [p.loss for p in runs[0][0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 3, 9])
def test_resumed_training_ends_with_the_weights_of_an_undisturbed_run(kind, cut, model, sequences, held_out):
    undisturbed = toy_mtp(model, kind)
    curve = curve_of(Trainer(undisturbed, sequences, held_out, CONFIG))

    killed = Trainer(toy_mtp(model, kind), sequences, held_out, CONFIG)
    state = None
    for point in killed.run():
        if point.step == cut:
            state = copy.deepcopy(killed.state_dict())
        if point.step == cut + 1:  # work after the last saved state is lost
            break
    resumed = Trainer(toy_mtp(model, kind, seed=99), sequences, held_out, CONFIG)
    resumed.load_state_dict(state)
    rest = curve_of(resumed)
    assert [p.step for p in rest] == list(range(cut + 1, len(curve) + 1))
    assert_equal(weights(resumed.module), weights(undisturbed))
    assert rest[-1].expected_tau == curve[-1].expected_tau
    assert rest[-1].tokens == curve[-1].tokens
    assert list(resumed.run()) == []


@pytest.mark.parametrize("world", [2, 4])
def test_workers_share_every_step_without_overlap(world, model, sequences):
    whole = Trainer(toy_mtp(model), sequences, [], CONFIG)
    parts = [Trainer(toy_mtp(model), sequences, [], CONFIG, rank=r, world=world) for r in range(world)]
    seen: list[int] = []
    for (chosen, _), *shares in zip(whole._order(), *(part._order() for part in parts), strict=True):
        together = [id(s) for share, _ in shares for s in share]
        assert together == [id(s) for s in chosen]
        assert len({seed for _, seed in shares}) == world, "workers must draw different anchors"
        seen += together
    assert len(seen) == whole.total_steps * CONFIG.sequences_per_step
    for first in range(0, len(seen) - len(sequences) + 1, len(sequences)):  # every epoch visits each sequence once
        assert len(set(seen[first : first + len(sequences)])) == len(sequences)


def test_mean_gradient_of_two_workers_is_that_of_one(model, sequences):
    """Every anchor trained and responses of one length: then the mean of the workers' means is the whole's mean."""
    config = replace(CONFIG, anchors_per_sequence=99, epochs=0.4, clip_norm=1e9)

    def gradients(rank: int, world: int) -> torch.Tensor:
        trainer = Trainer(toy_mtp(model), sequences, [], config, rank=rank, world=world)
        next(trainer.run())
        return torch.cat([p.grad.flatten() for p in trainer.parameters])

    torch.testing.assert_close((gradients(0, 2) + gradients(1, 2)) / 2, gradients(0, 1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_falls_and_acceptance_rises(kind, model, sequences):
    module = toy_mtp(model, kind)
    before = expected_acceptance(module, sequences, 3).tau
    config = replace(CONFIG, epochs=60, anchors_per_sequence=12, learning_rate=1e-2)
    curve = curve_of(Trainer(module, sequences, sequences, config))
    assert curve[-1].loss < curve[0].loss / 3
    assert curve[-1].accuracy_by_position[0] > curve[0].accuracy_by_position[0] + 0.3
    assert curve[-1].expected_tau > before + 0.5
    assert [p.expected_tau is not None for p in curve].count(True) == config.evaluations
    assert len(curve[-1].acceptance_by_position) == len(curve[-1].accuracy_by_position) == 3
    assert module.training is True


def test_learning_rate_warms_up_and_ends_near_zero(model, sequences):
    trainer = Trainer(toy_mtp(model), sequences, [], replace(CONFIG, epochs=80, warmup_fraction=0.1))
    assert trainer.total_steps == 200
    rates = [trainer._learning_rate(step) for step in range(1, 201)]
    assert rates[0] == pytest.approx(CONFIG.learning_rate / 20)
    assert max(rates) <= CONFIG.learning_rate
    assert rates[19] == max(rates)
    assert rates[-1] < CONFIG.learning_rate / 1000
    assert rates[19:] == sorted(rates[19:], reverse=True)


def test_steps_cover_the_epochs():
    assert total_steps(replace(CONFIG, epochs=4, sequences_per_step=4), 10) == 10
    assert total_steps(replace(CONFIG, epochs=1, sequences_per_step=4), 9) == 3
    assert total_steps(replace(CONFIG, epochs=0.01, sequences_per_step=4), 9) == 1


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
    last = curve_of(Trainer(toy_mtp(model), sequences, short, replace(CONFIG, epochs=0.4)))[-1]
    assert last.evaluated
    assert (last.expected_tau, last.acceptance_by_position) == (None, [])


@pytest.mark.parametrize("weights", ["geometric", "exponential", "dpace"])
@pytest.mark.parametrize("kind", ["cross_entropy", "kl"])
def test_every_loss_teaches(kind, weights, model, sequences):
    module = toy_mtp(model)
    loss = LossConfig(kind=kind, weights=weights)
    config = replace(CONFIG, epochs=60, anchors_per_sequence=12, learning_rate=1e-2, loss=loss)
    before = expected_acceptance(module, sequences, 3).tau
    curve = curve_of(Trainer(module, sequences, sequences, config, final_norm=final_norm(model)))
    assert curve[-1].expected_tau > before + 0.5


def test_kl_is_towards_the_targets_own_logits(model, sequences):
    trainer = Trainer(
        toy_mtp(model), sequences, [], replace(CONFIG, loss=LossConfig(kind="kl")), final_norm=final_norm(model)
    )
    chosen = sequences[:2]
    anchors = torch.tensor([[s.prompt_len - 1, s.prompt_len + 3] for s in chosen])
    batch = make_batch(chosen, anchors, torch.ones_like(anchors, dtype=torch.bool))
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
        Trainer(toy_mtp(model), sequences, [], replace(CONFIG, loss=LossConfig(kind="kl")))


def test_tau_by_category_is_that_of_each_part(model, sequences):
    module = toy_mtp(model)
    marked = [replace(s, category="abc"[i % 3]) for i, s in enumerate(sequences)]
    last = curve_of(Trainer(module, sequences, marked, replace(CONFIG, epochs=0.4)))[-1]
    assert last.tau_by_category == {c: expected_acceptance(module, marked[i::3], 3).tau for i, c in enumerate("abc")}
    assert last.expected_tau == expected_acceptance(module, sequences, 3).tau


def test_rounds_begin_where_the_one_before_ended():
    acceptance = walk_rounds([2, 9, 9, 0, 3, 9, 9, 9, 1], 3)  # begins at 0, 3, 4, 8
    assert (acceptance.rounds, acceptance.accepted_by_position) == (4, [3, 2, 1])
    assert walk_rounds([], 3).tau is None


def test_what_cannot_be_trained_is_refused(model, sequences):
    with pytest.raises(ValueError, match=r"sequences_per_step \(4\) must divide by 3 workers"):
        Trainer(toy_mtp(model), sequences, [], CONFIG, world=3)
    with pytest.raises(ValueError, match="no training sequence"):
        Trainer(toy_mtp(model), [], [], CONFIG)


def test_bfloat16_products_teach_like_float32(model, sequences):
    """The weights stay in float32, and the loss falls as it does there."""
    curves = {}
    for precision in ("float32", "bfloat16"):
        trainer = Trainer(toy_mtp(model), sequences, [], replace(CONFIG, precision=precision, epochs=3))
        curves[precision] = [point.loss for point in curve_of(trainer)]
        assert {p.dtype for p in trainer.parameters} == {torch.float32}
        assert trainer.in_bfloat16 == (precision == "bfloat16")
    assert curves["bfloat16"] != curves["float32"]
    assert curves["bfloat16"][-1] == pytest.approx(curves["float32"][-1], rel=0.03)
    assert curves["bfloat16"][-1] < 0.97 * curves["bfloat16"][0]


def test_seconds_are_those_of_all_starts_and_of_steps_alone(model, sequences, held_out, monkeypatch):
    from pipelines import training

    clock = iter(range(10_000))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))  # a second from look to look
    first = Trainer(toy_mtp(model), sequences, held_out, CONFIG)
    points = list(islice(first.run(), 3))
    assert [point.seconds for point in points] == [1, 2, 3]
    second = Trainer(toy_mtp(model), sequences, held_out, CONFIG)
    second.load_state_dict(first.state_dict())
    assert next(second.run()).seconds == 4
