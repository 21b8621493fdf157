"""The parity gate: held-out sequences with what the trainer expects on them in, served tau beside expected tau out.

`draftloop train` ends with it: the real engine decodes the same prompts with the saved checkpoint. A drafter that looks
well in training and is served wrongly (shifted features, other positions, lost state) is found here.

Only greedy rollouts are compared: on a response that was sampled, the engine's own greedy text is another one. The two
must agree round by round, since both walk the same text from the same first token. Rounds that would draft past the
known continuation are left out of both: training cannot know what is accepted there, and the engine clips them. Where
the engine's text parts from the rollout's (a target in another dtype), the continuation is known up to there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.acceptance import Acceptance
from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import PROVENANCE, read_provenance
from drafters.drafter_module import DrafterModule
from pipelines.expected_acceptance import accepted_drafts, walk_rounds
from pipelines.training_sequence import TrainingSequence

if TYPE_CHECKING:  # workers make cases and never load the engine
    from serving.engine.engine import Engine

TOLERANCE = 0.05  # of expected tau, where there is enough text to measure it
MOST_TOLERANCE = 0.10  # beyond that the text is too short to tell anything
EXTRA_ROOM = 2  # tokens beyond a sequence and its last drafts


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One held-out sequence and what the trained module does on it."""

    prompt_ids: list[int]
    response_ids: list[int]
    accepted: list[int]  # drafts kept in a round that begins after response token i (`accepted_drafts`)


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """What the gate found. Without a round to compare nothing was measured: the taus and `passed` are None."""

    expected: float | None  # tau
    served: float | None  # tau
    prompts: int
    tolerance: float  # how far served may be from expected, as a share of it
    passed: bool | None

    def verdict(self) -> str:
        """One line."""
        if self.passed is None:
            why = "no held-out greedy response is long enough" if self.prompts else "no held-out response is greedy"
            if self.served is not None:
                why = f"too little text (one round's drafts are {self.tolerance:.0%} of it)"
            return f"parity was not measured: {why}; generate greedy rollouts of more tokens"
        served, expected = ("-" if tau is None else f"{tau:.2f}" for tau in (self.served, self.expected))
        found = f"served tau {served}, expected {expected} on {self.prompts} held-out prompts"
        if self.passed:
            return f"{found}: within {self.tolerance:.0%}"
        return f"{found}: more than {self.tolerance:.0%} apart, so training and serving disagree; do not serve it"


def parity_cases(
    module: DrafterModule, held_out: Sequence[TrainingSequence], num_draft_tokens: int, limit: int
) -> list[ParityCase]:
    """Cases of up to `limit` turns of greedy held-out sequences, spread over all of them."""
    greedy = [(s, span) for s in held_out if s.greedy for span in s.spans]
    count = min(limit, len(greedy))
    cases = []
    for sequence, (first, end) in (greedy[i * len(greedy) // count] for i in range(count)):
        ids = sequence.ids.tolist()
        accepted = accepted_drafts(module, sequence, (first, end), num_draft_tokens)
        cases.append(ParityCase(prompt_ids=ids[:first], response_ids=ids[first:end], accepted=accepted))
    return cases


def prompt_cases(held_out: Sequence[TrainingSequence], limit: int) -> list[ParityCase]:
    """Cases that are prompts alone: what belongs to them is not known yet."""
    count = min(limit, len(held_out))
    chosen = [held_out[i * len(held_out) // count] for i in range(count)]
    return [ParityCase(prompt_ids=s.ids[: s.spans[0][0]].tolist(), response_ids=[], accepted=[]) for s in chosen]


def room_needed(cases: Sequence[ParityCase], num_draft_tokens: int) -> int:
    """Tokens of context in which no round's drafts are cut."""
    longest = max((len(case.prompt_ids) + len(case.response_ids) for case in cases), default=1)
    return longest + num_draft_tokens + EXTRA_ROOM


def run_parity(
    target_path: Path, drafter_path: Path, cases: Sequence[ParityCase], num_draft_tokens: int, device: str = "cpu"
) -> ParityResult:
    """Decode the cases with the real engine and a saved drafter; write what was found into its provenance."""
    from serving.engine.build import build_engine
    from serving.engine.engine import EngineConfig

    if cases:
        engine = build_engine(
            target_path,
            device=device,
            max_len=room_needed(cases, num_draft_tokens),
            drafter_path=drafter_path,
            config=EngineConfig(num_draft_tokens=num_draft_tokens, reuse_prefixes=False),  # as in training, all is fed
        )
        assert engine.drafter is not None
        result = measure_parity(engine, cases, min(num_draft_tokens, engine.drafter.max_draft_tokens))
    else:
        result = compare(Acceptance(), Acceptance(), 0, num_draft_tokens)
    provenance = read_provenance(drafter_path) | {"parity": asdict(result)}
    text = json.dumps(provenance, indent=2) + "\n"
    AtomicFolder(str(drafter_path), scratch=".").write(PROVENANCE, text.encode())
    return result


def measure_parity(engine: Engine, cases: Sequence[ParityCase], num_draft_tokens: int) -> ParityResult:
    """Decode the cases' prompts with the engine and its drafter, and compare round by round.

    The engine must draft chains of `num_draft_tokens`, and have `room_needed`.
    """
    rounds, texts = _decode(engine, cases)
    served, expected, parted = Acceptance(), Acceptance(), False
    for case, taken, text in zip(cases, rounds, texts, strict=True):
        known = _common_prefix(case.response_ids, text)
        parted |= known < min(len(case.response_ids), len(text))
        # a round begins after token i, and its drafts end at i + K
        places = min(max(0, known - num_draft_tokens), len(case.accepted))
        expected.add(walk_rounds(case.accepted[:places], num_draft_tokens))
        place = 0
        for gained, accepted in taken:
            if place < places:
                served.record(num_draft_tokens, accepted)
            place += gained
    result = compare(expected, served, len(cases), num_draft_tokens)
    if parted and result.served is None:  # texts that part before a round is over are no parity
        return replace(result, passed=False)
    return result


def compare(expected: Acceptance, served: Acceptance, prompts: int, num_draft_tokens: int) -> ParityResult:
    """The verdict on two sets of rounds.

    Served drafters may compute in bfloat16, so that a near-tie falls otherwise and costs a round all of its drafts: on
    a text so short that this alone is more than the tolerance, so much is allowed; where that is more than
    MOST_TOLERANCE, a drafter can fail and not pass.
    """
    passed, tolerance = None, TOLERANCE
    if expected.tau is not None and served.tau is not None:
        tolerance = max(TOLERANCE, num_draft_tokens / (expected.tau * expected.rounds))
        apart = abs(served.tau / expected.tau - 1)
        passed = False if apart >= tolerance else None if tolerance > MOST_TOLERANCE else True
    return ParityResult(expected=expected.tau, served=served.tau, prompts=prompts, tolerance=tolerance, passed=passed)


def _decode(engine: Engine, cases: Sequence[ParityCase]) -> tuple[list[list[tuple[int, int]]], list[list[int]]]:
    """Per case, the (tokens gained, drafts kept) of every round after the first token, and the whole text."""
    from serving.engine.sampling import Sampling

    index = {
        engine.add(case.prompt_ids, Sampling(max_new_tokens=len(case.response_ids)), request_id=f"parity-{i}"): i
        for i, case in enumerate(cases)
    }
    rounds: list[list[tuple[int, int]]] = [[] for _ in cases]
    texts: list[list[int]] = [[] for _ in cases]
    while engine.has_work:
        for progress in engine.step():
            i = index[progress.request_id]
            if texts[i]:  # the first token comes with the prompt's last pass, without drafts
                rounds[i].append((len(progress.token_ids), progress.num_accepted))
            texts[i] += progress.token_ids
    return rounds, texts


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
