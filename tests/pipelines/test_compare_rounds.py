"""Rounds counted along plain answers are the engine's own, for every kind and shape; all of them are timed."""

from __future__ import annotations

import pytest
from transformers import Gemma4ForCausalLM

from drafters.acceptance import Acceptance
from drafters.checkpoint import as_drafter
from drafters.drafter import Drafter
from drafters.prompt_lookup import PromptLookupDrafter
from pipelines.compare_config import LOOKUP, CompareConfig, Shape
from pipelines.compare_counting import (
    Answer,
    Drafted,
    Onlooker,
    length_figures,
    path_mismatches,
    watched_answers,
)
from pipelines.compare_timing import PLAIN, groups_of, round_times, speed_figures, timed_answers
from pipelines.token_paths import share_of_path_mismatches
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_dflash import toy_dflash
from tests.toy_folder import toy_tokenizer
from tests.toy_gemma import toy_assistant
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_own_mtp import random_own_mtp
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


def decoded(engine: Engine, drafter: Drafter, shape: Shape, prompts: list[list[int]] = PROMPTS) -> Acceptance:
    engine.set_drafter(drafter)
    engine.num_draft_tokens, engine.tree_nodes = shape.depth, shape.nodes
    total = Acceptance()
    for completion in engine.generate(prompts, Sampling(max_new_tokens=TOKENS)):
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


def test_rounds_of_drafters_that_came_with_a_target(tmp_path):
    """They keep state of their own between rounds: of the target's MTP layers, and of its keys and values."""
    few = [[token % 12 for token in prompt] for prompt in PROMPTS]
    plain, (target, _, assistant) = toy_model(vocab_size=12), toy_assistant(tmp_path, "last layers share", 12)
    for model, drafter in (
        (plain, as_drafter(random_own_mtp(plain, layers=2))),
        (Gemma4ForCausalLM.from_pretrained(target).eval(), as_drafter(assistant)),
    ):
        rows = TorchRows(model, num_slots=2, max_len=80, target_layer_ids=drafter.target_layer_ids)
        engine = Engine(rows, None, config=EngineConfig(num_draft_tokens=DEPTH, reuse_prefixes=False))
        onlooker, shapes = Onlooker(drafter, shapes_of(drafter)), shapes_of(drafter)
        answers = watched_answers(engine, {"own": onlooker}, few, TOKENS, lambda: None)
        assert onlooker.failure is None
        for shape in shapes:
            expected, found = decoded(engine, drafter, shape, few), length_figures(answers, "own", shape)
            assert (found.rounds, found.tau) == (expected.rounds, expected.tau), (drafter.name, shape)
        assert 1 < length_figures(answers, "own", shapes[0]).tau < 2, "some drafts are right, and some are not"


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

    def share(rejections, decode):
        seen.extend(rejections)
        return share_of_path_mismatches(rejections, decode)

    monkeypatch.setattr("pipelines.compare_counting.share_of_path_mismatches", share)
    onlookers = {"half-right": Onlooker(drafters["half-right"], [Shape(3)])}
    (answer,) = watched_answers(toy_engine(), onlookers, PROMPTS[:1], TOKENS, lambda: None)
    count, mismatch = path_mismatches([answer], "half-right", Shape(3), toy_tokenizer())
    assert (count, mismatch) == (len(seen), 0.0)
    # a round keeps its first draft and is refused the second, which is one beside what the target says there
    assert [r.said[0] for r in seen] == answer.text[2 : answer.end + 1 : 2]
    assert all(r.drafted[0] == (r.said[0] + 1) % 256 and len(r.drafted) == 2 for r in seen)


def test_drafts_that_spell_the_target_s_text_in_other_tokens_are_counted():
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["aa"])
    spelled = Drafted(chain=[tokenizer.convert_tokens_to_ids("aa"), ord("b")])
    other = Drafted(chain=[ord("a"), ord("x")])
    text = [*b"taabaab"]
    answer = Answer(text, len(text), {"one": [spelled, None, None, other, None, other, None]})
    # "aa" for "a" + "a", later "ax" for "aa", and at last "ax" for "b"
    assert path_mismatches([answer], "one", Shape(2), tokenizer) == (3, pytest.approx(1 / 3))


def test_every_shape_is_timed_and_answers_are_those_of_plain_decoding(drafters):
    engine, batch = toy_engine(), 2
    some = {name: drafters[name] for name in ("recursive", LOOKUP)}
    shapes = {name: shapes_of(drafter) for name, drafter in some.items()}
    times, failures = round_times(engine, some, shapes, PROMPTS, batch, lambda: None)
    assert failures == {}
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
