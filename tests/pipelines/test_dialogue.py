"""Rows of one and several turns through the generator's engine, without Ray: right tokens, masks, features, seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafters.acceptance import Acceptance
from drafters.target import Target, load_model, load_target
from pipelines.dialogue import Dialogue, row_seed, turn_seed
from pipelines.follow_ups import FollowUp
from pipelines.generate_config import GenerateConfig
from pipelines.prompts import PromptRow, read_prompts
from pipelines.rollout_schema import Rollout, RolloutMetadata
from pipelines.rollout_store import RolloutStore, iter_rollouts, shard_name
from pipelines.shard_generator import ShardContext, ShardGenerator, shard_item
from serving.engine.build import build_engine
from serving.engine.engine import Engine
from serving.engine.sequence import Completion, Progress
from tests.toy_folder import TURN_END_ID
from tests.toy_mtp import features_of

LAYERS = (0, 1)
NEW_TOKENS = 5
OPENING = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TURNS = [["one", "two", "three"], ["alone"], ["a", "b"], ["hello there"], ["x", "y", "z", "w"]]


@pytest.fixture(scope="module")
def target(toy_target_dir: Path) -> Target:
    return load_target(str(toy_target_dir))


@pytest.fixture(scope="module")
def rows(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[PromptRow]:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [json.dumps({"id": f"r{i}", "turns": turns}) for i, turns in enumerate(TURNS)]
    file.write_text("\n".join([*lines, json.dumps({"id": "raw", "category": "c", "prompt": "1 2 3"})]))
    return read_prompts(str(file), target).rows


def config(**changes) -> GenerateConfig:
    options = {"max_new_tokens": NEW_TOKENS, "batch": 2, "backend": "torch", "target_layer_ids": LAYERS}
    return GenerateConfig(**options | {"cpus_per_actor": 1} | changes)


def generator(target: Target, output: Path, *, max_len: int = 512, kind=ShardGenerator, **changes) -> ShardGenerator:
    """The actor without its process, and a board that keeps nothing."""
    settings = config(target=str(target.path), **changes)
    metadata = RolloutMetadata(
        target="toy",
        target_fingerprint="",
        tokenizer_hash="",
        chat_template_hash="",
        target_layer_ids=LAYERS if settings.with_features else (),
        code_version="0",
    )
    context = ShardContext(
        config=settings, metadata=metadata, target=str(target.path), drafter=None, output=str(output), max_len=max_len
    )
    made = kind(context, SimpleNamespace(note=SimpleNamespace(remote=lambda *_: None)))
    made._engine = build_engine(
        target.path, backend="torch", num_slots=settings.batch, max_len=max_len, target_layer_ids=LAYERS, num_threads=1
    )
    return made


def run(made: ShardGenerator, rows: list[PromptRow]) -> tuple[list[Rollout], list[dict]]:
    """The rollouts of one shard as a reader finds them, and its rejects."""
    item = shard_item(shard_name(0, 1), rows)
    (result,) = made({name: [value] for name, value in item.items()})["result"]
    record = json.loads(result)["record"]
    store = RolloutStore(made.context.output)
    store.finish({}, made.context.metadata, [store.record(record["name"])], [])
    return list(iter_rollouts(made.context.output)), record["rejected"]


@torch.inference_mode()
def greedy(model, ids: list[int], limit: int, stop: int | None = None) -> list[int]:
    """The target's own reply, token by token, by transformers alone."""
    reply: list[int] = []
    while len(reply) < limit and (not reply or reply[-1] != stop):
        reply.append(int(model(torch.tensor([ids + reply])).logits[0, -1].argmax()))
    return reply


def test_every_turn_is_the_target_s_own_continuation(rows: list[PromptRow], target: Target, tmp_path: Path):
    model = load_model(target.path, torch.float32)
    rollouts, rejected = run(generator(target, tmp_path / "out"), rows)
    assert rejected == []
    assert [r.id for r in rollouts] == [row.id for row in rows]
    for r, turns in zip(rollouts, [*TURNS, None], strict=True):
        if turns is None:
            ids, mask = list(b"1 2 3"), [0] * 5
        else:
            ids = target.tokenizer(OPENING.format(turns[0])[1:])["input_ids"]
            mask = [0] * len(ids)
        assert r.prompt_ids == ids
        for later in [*(turns or [""])[1:], None]:
            reply = greedy(model, ids, NEW_TOKENS, stop=TURN_END_ID)
            ids, mask = ids + reply, mask + [1] * len(reply)
            if later is not None:
                between = target.tokenizer(("" if reply[-1] == TURN_END_ID else "<|im_end|>") + OPENING.format(later))
                ids, mask = ids + between["input_ids"], mask + [0] * len(between["input_ids"])
        assert r.prompt_ids + r.response_ids == ids
        assert r.loss_mask == mask
        assert sum(r.loss_mask) == NEW_TOKENS * len(turns or [""]), "the toy target never ends a turn by itself"
        assert r.finish_reason == "length"
        assert r.features_TF.shape[0] == len(ids) - 1
        torch.testing.assert_close(r.features_TF.float(), features_of(model, ids, LAYERS)[:-1], rtol=2e-2, atol=2e-2)


def test_a_shard_does_not_depend_on_the_company_of_its_rows(rows: list[PromptRow], target: Target, tmp_path: Path):
    """Sampled: every turn draws from its own stream, whichever other rows run beside it."""
    options = {"temperature": 1.0, "with_features": False}
    together, _ = run(generator(target, tmp_path / "4", batch=4, **options), rows)
    alone, _ = run(generator(target, tmp_path / "1", batch=1, **options), rows)
    assert together == alone
    backwards, _ = run(generator(target, tmp_path / "b", batch=3, **options), rows[::-1])
    assert backwards == together[::-1]
    other, _ = run(generator(target, tmp_path / "s", seed=1, **options), rows)
    assert all(a.response_ids != b.response_ids for a, b in zip(together, other, strict=True))
    assert [r.seed for r in together] == [row_seed(0, row.id) for row in rows]


class OutOfOrder:
    """An engine whose requests end in the order that is asked for, with replies made from their prompts."""

    target_layer_ids, max_len = LAYERS, 4096

    def __init__(self, choose: Callable[[int], int], ending: int, reason: str = "stop"):
        self.choose, self.ending, self.reason = choose, ending, reason
        self.waiting: list[tuple[str, list[int]]] = []
        self.asked: list[str] = []
        self.seeds: dict[int, int] = {}  # by length of the prompt

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, prompt_ids, sampling, *, request_id, keep_features):
        assert len(prompt_ids) + sampling.max_new_tokens <= self.max_len
        self.waiting.append((request_id, list(prompt_ids)))
        self.asked.append(request_id)
        self.seeds[len(prompt_ids)] = sampling.seed

    def step(self) -> list[Progress]:
        name, prompt = self.waiting.pop(self.choose(len(self.waiting)))
        reply = [sum(prompt) % 251, self.ending]
        done = Completion(
            request_id=name, prompt_ids=prompt, token_ids=reply, finish_reason=self.reason,
            acceptance=Acceptance(), features_TF=torch.ones(len(prompt) + 1, 4, dtype=torch.bfloat16), drafter=None,
        )  # fmt: skip
        return [Progress(request_id=name, token_ids=reply, num_accepted=0, completion=done)]


def test_rows_are_written_in_their_order_whichever_end_first(rows: list[PromptRow], target: Target, tmp_path: Path):
    files = []
    for name, choose in (("first", lambda n: 0), ("last", lambda n: n - 1), ("middle", lambda n: n // 2)):
        made = generator(target, tmp_path / name)
        made._engine = engine = OutOfOrder(choose, TURN_END_ID)
        rollouts, _ = run(made, rows)
        assert [r.id for r in rollouts] == [row.id for row in rows]
        assert len(engine.asked) == sum(map(len, TURNS)) + 1
        if name == "last":
            assert engine.asked[len(rows) :][:1] == ["4"], "a turn follows at once, before other rows are through"
        files.append((tmp_path / name / shard_name(0, 1)).read_bytes())
    assert files[0] == files[1] == files[2]


def test_a_turn_that_ended_itself_is_not_closed_again(rows: list[PromptRow], target: Target, tmp_path: Path):
    def first(ending: int, reason: str = "stop") -> tuple[Rollout, OutOfOrder]:
        made = generator(target, tmp_path / f"{ending}{reason}")
        made._engine = engine = OutOfOrder(lambda n: 0, ending, reason)
        return run(made, rows[:1])[0][0], engine

    rollout, engine = first(TURN_END_ID)
    assert rollout.finish_reason == "stop"
    shown = target.tokenizer.decode(rollout.response_ids[1:])
    assert shown.startswith("<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.response_ids[-1] == TURN_END_ID
    assert rollout.response_ids.count(TURN_END_ID) == 5, "three of the target's, two of the user's"
    written = [t for t, m in zip(rollout.response_ids, rollout.loss_mask[len(rollout.prompt_ids) :], strict=True) if m]
    assert written[1::2] == [TURN_END_ID] * 3
    seed = row_seed(0, "r0")
    assert list(engine.seeds.values()) == [seed, turn_seed(seed, 2), turn_seed(seed, 3)]
    assert len({seed, turn_seed(seed, 2), turn_seed(seed, 3), turn_seed(seed + 1, 2)}) == 4

    rollout, _ = first(65, "length")
    assert target.tokenizer.decode(rollout.response_ids[1:]).startswith("A<|im_end|>\n<|im_start|>user\ntwo")
    assert sum(rollout.loss_mask) == 6, "the end of turn is the template's here"
    rollout, _ = first(258, "stop")  # it ended with another token than the template's
    assert rollout.response_ids[1:3] == [258, TURN_END_ID]


def test_a_full_context_ends_the_row_with_the_turns_that_are_done(
    rows: list[PromptRow], target: Target, tmp_path: Path
):
    three = rows[0]
    second = len(three.prompt_ids) + NEW_TOKENS + len(three.follow_ups[0]) + NEW_TOKENS
    third = second + len(three.follow_ups[1]) + NEW_TOKENS
    for max_len, turns in ((third, 3), (third - 1, 2), (second, 2), (second - 1, 1)):
        (rollout,), rejected = run(generator(target, tmp_path / str(max_len), max_len=max_len), [three])
        assert rejected == []
        assert sum(rollout.loss_mask) == turns * NEW_TOKENS
        assert rollout.finish_reason == "length"
        assert rollout.loss_mask[-1] == 1, "no question without an answer at the end"
        assert rollout.features_TF.shape[0] == len(rollout.loss_mask) - 1
    assert three.most_tokens(NEW_TOKENS) == third

    made = generator(target, tmp_path / "stopped")
    made._engine = engine = OutOfOrder(lambda n: 0, TURN_END_ID)
    engine.max_len = len(three.prompt_ids) + NEW_TOKENS
    (rollout,), _ = run(made, [three])
    assert (sum(rollout.loss_mask), rollout.finish_reason) == (2, "length"), "though the reply itself had stopped"


def test_rows_that_fail_are_named_with_file_line_and_kind(rows: list[PromptRow], target: Target, tmp_path: Path):
    class Broken(OutOfOrder):
        def step(self):
            (progress,) = super().step()
            if progress.request_id == "1":
                progress.completion.features_TF[0, 0] = float("nan")
            return [progress]

    made = generator(target, tmp_path / "nan")
    made._engine = Broken(lambda n: n - 1, TURN_END_ID)
    rollouts, rejected = run(made, rows)
    assert [r.id for r in rollouts] == ["r0", "r2", "r3", "r4", "raw"]
    reason = "the target's hidden states are not finite"
    assert rejected == [{"file": rows[1].file, "line": 2, "kind": "hidden states not finite", "reason": reason}]
    made = generator(target, tmp_path / "cancelled")
    made._engine = OutOfOrder(lambda n: 0, TURN_END_ID, "cancelled")
    assert [r["kind"] for r in run(made, rows[:2])[1]] == ["generation failed"] * 2
    assert len(made._engine.asked) == 2, "a failed turn is not continued"


def test_a_real_engine_stops_turns(target: Target, tmp_path: Path):
    """The toy target is told that its most frequent byte ends a turn, so that some replies stop and some do not."""
    settings = config(max_new_tokens=12)
    engine: Engine = build_engine(target.path, backend="torch", num_slots=2, max_len=512, num_threads=1)
    plain = engine.generate([list(b"go")], settings.sampling(0))[0].token_ids
    stop = plain[3]
    engine.eos_token_ids = (stop,)
    row = PromptRow("a", list(b"go"), "", 1, follow_ups=[FollowUp([stop], list(b"on")), FollowUp([stop], list(b"!"))])
    dialogue, asked = Dialogue(row, settings, engine.max_len), []
    while True:
        asked.append(list(dialogue.ids))
        (done,) = engine.generate([dialogue.ids], dialogue.sampling())
        if not dialogue.take(done):
            break
    first = plain[: plain.index(stop) + 1]
    assert asked[0] == list(b"go")
    assert asked[1] == [*b"go", *first, *b"on"]
    assert len(asked) == 3
