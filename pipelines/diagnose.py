"""`draftloop diagnose`: a drafter that accepts little and its target in, the likely cause with evidence out. No Ray.

Its files are read, its target answers some prompts once, and on those answers the drafter is tried as it is and with
one thing changed at a time: what accepts clearly more names the fault. The engine then drafts with it, too. A drafter
that the engine would refuse, as one of another target, is tried all the same; nothing serves it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.checkpoint import CONFIG, PROVENANCE, WEIGHTS, CheckpointError, as_drafter, load_unguarded
from drafters.dflash import DFlashModule
from drafters.drafter_module import DrafterConfig, DrafterModule
from drafters.mtp import IndependentHeads
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import Target, TargetError, load_target, shared_weights
from pipelines.diagnose_answers import Answer, decode_answers
from pipelines.diagnose_files import DrafterFiles, read_files, recorded_checks, template_check
from pipelines.diagnose_fingerprint import FINGERPRINT, OTHER_TARGET_MEND, fingerprint_check, import_again
from pipelines.diagnose_measure import Measuring
from pipelines.diagnose_prompts import PromptsTrial, other_prompts, read_rows
from pipelines.diagnose_report import DAMAGED, Check, Diagnosis, TrialResult, findings_of
from pipelines.diagnose_tokens import category_check, mask_check, path_checks, position_check, vocabulary_check
from pipelines.diagnose_trials import Known, Trial, layers_to_tap, trials_for
from pipelines.diagnose_verdict import headline, served_check, standing_check, trial_checks
from pipelines.parity import EXTRA_ROOM, ParityCase, ParityResult, measure_parity
from serving.chat_options import ChatOptions
from serving.engine.build import build_engine, load_drafter_for
from serving.engine.engine import Engine, EngineConfig

SLOTS = 8  # answers decoded at once

OnProgress = Callable[[int, int, str], None]  # steps done, of so many, what is going on


class DiagnoseError(ValueError):
    """A diagnosis that cannot be made; the message is one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What is looked at, and on which prompts."""

    drafter: str  # checkpoint folder, or its URI
    target: str = "smollm2"  # a shipped name, a Hugging Face id, a folder, a .gguf file
    prompts: str = "gsm8k_test"  # a shipped set's name, a file or a URI: prompts as in service
    limit: int = 24  # prompts, spread over the set
    chat: bool = False  # wrap raw `prompt` rows into a user turn
    chat_options: ChatOptions = field(default_factory=ChatOptions)  # as in service
    max_new_tokens: int = 64  # per answer
    dtype: str = "float32"  # of the target, or bfloat16
    backend: str = "auto"  # auto, native, torch
    device: str = "cpu"  # or cuda
    num_threads: int | None = None  # of torch; None leaves its own choice

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("max_new_tokens", 8)):
            if getattr(self, name) < least:
                raise DiagnoseError(f"{name} is {getattr(self, name)}; give at least {least}")


def diagnose(config: DiagnoseConfig, on_progress: OnProgress | None = None) -> Diagnosis:
    """Why a drafter accepts little. Raises TargetError, CheckpointError, PromptError or DiagnoseError where nothing can
    be looked at; whatever is wrong with the drafter itself is a finding."""
    say = on_progress or (lambda *_: None)
    target = load_target(config.target)
    files = read_files(local_checkpoint(config.drafter))
    files.checks.append(template_check(files.provenance, target, config.chat_options))
    if files.config is not None:
        files.checks += recorded_checks(files.config, files.provenance)
        files.checks.append(fingerprint_check(files.config, files.provenance, target))
        files.checks += _layers_missing(files.config, target)
    module = None if files.damaged else _loaded(files, files.folder, target)
    if module is None:
        return _report(config, files, None)
    return Examination(config, target, files, module, say).diagnosis()


def _layers_missing(config: DrafterConfig, target: Target) -> list[Check]:
    """Tapped layers that the target does not have: nothing can be drafted with them."""
    beyond = [layer for layer in config.target_layer_ids if layer >= target.num_layers]
    if not beyond:
        return []
    evidence = f"config.json taps layer {beyond[-1]}, the target's are 0 to {target.num_layers - 1}"
    cause, says = "layers", "tapped layers that the target does not have"
    mend = "count layers from 0 at the first decoder layer's output"
    if again := import_again(config):
        cause, says, mend = "fingerprint", "it was made for another target", again
    return [Check(name="layers", grade="fault", evidence=evidence, cause=cause, says=says, mend=mend, rank=DAMAGED)]


def _loaded(files: DrafterFiles, folder: Path, target: Target) -> DrafterModule | None:
    """The drafter in a folder, whichever target it was made for; None, with a check that says why, if it cannot be
    loaded."""
    known = next((check for check in files.checks if check.name == FINGERPRINT), None)
    stranger = known is not None and known.cause == "fingerprint"
    try:
        return load_unguarded(folder, target.path)
    except (ValueError, AttributeError, LookupError) as error:  # a target of another build may bring about any of them
        words = str(error)
        if any(part in words for part in ("outside the vocabulary", "do not ascend")):
            return _with_other_ids(files, words, target)
        if isinstance(error, CheckpointError) and not stranger:
            files.checks.append(_not_loaded("files", "it cannot be loaded", words, "convert or train it anew"))
            return None
        fits = known is not None and known.grade == "ok"
        if not stranger and (isinstance(error, TargetError) or (fits and not isinstance(error, ValueError))):
            raise
        mend = OTHER_TARGET_MEND
        files.checks.append(_not_loaded("fingerprint", "it was made for another target", words, mend))
        return None


def _with_other_ids(files: DrafterFiles, words: str, target: Target) -> DrafterModule | None:
    """The drafter with the token ids that its draft vocabulary seems to mean, if they can be made out."""
    mended = _with_token_ids(files)
    evidence = words + ("; draft_vocab_ids + index are ascending token ids" if mended else "")
    mend = "write draft_vocab_ids anew: index + d2t" if mended else "convert or train it anew"
    files.checks.append(_not_loaded("vocabulary", "the draft vocabulary's token ids are off", evidence, mend))
    if mended is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name in (CONFIG, PROVENANCE):
            if (files.folder / name).exists():
                (Path(folder) / name).write_bytes((files.folder / name).read_bytes())
        save_file(mended, Path(folder) / WEIGHTS)
        return _loaded(files, Path(folder), target)


def _not_loaded(cause: str, says: str, evidence: str, mend: str) -> Check:
    return Check(
        name="loading", grade="fault", evidence=evidence, cause=cause, says=says, mend=mend, rank=DAMAGED - 1
    )  # fmt: skip


def _with_token_ids(files: DrafterFiles) -> dict[str, Tensor] | None:
    """The tensors with a draft vocabulary that was stored as distances from its index, if that is what it is."""
    ids_W, config = files.tensors.get("draft_vocab_ids"), files.config
    if ids_W is None or config is None or ids_W.is_floating_point() or not len(ids_W):
        return None
    token_ids_W = ids_W + torch.arange(len(ids_W))
    if not bool((token_ids_W.diff() > 0).all()) or int(token_ids_W[-1]) >= config.vocab_size:
        return None
    return files.tensors | {"draft_vocab_ids": token_ids_W}


class Examination:
    """A drafter that can be loaded, on its target's answers."""

    def __init__(
        self, config: DiagnoseConfig, target: Target, files: DrafterFiles, module: DrafterModule, say: OnProgress
    ):
        self.config, self.target, self.files = config, target, files
        self.rows = read_rows(config.prompts, target, config.chat_options, config)
        self.number = min(module.config.num_draft_tokens, max(1, config.max_new_tokens // 4))
        self.engine = self._engine(module)
        dtype = torch.float32
        self.module = module.to(device=self.engine.backend.device, dtype=dtype)
        mask = files.provenance.get("mask_token_id")
        known = Known(module, shared_weights(target.path, dtype), target, mask if isinstance(mask, int) else None)
        self.trials = trials_for(known)
        self._say, self._done = say, 0
        self._steps = 2 * len(self.rows) + len(self.trials)

    def diagnosis(self) -> Diagnosis:
        """All of it."""
        answers = decode_answers(self.engine, self.rows, self.config.max_new_tokens, self._note_answer)
        self._done = len(self.rows)
        return self.examined(answers)

    def examined(self, answers: Sequence[Answer]) -> Diagnosis:
        """The diagnosis on answers that are there already."""
        measuring = Measuring(self.module, answers, self.number)
        if not measuring.answers:
            raise DiagnoseError(
                f"no answer is longer than the {self.number} drafts of a round; give max_new_tokens or other prompts"
            )
        checks, results = self.files.checks, measuring.try_all(self.trials, self._note_trial)
        acceptance = measuring.acceptance()
        by_category, taus = category_check(measuring)
        # a recursive head is shown the target's tokens behind a refused draft: what it drafts there is not known
        blockwise = isinstance(self.module, DFlashModule | IndependentHeads)
        paths, mismatches = path_checks(measuring, self.target, only_first=not blockwise)
        mask = mask_check(self.module, self.target, measuring.answers, self.files.provenance.get("mask_token_id"))
        vocabulary = vocabulary_check(self.module, measuring.answers, self.files.provenance)
        checks += [*filter(None, [vocabulary, mask]), *trial_checks(results, self.trials)]
        others = self._other_prompts(measuring)
        checks += [*trial_checks([result for _, result in others], [trial for trial, _ in others]), *paths]
        served = self._served(measuring)
        checks += [served_check(served), position_check(acceptance), *filter(None, [by_category])]
        self._say(self._steps, self._steps, "done")
        return replace(
            _report(self.config, self.files, acceptance.tau, [answer.category for answer in measuring.answers]),
            kind=kind_of(self.module),
            prompts=len(measuring.answers),
            tau=acceptance.tau,
            served_tau=served.served,
            acceptance_by_position=acceptance.by_position,
            tau_by_category=taus,
            trials=results + [result for _, result in others],
            path_mismatch_share=mismatches,
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _engine(self, module: DrafterModule) -> Engine:
        """The target with all layers tapped that some trial reads."""
        config, longest = self.config, max(len(row.prompt_ids) for row in self.rows)
        return build_engine(
            self.target.path,
            dtype=config.dtype,
            backend=config.backend,
            device=config.device,
            num_slots=min(SLOTS, len(self.rows)),
            max_len=longest + config.max_new_tokens + self.number + EXTRA_ROOM,
            target_layer_ids=layers_to_tap(module.config.target_layer_ids, self.target.num_layers),
            num_threads=config.num_threads,
            config=EngineConfig(num_draft_tokens=self.number, reuse_prefixes=False),
        )

    def _note_answer(self, done: int, of: int) -> None:
        self._say(done, self._steps, f"the target answers: {done} of {of}")

    def _note_trial(self, done: int, of: int, name: str) -> None:
        self._say(self._done + done, self._steps, name if done == of else f"trying {name}")

    def _other_prompts(self, measuring: Measuring) -> list[tuple[Trial, TrialResult]]:
        """Prompts made as in training, or otherwise than now, where it is not known that they agree."""
        trials: list[PromptsTrial] = other_prompts(
            self.files, self.target, self.config.chat_options, measuring.acceptance().tau
        )
        found = []
        for trial in trials:
            rows = read_rows(self.config.prompts, self.target, trial.options, self.config)
            if [row.prompt_ids for row in rows] != [row.prompt_ids for row in self.rows]:
                self._say(self._done + len(self.trials), self._steps, f"trying {trial.trial.name}")
                answers = decode_answers(self.engine, rows, self.config.max_new_tokens)
                there = Measuring(self.module, answers, self.number)
                if (result := trial.result(measuring, there)) is not None:
                    found.append((trial.trial, result))
        return found

    def _served(self, measuring: Measuring) -> ParityResult:
        """The engine drafts on the same prompts."""
        self._say(self._done + len(self.trials), self._steps, "drafting in the engine")
        fits = any(check.name == FINGERPRINT and check.grade == "ok" for check in self.files.checks)
        loads = not any(check.name == "loading" for check in self.files.checks)
        if fits and loads:
            drafter = load_drafter_for(self.engine.backend, self.files.folder, self.target.path)
        else:
            drafter = as_drafter(self.module)
        self.engine.set_drafter(drafter)
        cases = [
            ParityCase(
                prompt_ids=answer.ids_T[: answer.prompt_len].tolist(),
                response_ids=answer.ids_T[answer.prompt_len :].tolist(),
                accepted=measuring.accepted(answer),
            )
            for answer in measuring.answers
        ]
        result = measure_parity(self.engine, cases, self.number)
        self.engine.set_drafter(None)
        return result


def kind_of(module: DrafterModule) -> str:
    """`recursive`, `independent`, `dflash`, or the class of another kind."""
    if isinstance(module, DFlashModule):
        return "dflash"
    return str(getattr(module.config, "kind", type(module).__name__))


def _report(
    config: DiagnoseConfig, files: DrafterFiles, tau: float | None, categories: Sequence[str] | None = None
) -> Diagnosis:
    """What the checks come to. Without `categories` nothing was decoded."""
    standing = None
    if categories is not None:
        alone = not findings_of(files.checks)
        standing = standing_check(tau, files.provenance, categories, alone)
        files.checks.append(standing)
    findings = findings_of(files.checks)
    line, verdict = headline(findings, standing)
    trained: Any = files.provenance.get("expected_tau")
    return Diagnosis(
        headline=line,
        verdict=verdict,
        findings=findings,
        checks=files.checks,
        drafter=config.drafter,
        target=config.target,
        kind="unknown",
        prompt_set=config.prompts,
        trained_tau=trained if isinstance(trained, float) else None,
    )
