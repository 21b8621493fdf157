"""A comparison: rounds counted along plain answers are the engine's own, runs go on, a bad drafter costs one line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafters.acceptance import Acceptance
from drafters.checkpoint import as_drafter
from drafters.drafter import Drafter
from drafters.prompt_lookup import PromptLookupDrafter
from pipelines import compare as stage
from pipelines.compare import CompareProgress, compare
from pipelines.compare_bench import Bench, best_shape
from pipelines.compare_config import LOOKUP, CompareConfig, CompareError, Shape, names_of
from pipelines.compare_contenders import borrowed_weights
from pipelines.compare_counting import Onlooker, length_figures, path_mismatches, watched_answers
from pipelines.compare_figures import BatchTimes, CompareReport, LengthFigures, ShapeTimes
from pipelines.compare_timing import PLAIN, groups_of, round_times, speed_figures, timed_answers
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_dflash import toy_dflash
from tests.toy_folder import save_toy_target
from tests.toy_mtp import TAPS, save_toy_drafter, shared_of, toy_mtp
from tests.toy_target import AlwaysRight, AlwaysWrong, HalfRight, RightInATree, toy_model, toy_prompts

TOKENS, DEPTH, TREES = 17, 3, (3, 7)
PROMPTS = toy_prompts(4, low=2, high=20)


def toy_engine(eos: tuple[int, ...] = (), slots: int = 2) -> Engine:
    rows = TorchRows(toy_model(), num_slots=slots, max_len=80, target_layer_ids=TAPS)
    config = EngineConfig(num_draft_tokens=DEPTH, tree_nodes=max(TREES), reuse_prefixes=False)
    return Engine(rows, None, config=config, eos_token_ids=eos)


class Broken(AlwaysRight):
    """Fails in the middle of a text."""

    name = "broken"

    def draft(self, request):
        if max(request.starts) > 22:
            raise RuntimeError("out of order")
        return super().draft(request)


@pytest.fixture(scope="module")
def drafters() -> dict[str, Drafter]:
    model = toy_model()
    made: dict[str, Drafter] = {kind.name: kind(model) for kind in (AlwaysRight, AlwaysWrong, HalfRight, RightInATree)}
    for drafter in made.values():
        drafter.argmax = made["always-right"].argmax  # found once
    made["recursive"] = as_drafter(toy_mtp(model))
    made["dflash"] = as_drafter(toy_dflash(model))
    made[LOOKUP] = PromptLookupDrafter()
    return made


def shapes_of(drafter: Drafter) -> list[Shape]:
    return CompareConfig(num_draft_tokens=DEPTH, trees=TREES).shapes(drafter.max_draft_tokens, drafter.max_tree_nodes)


def decoded(engine: Engine, drafter: Drafter, shape: Shape) -> Acceptance:
    engine.set_drafter(drafter)
    engine.num_draft_tokens, engine.tree_nodes = shape.depth, shape.nodes
    total = Acceptance()
    for completion in engine.generate(PROMPTS, Sampling(max_new_tokens=TOKENS)):
        total.add(completion.acceptance)
    return total


def test_one_plain_decoding_tells_the_rounds_of_every_length(drafters):
    plain = [c.token_ids for c in toy_engine().generate(PROMPTS, Sampling(max_new_tokens=TOKENS))]
    engine = toy_engine(eos=(plain[0][5], plain[2][9]))  # some answers end early, with drafts behind their end
    onlookers = {name: Onlooker(drafter, shapes_of(drafter)) for name, drafter in drafters.items()}
    seen = []
    answers = watched_answers(engine, onlookers, PROMPTS, TOKENS, lambda: seen.append(1))
    assert len(seen) == len(PROMPTS)
    assert [a.text[: a.end] for a in answers] == [
        c.token_ids for c in engine.generate(PROMPTS, Sampling(max_new_tokens=TOKENS))
    ]
    assert min(a.end for a in answers) < TOKENS
    for name, drafter in drafters.items():
        assert onlookers[name].failure is None
        for shape in shapes_of(drafter):
            expected, found = decoded(engine, drafter, shape), length_figures(answers, name, shape)
            assert (found.rounds, found.tau) == (expected.rounds, expected.tau), (name, shape)
            assert found.acceptance_by_position == expected.by_position
            assert sum(found.offered) == pytest.approx(1)
    tau = {(n, s): length_figures(answers, n, s).tau for n, d in drafters.items() for s in shapes_of(d)}
    for k in range(1, DEPTH + 1):
        assert tau["always-right", Shape(k)] == k + 1
        assert tau["always-wrong", Shape(k)] == 1
        assert tau["half-right", Shape(k)] == 2
    assert [tau["right-in-a-tree", Shape(DEPTH, nodes)] for nodes in TREES] == [2, 3]
    assert length_figures(answers, LOOKUP, Shape(2)).offered[0] > 0, "it finds nothing now and then"


def test_a_drafter_that_fails_does_not_stop_the_others(drafters):
    broken = Broken(toy_model())
    both = {"broken": broken, "always-right": drafters["always-right"]}
    onlookers = {name: Onlooker(drafter, [Shape(2)]) for name, drafter in both.items()}
    engine = toy_engine()
    answers = watched_answers(engine, onlookers, PROMPTS, TOKENS, lambda: None)
    assert onlookers["broken"].failure == "RuntimeError: out of order"
    assert length_figures(answers, "always-right", Shape(2)).tau == 3
    groups = groups_of(PROMPTS[:2], 2)
    timed = timed_answers(engine, both, dict.fromkeys(both, Shape(2)), groups, TOKENS, lambda: None)
    assert "RuntimeError" in (timed["broken"].failure or "")
    assert timed["always-right"].answers == timed[PLAIN].answers


def test_refused_drafts_go_to_the_token_paths_with_what_was_said(drafters, monkeypatch):
    seen = []

    @dataclass(frozen=True)
    class Rejection:
        drafted: tuple[int, ...]
        said: tuple[int, ...]

    def share(rejections, decode):
        seen.extend(rejections)
        return 0.25

    paths = SimpleNamespace(Rejection=Rejection, share_of_path_mismatches=share, token_text=lambda tokenizer: tokenizer)
    monkeypatch.setitem(sys.modules, "pipelines.token_paths", paths)
    onlookers = {"half-right": Onlooker(drafters["half-right"], [Shape(3)])}
    (answer,) = watched_answers(toy_engine(), onlookers, PROMPTS[:1], TOKENS, lambda: None)
    count, mismatch = path_mismatches([answer], "half-right", Shape(3), None)
    assert (count, mismatch) == (len(seen), 0.25)
    # a round keeps its first draft and is refused the second, which is one beside what the target says there
    assert [r.said[0] for r in seen] == answer.text[2 : answer.end + 1 : 2]
    assert all(r.drafted[0] == (r.said[0] + 1) % 256 and len(r.drafted) == 2 for r in seen)


def test_every_shape_is_timed_and_answers_are_those_of_plain_decoding(drafters):
    engine, batch = toy_engine(), 2
    some = {name: drafters[name] for name in ("recursive", LOOKUP)}
    shapes = {name: shapes_of(drafter) for name, drafter in some.items()}
    times = round_times(engine, some, shapes, PROMPTS, batch, lambda: None)
    for name in some:
        assert [(t.depth, t.nodes) for t in times[name].shapes] == [(s.depth, s.nodes) for s in shapes[name]]
        assert times[name].t_base_s is not None
        assert all(t.t_draft_s is not None and t.t_verify_s is not None for t in times[name].shapes), name
    chosen = {"recursive": Shape(DEPTH, 7), LOOKUP: Shape(2)}
    groups = groups_of(PROMPTS[:3], batch)
    timed = timed_answers(engine, some, chosen, groups, TOKENS, lambda: None)
    assert engine.free_slots == engine.num_slots
    found = speed_figures(timed["recursive"], timed[PLAIN], batch, chosen["recursive"], None)
    assert (found.equal, found.prompts, len(found.ratios)) == (4, 4, 2)
    assert found.tau == timed["recursive"].acceptance.tau
    timed["recursive"].answers[1] = [1, 2, 3]
    assert speed_figures(timed["recursive"], timed[PLAIN], batch, chosen["recursive"], None).equal == 3


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
def _no_token_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.compare_bench.path_mismatches", lambda *arguments: (3, 0.5))


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
    assert report.exact
    assert report.unequal == []
    mtp = next(d for d in report.drafters if d.name == "mtp")
    assert mtp.shares == ["embedding", "LM head", "hidden states of layers 0, 1"]
    assert (mtp.kind, mtp.training_minutes) == ("mtp-recursive", None)
    assert min(mtp.parameters, mtp.weights_bytes, mtp.slot_bytes) > 0
    for pair in report.pairs:
        assert [s.prompts for s in pair.speeds] == [2, 4]
        assert all(s.equal == s.prompts for s in pair.speeds)
        assert [s.tau for s in pair.speeds] == [s.tau_counted for s in pair.speeds]
        assert all(s is not None for one in pair.lengths for s in one.s_predicted)


def test_outputs_that_differ_are_an_error(folder, toy_target_dir, monkeypatch):
    monkeypatch.setattr(
        "pipelines.compare_bench.speed_figures",
        lambda drafted, *rest: replace(speed_figures(drafted, *rest), equal=1),
    )
    config = config_of(folder, toy_target_dir, output=str(folder / "unequal"), prompts=(str(folder / "one.jsonl"),))
    report = compare(config)
    assert report.unequal == [LOOKUP]
    assert "only 2 of 6 outputs" in report.errors()[0]
    assert report.advice.drafter is None


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
