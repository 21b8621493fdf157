"""A comparison from beginning to end: what is reported, runs go on, a bad drafter costs one line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from drafters.prompt_lookup import PromptLookupDrafter
from pipelines import compare as stage
from pipelines.compare import CompareProgress, compare
from pipelines.compare_bench import Bench, best_shape
from pipelines.compare_config import LOOKUP, CompareConfig, CompareError, Shape, names_of
from pipelines.compare_contenders import borrowed_weights
from pipelines.compare_figures import BatchTimes, CompareReport, LengthFigures, ShapeTimes
from pipelines.compare_tables import set_table
from pipelines.compare_timing import timed_answers
from tests.toy_dflash import toy_dflash
from tests.toy_folder import save_toy_target
from tests.toy_mtp import save_toy_drafter, shared_of, toy_mtp
from tests.toy_target import toy_model


def test_rounds_in_which_less_is_offered_cost_less():
    chain = [ShapeTimes(depth=k, nodes=0, t_draft_s=1.0, t_verify_s=10.0 + k) for k in (1, 2)]
    times = BatchTimes(batch=1, t_base_s=8.0, shapes=chain)
    length = LengthFigures(
        depth=2, nodes=0, rounds=4, tau=2.0, acceptance_by_position=[], offered=[0.5, 0.25, 0.25], s_predicted=[]
    )
    assert times.verify_s(Shape(2), length.offered) == pytest.approx(0.5 * 8 + 0.25 * 11 + 0.25 * 12)
    assert times.s_predicted(length) == pytest.approx(8 * 2 / (1 + 9.75))
    assert times.s_predicted(replace(length, depth=3)) is None
    one = replace(length, depth=1, s_predicted=[1.4, None])
    assert best_shape([one, replace(length, s_predicted=[1.2, None])], 0) == Shape(1)
    assert best_shape([one, replace(length, s_predicted=[1.2, None])], 1) == Shape(2), "nothing is known: a few drafts"


def test_what_is_shared_is_asked_of_the_module():
    model = toy_model()
    shared = shared_of(model)
    assert borrowed_weights(toy_mtp(model), shared) == ["embedding", "LM head"]
    assert borrowed_weights(toy_dflash(model), shared) == ["embedding", "LM head"]
    assert borrowed_weights(toy_mtp(model, "independent"), shared) == ["LM head", "final norm"]
    own = toy_mtp(model, "independent", own_lm_head=True, anchor_embedding=True)
    assert borrowed_weights(own, shared) == ["embedding", "final norm"]
    assert own.embedding_VD.equal(shared.embedding_VD), "and then it has the target's own again"


# -- the whole command ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_target_dir: Path) -> Path:
    """Prompts, two drafters, and one of another target."""
    folder = tmp_path_factory.mktemp("compared")
    for name, word in (("one", "count from"), ("two", "name")):
        rows = "".join(json.dumps({"prompt": f"{word} {i}"}) + "\n" for i in range(4))
        (folder / f"{name}.jsonl").write_text(rows)
    save_toy_drafter(folder / "mtp", toy_target_dir)
    save_toy_drafter(folder / "heads", toy_target_dir, "independent")
    save_toy_drafter(folder / "stranger", save_toy_target(folder / "other", seed=1))
    return folder


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAUSE_S", 0.0), ("PASSES", 1), ("SAMPLES", 1)):
        monkeypatch.setattr(f"pipelines.compare_timing.{name}", value)


def config_of(folder: Path, target: Path, *drafters: str, **changes) -> CompareConfig:
    fields = {
        "target": str(target), "drafters": tuple(str(folder / name) for name in drafters),
        "prompts": (str(folder / "one.jsonl"), str(folder / "two.jsonl")), "output": str(folder / "out"),
        "limit": 3, "speed_limit": 2, "max_new_tokens": 8, "batches": (1, 2), "num_draft_tokens": 3, "trees": (3,),
        "backend": "torch",
    }  # fmt: skip
    return CompareConfig(**(fields | changes))


def test_a_comparison_is_written_and_gone_on_with(folder, toy_target_dir, monkeypatch):
    shown: list[CompareProgress] = []
    report = compare(config_of(folder, toy_target_dir, "mtp", "nothing", "stranger"), shown.append)
    assert [(p.drafter, p.prompt_set) for p in report.pairs] == [
        (LOOKUP, "one"), ("mtp", "one"), (LOOKUP, "two"), ("mtp", "two"),
    ]  # fmt: skip
    check_report(report, folder / "out")
    assert [out.name for out in report.left_out] == ["nothing", "stranger"]
    assert "no drafter at" in report.left_out[0].reason
    assert "another target" in report.left_out[1].reason
    assert [at.message.partition(" ")[0] for at in shown if at.message] == ["nothing", "stranger"]
    assert shown[-1].done == shown[-1].total > 0

    measured: list[list[str]] = []
    pairs = Bench.pairs
    monkeypatch.setattr(Bench, "pairs", lambda self, names, *rest: measured.append(names) or pairs(self, names, *rest))
    next((folder / "out" / "parts").glob("two--mtp-*.json")).unlink()  # as if it had been stopped before
    again = compare(config_of(folder, toy_target_dir, "mtp"))
    assert measured == [["mtp"]], "only what is missing"
    assert again.pair("mtp", "one") == report.pair("mtp", "one")
    assert again.left_out == []
    measured.clear()
    compare(config_of(folder, toy_target_dir, "mtp", "heads"))
    assert measured == [["heads"], ["heads"]]
    with monkeypatch.context() as patch:
        patch.setattr(stage, "Bench", None)  # nothing is measured, no engine is built
        compare(config_of(folder, toy_target_dir, "mtp", "heads"))
    measured.clear()
    compare(config_of(folder, toy_target_dir, max_new_tokens=6, prompts=(str(folder / "one.jsonl"),)))
    assert measured == [[LOOKUP]], "with other options nothing counts"


def check_report(report: CompareReport, output: Path) -> None:
    assert json.loads((output / "compare.json").read_text()) == json.loads(json.dumps(asdict(report)))
    assert "<svg" in (output / "compare.svg").read_text()
    page = (output / "compare.md").read_text()
    assert all(word in page for word in ("mtp", LOOKUP, "plain decoding", "compare.svg", "another target"))
    check_table(report)
    assert report.exact
    assert report.unequal == []
    mtp = next(d for d in report.drafters if d.name == "mtp")
    assert mtp.shares == ["embedding", "LM head", "hidden states of layers 0, 1"]
    assert (mtp.kind, mtp.training_minutes) == ("mtp-recursive", None)
    assert min(mtp.parameters, mtp.weights_bytes, mtp.slot_bytes) > 0
    for pair in report.pairs:
        assert [s.prompts for s in pair.speeds] == [3, 4], "three groups of the smallest batch, two of the other"
        assert all(s.equal == s.prompts for s in pair.speeds)
        assert [s.tau for s in pair.speeds] == [s.tau_counted for s in pair.speeds]
        assert all(s is not None for one in pair.lengths for s in one.s_predicted)


def check_table(report: CompareReport) -> None:
    """Costs and S_predicted stand there for every batch."""
    table, pair = set_table(report, "one"), report.pair("mtp", "one")
    plain, mtp = (dict(zip(table.heads, row, strict=True)) for row in (table.rows[0], table.rows[2]))
    assert plain["tau"] == "-", "plain decoding has no rounds"
    assert mtp["T_draft, ms, at 1 / 2"] == " / ".join(f"{s.t_draft_s * 1e3:.1f}" for s in pair.speeds)
    assert mtp["T_verify, ms, at 1 / 2"] == " / ".join(f"{s.t_verify_s * 1e3:.1f}" for s in pair.speeds)
    predicted = [pair.length(speed.shape).s_predicted[i] for i, speed in enumerate(pair.speeds)]
    assert mtp["S_predicted at 1 / 2"] == " / ".join(f"{s:.2f}" for s in predicted)


@pytest.mark.parametrize("tie", [False, True])
def test_outputs_that_differ_are_an_error_unless_rounding_explains_them(tie, folder, toy_target_dir, monkeypatch):
    def altered(*arguments, **options):
        found = timed_answers(*arguments, **options)
        found[LOOKUP].answers[0][-1] ^= 1
        return found

    monkeypatch.setattr("pipelines.compare_bench.timed_answers", altered)
    if tie:
        monkeypatch.setattr("pipelines.compare_bench.near_ties", lambda parted, *rest: [True] * len(parted))
    config = config_of(folder, toy_target_dir, output=str(folder / f"{tie}"), prompts=(str(folder / "one.jsonl"),))
    report = compare(config)
    page = (folder / f"{tie}" / "compare.md").read_text()
    if tie:
        assert (report.unequal, report.errors()) == ([], [])
        assert "5 of 7, 2 part at near-ties" in page
    else:
        assert report.unequal == [LOOKUP]
        assert "only 5 of 7 outputs" in report.errors()[0]
        assert report.advice.drafter is None


class Falling(PromptLookupDrafter):
    """Fails at once."""

    def draft(self, request):
        raise RuntimeError("out of order")


def test_what_was_not_timed_whole_is_no_result_that_is_kept(folder, toy_target_dir, monkeypatch):
    config = config_of(
        folder, toy_target_dir, "mtp", output=str(folder / "partly"), prompts=(str(folder / "one.jsonl"),)
    )
    shown: list[CompareProgress] = []
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.compare_timing.MOST_TRIES", 0)
        assert compare(config, shown.append).times[0].batches[0].t_base_s is None
    assert [at.message for at in shown if at.message] == [
        f"{name}: some rounds came too seldom to be timed; another run measures it again" for name in (LOOKUP, "mtp")
    ]
    parts = folder / "partly" / "parts"
    assert not parts.exists()

    monkeypatch.setattr("pipelines.compare_bench.PromptLookupDrafter", Falling)
    report = compare(config)
    assert [(out.name, out.reason) for out in report.left_out] == [
        (LOOKUP, "it failed while it drafted (RuntimeError)")
    ]
    assert [pair.drafter for pair in report.pairs] == ["mtp"]
    assert sorted(file.name.rpartition("-")[0] for file in parts.iterdir()) == ["mtp", "one--mtp"]


def test_names_and_wrong_use(folder, toy_target_dir):
    assert names_of(["a/mtp", "b/mtp/", "fast=s3://x/y", "gsm8k_test", "data/humaneval.jsonl"]) == [
        "a/mtp", "b/mtp", "fast", "gsm8k_test", "humaneval",
    ]  # fmt: skip
    with pytest.raises(CompareError, match="nothing to compare"):
        compare(config_of(folder, toy_target_dir, prompt_lookup=False))
    with pytest.raises(CompareError, match="no drafter can be compared; stranger: "):
        compare(config_of(folder, toy_target_dir, "stranger", prompt_lookup=False))
    with pytest.raises(CompareError, match="batches are 8, 1; give each once, ascending"):
        compare(config_of(folder, toy_target_dir, "mtp", batches=(8, 1)))
    with pytest.raises(CompareError, match="given twice"):
        compare(config_of(folder, toy_target_dir, "mtp", "mtp"))
    with pytest.raises(CompareError, match="no room for a prompt"):
        compare(config_of(folder, toy_target_dir, max_new_tokens=100_000))
