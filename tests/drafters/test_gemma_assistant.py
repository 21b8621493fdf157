"""Gemma 4 assistants: the drafts of transformers' own generator, through our slots, checkpoint, engine and trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from drafters.checkpoint import CheckpointError, as_drafter, load_module, read_config, save_checkpoint
from drafters.drafter import Drafter, DraftRequest
from drafters.formats.gemma4_assistant import read
from drafters.gemma_assistant import GemmaAssistant
from drafters.target import target_fingerprint
from drafters.training_batch import Document, pack_documents
from pipelines.expected_acceptance import expected_acceptance
from pipelines.step_config import StepConfig
from pipelines.training_sequence import TrainingSequence
from serving.engine import native_build
from serving.engine.build import build_engine
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling, target_probs
from serving.engine.torch_rows import TorchRows
from tests.drafters.test_verify import ALPHA, chi_square_parts
from tests.serving.test_memory_plan import target_bytes, tensors
from tests.toy_gemma import KINDS, TAPS, WINDOW, save_assistant, save_gemma_target, target_of, toy_assistant
from tests.toy_mtp import Overheard, features_of, tokens_of, toy_trainer
from tests.toy_target import toy_prompts

STEPS = 3
CASES = [(kind, False) for kind in KINDS] + [("last layers share", True)]


@dataclass(frozen=True)
class Case:
    """A target and its assistant, in folders and in memory."""

    kind: str
    target: Path
    source: Path
    module: GemmaAssistant

    @property
    def model(self) -> Any:
        return Gemma4ForCausalLM.from_pretrained(self.target).eval()

    def engine(self, drafter: Drafter | None, **changes: Any) -> Engine:
        rows = TorchRows(self.model, num_slots=3, max_len=128, target_layer_ids=self.module.config.target_layer_ids)
        options = {"num_draft_tokens": STEPS, "max_prefill_rows": 7} | changes
        return Engine(rows, drafter, config=EngineConfig(**options))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, ordered embedding" if case[1] else case[0])
def case(request, tmp_path_factory) -> Case:
    kind, ordered = request.param
    return Case(kind, *toy_assistant(tmp_path_factory.mktemp("gemma"), kind, ordered=ordered))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Case:
    kind = "last layers share"
    return Case(kind, *toy_assistant(tmp_path_factory.mktemp("gemma"), kind))


# -- against transformers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What transformers drafted after a text."""

    ids: list[int]  # up to the anchor
    drafts: list[int]
    whole: bool  # its sliding layers had as many keys as their window lets them see


def generated_rounds(model: Any, assistant: Any, prompt: list[int], new_tokens: int) -> list[Round]:
    """The rounds of transformers' own assisted generation, greedy.

    Keys and values of drafts that were just rejected are cut off: its cache drops them before the next pass, but the
    generator would still see them, at the anchor's position and, past the sliding window, behind it.
    """
    rounds: list[Round] = []
    original = SinglePositionMultiTokenCandidateGenerator.get_candidates

    def overheard(self, input_ids, *, model_outputs, n_last_matches, **options):
        if rounds:
            rejected = len(rounds[-1].drafts) - n_last_matches
            cut = {
                kind: tuple(part[:, :, : part.shape[2] - rejected] for part in parts)
                for kind, parts in model_outputs.shared_kv_states.items()
            }
            model_outputs = SimpleNamespace(hidden_states=model_outputs.hidden_states, shared_kv_states=cut)
        out = original(self, input_ids, model_outputs=model_outputs, n_last_matches=n_last_matches, **options)
        drafts = out[0][0, input_ids.shape[1] :].tolist()
        if drafts:
            whole = not rounds or n_last_matches > 0 or input_ids.shape[1] - 1 <= WINDOW
            rounds.append(Round(input_ids[0].tolist(), drafts, whole))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", overheard)
        model.generate(torch.tensor([prompt]), assistant_model=assistant, max_new_tokens=new_tokens, do_sample=False)
    return rounds


def first_round(model: Any, assistant: Any, ids: list[int]) -> list[int]:
    """What its generator drafts after a prefill of the text up to the anchor."""
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, model.get_input_embeddings(), GenerationConfig(max_length=10_000)
    )
    wanted = SinglePositionMultiTokenCandidateGenerator.model_kwargs_overrides
    with torch.no_grad():
        outputs = model(torch.tensor([ids[:-1]]), use_cache=True, **wanted)
        candidates, _ = generator.get_candidates(
            torch.tensor([ids]), model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
        )
    return candidates[0, len(ids) :].tolist()


@dataclass
class Asked:
    """A sequence's next request."""

    slot: int
    ids: list[int]
    start: int
    features: Tensor  # [T, taps * D] of the whole sequence


def ask(drafter: Drafter, asked: Sequence[Asked], num_draft_tokens: int) -> list[list[int]]:
    """The drafts of one request for all of them."""
    request = DraftRequest(
        slots=[a.slot for a in asked],
        epochs=[1] * len(asked),
        counts=[len(a.ids) - 1 - a.start for a in asked],
        starts=[a.start for a in asked],
        first_tokens=[a.ids[0] for a in asked],
        tokens_N=torch.tensor([token for a in asked for token in a.ids[a.start + 1 :]]),
        features_NF=torch.cat([a.features[a.start : len(a.ids) - 1] for a in asked]),
        num_draft_tokens=num_draft_tokens,
        temperatures=[0.0] * len(asked),
        seeds=[0] * len(asked),
    )
    return drafter.draft(request).tokens_BK.tolist()


def test_drafts_are_those_of_transformers_round_by_round(case: Case):
    model, assistant = case.model, Gemma4AssistantForCausalLM.from_pretrained(case.source).eval()
    assert case.module.config.target_layer_ids == TAPS[case.kind]
    assert case.module.config.num_draft_tokens == STEPS, "of generation_config.json"
    prompts = toy_prompts(3, low=2, high=4) + toy_prompts(1, low=2 * WINDOW, high=3 * WINDOW)
    told = [generated_rounds(model, assistant, prompt, 11) for prompt in prompts]
    features = [features_of(model, rounds[-1].ids, case.module.config.target_layer_ids) for rounds in told]
    alone, together = as_drafter(case.module), as_drafter(case.module)
    alone.allocate(9, 64)
    together.allocate(9, 64)
    compared = whole = 0
    for number in range(max(map(len, told))):
        asked = []
        for i, rounds in enumerate(told):
            if number < len(rounds):
                start = len(rounds[number - 1].ids) - 1 if number else 0
                asked.append((rounds[number], Asked((i * 5) % 9, rounds[number].ids, start, features[i])))
        drafts = [ask(alone, [one], STEPS)[0][: len(found.drafts)] for found, one in asked]
        joint = ask(together, [one for _, one in asked], STEPS)
        assert drafts == [d[: len(found.drafts)] for d, (found, _) in zip(joint, asked, strict=True)]
        for mine, (found, _) in zip(drafts, asked, strict=True):
            assert mine == first_round(model, assistant, found.ids)[: len(mine)]
            if found.whole:
                assert mine == found.drafts
            compared, whole = compared + 1, whole + found.whole
    assert compared > 30
    assert whole > 10
    assert len({tuple(r.drafts) for rounds in told for r in rounds}) > 15, "all drafts alike would prove little"


def test_served_drafts_are_those_of_training_on_packed_rows(case: Case):
    model, overheard = case.model, Overheard(case.module)
    completions = case.engine(overheard).generate(toy_prompts(5, low=2, high=16), Sampling(max_new_tokens=14))
    documents, expected = [], []
    for completion in completions:
        ids = completion.prompt_ids + completion.token_ids
        features = features_of(model, ids, case.module.config.target_layer_ids)
        for p, drafts in overheard.rounds_of(ids):
            drafts = (drafts + [0] * STEPS)[:STEPS]
            documents.append(
                Document(
                    ids_T=torch.tensor(ids[: p + 2] + drafts),
                    # features behind the anchor are noise, which must not matter
                    features_TF=torch.cat([features[: p + 1], torch.randn(len(drafts), features.shape[1])]),
                    anchors_A=torch.tensor([p]),
                    ends_A=torch.tensor([p + 2 + len(drafts)]),
                )
            )
            expected.append(drafts)
    batch = pack_documents(documents, row_tokens=80)
    assert len(batch.ids_BT) < len(documents) / 2
    proposed, labels = case.module.propose(batch), batch.labels(STEPS)
    assert batch.anchor_mask_BA.sum() == len(documents) > 30
    assert torch.equal(proposed[batch.anchor_mask_BA], labels[batch.anchor_mask_BA])


# -- through the engine ------------------------------------------------------------------------------------------------


def test_drafted_greedy_output_is_plain_decoding(case: Case):
    prompts = toy_prompts(4, low=2, high=20)
    model = case.model
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=10, do_sample=False)[0, len(p) :].tolist() for p in prompts
    ]
    engine = case.engine(as_drafter(case.module))
    completions = engine.generate(prompts, Sampling(max_new_tokens=10))
    assert [c.token_ids for c in completions] == expected
    assert engine.stats.fallbacks == {}
    assert engine.stats.acceptance.proposed > 60
    grown = case.engine(as_drafter(case.module), tree_nodes=9)
    assert [c.token_ids for c in grown.generate(prompts, Sampling(max_new_tokens=10))] == expected
    assert grown.stats.acceptance.proposed > 2 * engine.stats.acceptance.proposed
    again = engine.generate([p + t for p, t in zip(prompts, expected, strict=True)], Sampling(max_new_tokens=3))
    assert engine.stats.fallbacks == {}, "prefixes are gone on from"
    assert [len(c.token_ids) for c in again] == [3] * len(prompts)


@pytest.mark.statistical
def test_sampled_output_follows_the_target(tmp_path: Path):
    vocab, requests = 16, 2000
    target, _, module = toy_assistant(tmp_path, "last layers share", vocab)
    model, prompt = Gemma4ForCausalLM.from_pretrained(target).eval(), [7, 3, 12]
    rows = TorchRows(
        Gemma4ForCausalLM.from_pretrained(target), num_slots=1000, max_len=12,
        target_layer_ids=module.config.target_layer_ids,
    )  # fmt: skip
    engine = Engine(rows, as_drafter(module), config=EngineConfig(num_draft_tokens=2, max_prefill_rows=6000))
    params = [Sampling(temperature=1.0, max_new_tokens=3, seed=seed) for seed in range(requests)]
    said = torch.tensor([c.token_ids for c in engine.generate([prompt] * requests, params)])
    assert engine.stats.acceptance.accepted > 100, "always wrong would prove little"
    statistic, degrees = 0.0, 0
    for place in range(1, 3):  # what verify rounds decided, given the tokens before
        starts, group = said[:, :place].unique(dim=0, return_inverse=True)
        with torch.no_grad():
            after = torch.cat([torch.tensor(prompt).expand(len(starts), -1), starts], dim=1)
            logits = model(after, logits_to_keep=1).logits[:, -1]
        ones = torch.ones(len(logits))
        probs = target_probs(logits, ones, torch.zeros(len(logits), dtype=torch.int64), ones)
        for number, expected in enumerate(probs.numpy()):
            counts = torch.bincount(said[group == number, place], minlength=vocab).numpy()
            part = chi_square_parts(counts, expected)
            statistic, degrees = statistic + part[0], degrees + part[1]
    assert degrees > 50
    assert stats.chi2.sf(statistic, degrees) > ALPHA


# -- files -------------------------------------------------------------------------------------------------------------


def saved(case: Case, folder: Path) -> Path:
    fingerprint = target_fingerprint(case.target, case.module.config.target_layer_ids)
    save_checkpoint(folder, case.module, {"target_fingerprint": fingerprint})
    return folder


def test_a_checkpoint_comes_back_and_is_still_an_assistant_to_transformers(case: Case, tmp_path: Path):
    folder = saved(case, tmp_path / "drafter")
    loaded = load_module(folder, case.target)
    assert loaded.config == case.module.config
    state = case.module.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    for name, buffer in case.module.named_buffers():  # the borrowed weights, too
        assert torch.equal(dict(loaded.named_buffers())[name], buffer), name
    theirs, facts = Gemma4AssistantForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    for name, tensor in Gemma4AssistantForCausalLM.from_pretrained(case.source).state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name


def test_in_bfloat16_angles_stay_exact(plain: Case, tmp_path: Path):
    narrow = load_module(saved(plain, tmp_path / "drafter"), plain.target, dtype=torch.bfloat16)
    positions = torch.tensor([[97, 211]])
    for kind, angles in narrow.angles(positions).items():
        for mine, exact in zip(angles, plain.module.angles(positions)[kind], strict=True):
            assert torch.equal(mine, exact.bfloat16())


def test_what_does_not_fit_is_refused_by_name(plain: Case, tmp_path: Path):
    shutil.copytree(plain.source, tmp_path / "published")
    with pytest.raises(CheckpointError, match=r"draftloop import"):
        read_config(tmp_path / "published")
    with pytest.raises(CheckpointError, match=r"not a Gemma4AssistantForCausalLM"):
        read(plain.target, target_of(plain.target))
    other = save_gemma_target(tmp_path / "other", "own keys and values", head_dim=16)
    with pytest.raises(CheckpointError, match=r"head_dim of sliding_attention 8, target .* 16"):
        read(plain.source, target_of(other))
    for number, (change, said) in enumerate(
        (
            ({"backbone_hidden_size": 48}, r"backbone_hidden_size 48, target .* 32"),
            ({"vocab_size": 280}, r"vocab_size 280, target .* 260"),
            ({"tie_word_embeddings": False}, r"tie_word_embeddings False"),
            ({"num_attention_heads": 3, "num_key_value_heads": 1}, r"3 heads, which the 2 KV heads"),
        )
    ):
        vocab = change.pop("vocab_size", 260)
        odd = save_assistant(tmp_path / f"odd{number}", plain.kind, vocab, **change)
        with pytest.raises(CheckpointError, match=said) as caught:
            read(odd, target_of(plain.target))
        assert "\n" not in str(caught.value)
    first = save_gemma_target(tmp_path / "first", "last layers share", num_kv_shared_layers=4)
    with pytest.raises(CheckpointError, match=r"first layer \(sliding_attention\)"):
        read(plain.source, target_of(first))
    ordered = save_assistant(tmp_path / "ordered", plain.kind, ordered=True)
    from safetensors.torch import load_file, save_file

    weights = load_file(ordered / "model.safetensors")
    weights["masked_embedding.token_ordering"].zero_()
    save_file(weights, ordered / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="token_ordering"):
        read(ordered, target_of(plain.target))
    folder = saved(plain, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    del config["draftloop"]["shared_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"draftloop\.shared_layers"):
        read_config(folder)


@pytest.mark.parametrize(
    ("form", "dtype", "ordered"),
    [
        ("packed", "float32", False),
        ("packed", "float32", True),
        ("plain", "bfloat16", True),
        ("plain", "float32", False),
    ],
)
def test_the_memory_plan_is_what_is_allocated(form, dtype, ordered, tmp_path: Path, monkeypatch):
    if form == "plain":  # as on a machine without a compiler
        monkeypatch.setattr(native_build, "unavailable_reason", lambda *_: "no compiler")
    elif native_build.unavailable_reason():
        pytest.skip(str(native_build.unavailable_reason()))
    case = Case("last layers share", *toy_assistant(tmp_path, "last layers share", ordered=ordered))
    engine = build_engine(
        case.target, dtype=dtype, num_slots=3, max_len=50, num_threads=1, drafter_path=saved(case, tmp_path / "drafter")
    )
    plan, drafter = engine.memory, engine.drafter
    assert plan is not None
    assert plan.drafter_kv_bytes == sum(t.nbytes for parts in drafter._kept.values() for t in parts)
    assert plan.target_bytes == pytest.approx(target_bytes(engine), rel=0.05)
    assert plan.drafter_bytes == pytest.approx(tensors(drafter.module), rel=0.05)
    assert plan.kv_bytes == engine.backend.kv_bytes()
    assert engine.generate([[5, 6, 7]], Sampling(max_new_tokens=9))[0].token_ids
    assert engine.stats.acceptance.proposed > 0


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.learning
@pytest.mark.parametrize("ordered", [False, True])
def test_fine_tuning_on_the_target_s_rollouts_raises_tau(ordered, tmp_path: Path):
    case = Case("last layers share", *toy_assistant(tmp_path, "last layers share", ordered=ordered))
    prompts = toy_prompts(8, low=2, high=12)
    engine = case.engine(None)
    sequences = []
    for completion in engine.generate(prompts, Sampling(max_new_tokens=16)):
        ids = completion.prompt_ids + completion.token_ids
        features = features_of(case.model, ids, case.module.config.target_layer_ids)[:-1]
        sequences.append(TrainingSequence(torch.tensor(ids), len(completion.prompt_ids), features))
    module = case.module
    before = expected_acceptance(module, sequences, STEPS)
    module.requires_grad_(True)
    config = StepConfig(epochs=25, tokens_per_step=tokens_of(sequences), learning_rate=1e-2, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    after = expected_acceptance(module.eval(), sequences, STEPS)
    assert after.tau > before.tau + 0.5, (before.tau, after.tau)
    served = case.engine(as_drafter(module))
    served.generate(prompts, Sampling(max_new_tokens=16))
    assert served.stats.acceptance.tau > before.tau + 0.5
    grown = case.engine(as_drafter(module), tree_nodes=9)
    grown.generate(prompts, Sampling(max_new_tokens=16))
    assert grown.stats.acceptance.tau > served.stats.acceptance.tau, "a tree holds more than the likeliest path"
