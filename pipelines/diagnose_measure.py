"""What a drafter's proposals are worth on the target's answers, as it is and with one thing changed.

In: a module, answers with their features, trials. Out: acceptance, and which trials accept clearly more. A trial is
looked at on a few places first, the same ones for all; only what seems to gain is counted on all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.acceptance import Acceptance
from drafters.drafter_module import DrafterModule
from drafters.training_batch import TrainingBatch
from pipelines.diagnose_answers import Answer
from pipelines.diagnose_report import TrialResult
from pipelines.diagnose_trials import Trial, displaced_batch
from pipelines.expected_acceptance import proposed_drafts, walk_rounds
from pipelines.paired_bootstrap import LEAST_PROMPTS, PromptRounds, tau_gain, with_rounds
from pipelines.token_paths import Rejection

FIRST_LOOK_PLACES = 256  # of all answers together, on which every trial is looked at
FIRST_LOOK_GAIN = 0.04  # in tokens a round: a trial that gains less there is not counted out
CONFIDENCE = 0.99  # that a gain is no chance; most changes lose a lot, so that few of them can win by chance
LEAST_GAIN = 0.1  # in tau
LEAST_SHARE = 0.15  # of the accepted drafts without the change
SAID_TOKENS = 8  # of the target, at a refused draft

OnTrial = Callable[[int, int, str], None]  # done, of so many, the trial's name


@dataclass(frozen=True)
class Measured:
    """A trial's rounds on each answer, beside those without the change."""

    trial: Trial
    pairs: list[tuple[PromptRounds, PromptRounds]]

    @property
    def gain(self) -> float:
        """In tau, over all answers together."""
        before, after = (_tau([pair[side] for pair in self.pairs]) for side in (0, 1))
        return after - before


def _tau(rounds: Sequence[PromptRounds]) -> float:
    """Of answers with at least a round."""
    return sum(r.gained for r in rounds) / sum(r.rounds for r in rounds)


class Measuring:
    """A drafter on the answers of its target."""

    def __init__(self, module: DrafterModule, answers: Sequence[Answer], num_draft_tokens: int):
        """`num_draft_tokens` are drafted in a round, no more than the module proposes."""
        self.module, self.num_draft_tokens = module, num_draft_tokens
        self.answers = [answer for answer in answers if answer.places(num_draft_tokens)]
        self._layers = tuple(module.config.target_layer_ids)
        self._drafts = [self._propose(answer, self._pairs(answer)) for answer in self.answers]
        places = sum(answer.places(num_draft_tokens) for answer in self.answers)
        self._stride = max(1, places // FIRST_LOOK_PLACES)

    # -- as it is -----------------------------------------------------------------------------------------------------

    def accepted(self, answer: Answer) -> list[int]:
        """Drafts that would be kept in a round that begins after response token 0, 1, 2 ..."""
        return self._kept(answer, self._pairs(answer), self._drafts[self.answers.index(answer)])

    def acceptance(self, answers: Sequence[Answer] | None = None) -> Acceptance:
        """Over the rounds of some answers, or all."""
        total = Acceptance()
        for answer in self.answers if answers is None else answers:
            total.add(walk_rounds(self.accepted(answer), self.num_draft_tokens))
        return total

    def rejections(self, only_first: bool) -> list[Rejection]:
        """The refused drafts of all rounds; `only_first` without those behind them, where they are not known."""
        found = []
        for answer, drafts_NK in zip(self.answers, self._drafts, strict=True):
            accepted, place, ids = self.accepted(answer), 0, answer.ids_T.tolist()
            while place < len(accepted):
                kept = accepted[place]
                if kept < self.num_draft_tokens:
                    at = answer.prompt_len + 1 + place + kept
                    drafted = tuple(drafts_NK[place, kept : self.num_draft_tokens].tolist())
                    found.append(Rejection(drafted[:1] if only_first else drafted, tuple(ids[at : at + SAID_TOKENS])))
                place += kept + 1
        return found

    # -- with something changed ---------------------------------------------------------------------------------------

    def looked_at(self, trial: Trial) -> Measured:
        """On a few places of every answer: each of them counts as a round."""
        pairs = []
        for answer, drafts_NK in zip(self.answers, self._drafts, strict=True):
            some_N = torch.arange(0, answer.places(self.num_draft_tokens), self._stride)
            pairs_N = self._pairs(answer)[some_N]
            now = self._kept(answer, pairs_N, drafts_NK[some_N])
            then = self._kept(answer, pairs_N, self._propose(answer, pairs_N, trial), trial)
            pairs.append((_each_a_round(now), _each_a_round(then)))
        return Measured(trial, pairs)

    def counted_out(self, trial: Trial) -> Measured:
        """On all rounds of every answer."""
        pairs = []
        for answer in self.answers:
            pairs_N = self._pairs(answer)
            now = self.accepted(answer)
            then = self._kept(answer, pairs_N, self._propose(answer, pairs_N, trial), trial)
            pairs.append((self._rounds(now), self._rounds(then)))
        return Measured(trial, pairs)

    def try_all(self, trials: Sequence[Trial], on_trial: OnTrial | None = None) -> list[TrialResult]:
        """Every trial's result, what gains most first. A trial that this kind cannot draft in is left out."""
        results: list[TrialResult] = []
        for done, trial in enumerate(trials):
            if on_trial:
                on_trial(done, len(trials), trial.name)
            found = self.looked_at(trial)
            confirm = found.gain >= FIRST_LOOK_GAIN
            results.append(result_of(self.counted_out(trial) if confirm else found, confirmed=confirm))
        if on_trial and trials:
            on_trial(len(trials), len(trials), "all tried")
        return sorted(results, key=lambda result: result.tau_as_it_is - result.tau)

    def _pairs(self, answer: Answer) -> Tensor:
        """Anchor pairs p of the rounds that begin after response token 0, 1, 2 ..."""
        return torch.arange(answer.places(self.num_draft_tokens)) + answer.prompt_len - 1

    def _propose(self, answer: Answer, pairs_N: Tensor, trial: Trial | None = None) -> Tensor:
        """[N, K] proposals at pairs."""
        features_TF = trial.features(answer) if trial and trial.features else answer.tapped(self._layers)
        sequence, end = answer.sequence(features_TF), len(answer.ids_T)
        if trial is None:
            return proposed_drafts(self.module, sequence, end, pairs_N)

        def propose(batch: TrainingBatch) -> Tensor:
            return self.module.propose(displaced_batch(batch, trial.displaced) if trial.displaced else batch)

        with trial.change(self.module):
            return proposed_drafts(self.module, sequence, end, pairs_N, propose)

    def _kept(self, answer: Answer, pairs_N: Tensor, drafts_NK: Tensor, trial: Trial | None = None) -> list[int]:
        """How many drafts from the first on are what stands where the trial looks for them.

        Those that stand before the first place to be drafted, or are given away, must be right too and do not count.
        """
        shift = trial.shift if trial else 0
        uncounted = max(0, -shift) + (trial.given_away if trial else 0)
        step_K = torch.arange(2, 2 + self.num_draft_tokens)
        said_NK = answer.ids_T[pairs_N[:, None] + step_K + shift]
        right_NK = (drafts_NK[:, : self.num_draft_tokens] == said_NK).long().cumprod(dim=1)
        kept: list[int] = right_NK[:, uncounted:].sum(dim=1).tolist()
        return kept

    def _rounds(self, accepted: Sequence[int]) -> PromptRounds:
        return PromptRounds.of(walk_rounds(accepted, self.num_draft_tokens))


def _each_a_round(accepted: Sequence[int]) -> PromptRounds:
    return PromptRounds(sum(accepted) + len(accepted), len(accepted))


def result_of(measured: Measured, *, confirmed: bool) -> TrialResult:
    """Both taus, and where the gain lies. There must be an answer on which both sides had rounds."""
    trial, pairs = measured.trial, with_rounds(measured.pairs)
    facts: dict[str, Any] = {"cause": trial.cause, "name": trial.name, "confirmed": confirmed, "confidence": CONFIDENCE}
    if len(pairs) < LEAST_PROMPTS:
        before, after = (_tau([pair[side] for pair in pairs]) for side in (0, 1))
        return TrialResult(**facts, tau=after, tau_as_it_is=before, gain_low=-1.0, gain_high=after)
    gain = tau_gain(pairs, confidence=CONFIDENCE)
    return TrialResult(**facts, tau=gain.challenger, tau_as_it_is=gain.champion, gain_low=gain.low, gain_high=gain.high)


def clearly_more(result: TrialResult) -> bool:
    """Whether a trial accepts so much more that its change mends something."""
    gain = result.tau - result.tau_as_it_is
    enough = max(LEAST_GAIN, LEAST_SHARE * (result.tau_as_it_is - 1))
    return result.confirmed and gain >= enough and result.gain_low > 0
