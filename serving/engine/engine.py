"""The decode engine: requests in, tokens out, in rounds. Plain decoding is the same loop with no drafter.

    engine = build_engine(target_path, drafter_path=...)
    for completion in engine.generate([[1, 2, 3]], Sampling(max_new_tokens=64)): ...

One thread drives it; `async_engine` puts it behind an async stream. No Ray here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from drafters.acceptance import Acceptance
from drafters.drafter import Drafter
from serving.engine.draft_length import DraftLengthChooser, PositionAcceptance
from serving.engine.round import Drafts, Outcome, assemble_rows, decide, draft_request, usable_drafts
from serving.engine.rows import RowsBackend
from serving.engine.sampling import Sampling
from serving.engine.scheduler import Plan, Scheduler
from serving.engine.sequence import Completion, Progress, Sequence
from serving.engine.timing import Timings

log = logging.getLogger(__name__)


class RequestError(ValueError):
    """A request that the engine cannot take; the message names the mend."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs its rounds."""

    num_draft_tokens: int = 4  # drafts per round, cut to what the drafter can do; 0 switches drafting off
    tree_nodes: int = 0  # most nodes of a draft tree of depth num_draft_tokens, if the drafter makes trees; 0: chains
    adapt_draft_length: bool = False  # choose each sequence's number by cost, with num_draft_tokens as the most
    max_prefill_rows: int = 512  # prompt rows per pass, so that a long prompt does not stall running streams


@dataclass
class EngineStats:
    """Counters since the engine was built."""

    passes: int = 0  # forward passes
    rows: int = 0  # rows fed
    emitted_tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    fallbacks: dict[str, int] = field(default_factory=dict)  # rounds decoded plainly because of the drafter, by reason
    timings: Timings = field(default_factory=Timings)
    draft_lengths: Counter[int] = field(default_factory=Counter)  # drafts asked for, by sequence and round


class Engine:
    """Continuous batching over a backend's slots, with an optional drafter. Not thread-safe."""

    def __init__(
        self,
        backend: RowsBackend,
        drafter: Drafter | None = None,
        *,
        config: EngineConfig | None = None,
        eos_token_ids: Iterable[int] = (),
    ):
        self.backend = backend
        self.config = config or EngineConfig()
        self.eos_token_ids = tuple(eos_token_ids)
        self.stats = EngineStats()
        self.num_draft_tokens = self.config.num_draft_tokens
        self.tree_nodes = 0
        self._scheduler = Scheduler(backend.num_slots, self.config.max_prefill_rows)
        self._requests: dict[str, Sequence] = {}
        self._finished: list[Progress] = []  # cancelled since the last step
        self._names = itertools.count()
        self._drafter: Drafter | None = None
        self._chooser: DraftLengthChooser | None = None
        self._columns: slice | torch.Tensor | None = None
        self.set_drafter(drafter)

    # -- what a caller sees ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._finished)

    @property
    def free_slots(self) -> int:
        return self._scheduler.free_slots

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_slots(self) -> int:
        return self.backend.num_slots

    @property
    def max_len(self) -> int:
        return self.backend.max_len

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.backend.target_layer_ids

    @property
    def drafter_name(self) -> str | None:
        return self._drafter.name if self._drafter else None

    @property
    def drafter(self) -> Drafter | None:
        return self._drafter

    def add(
        self,
        prompt_ids: Seq[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        keep_features: bool = False,
    ) -> str:
        """Queue a request and return its id. Raises RequestError if the target could not serve it."""
        prompt = [int(token) for token in prompt_ids]
        request_id = request_id if request_id is not None else f"request-{next(self._names)}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; give another")
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if not all(0 <= token < self.backend.vocab_size for token in prompt):
            raise RequestError(f"the prompt has a token outside the target's vocabulary of {self.backend.vocab_size}")
        if len(prompt) + sampling.max_new_tokens > self.max_len:
            raise RequestError(
                f"prompt ({len(prompt)} tokens) and max_new_tokens ({sampling.max_new_tokens}) exceed the "
                f"context of {self.max_len} tokens; shorten one of them"
            )
        if keep_features and not self.target_layer_ids:
            raise RequestError(
                "features were asked for, but no layer is tapped; build the engine with target_layer_ids"
            )
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else set(self.eos_token_ids))
        sequence = Sequence(
            request_id=request_id,
            tokens=prompt,
            prompt_len=len(prompt),
            sampling=sampling,
            stop_ids=stops,
            keep_features=keep_features,
        )
        self._requests[request_id] = sequence
        self._scheduler.waiting.append(sequence)
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request now; its last progress comes with the next step. Unknown and finished ids are ignored."""
        sequence = self._requests.pop(request_id, None)
        if sequence is None:
            return
        sequence.finish_reason = "cancelled"
        if sequence.slot >= 0:
            self._scheduler.release(sequence)
        else:
            self._scheduler.waiting.remove(sequence)
        completion = sequence.completion(self.drafter_name)
        self._finished.append(Progress(request_id=request_id, token_ids=[], num_accepted=0, completion=completion))

    def step(self) -> list[Progress]:
        """One round for everybody: draft, verify, keep. Returns what each request gained."""
        finished, self._finished = self._finished, []
        plan = self._scheduler.plan()
        if not plan.decoding and not plan.prefilling:
            return finished
        asked, drafts = self._draft(plan)
        started = time.perf_counter()
        members = plan.decoding + [s for s, _ in plan.prefilling]
        wanted = any(s.keep_features or self._feeds_drafter(s) for s in members)
        rows = assemble_rows(plan, drafts, with_features=wanted)
        output = self.backend.forward(rows)
        outcomes = decide(plan, drafts, output.logits_NV)
        if not plan.prefilling:
            self._note_step(len(plan.decoding), drafts, time.perf_counter() - started)
        self.stats.passes += 1
        self.stats.rows += len(rows.ids_R)
        return finished + self._commit(plan, asked, drafts, outcomes, output.features_RF)

    def run(
        self, requests: Iterable[tuple[str, Seq[int], Sampling]], *, keep_features: bool = False
    ) -> Iterator[Completion]:
        """Push (id, prompt, sampling) requests through the slots; yields completions as they finish."""
        pending = iter(requests)
        exhausted = False
        while True:
            while not exhausted and self.num_waiting + self.num_slots - self.free_slots < self.num_slots:
                item = next(pending, None)
                if item is None:
                    exhausted = True
                else:
                    self.add(item[1], item[2], request_id=item[0], keep_features=keep_features)
            if not self.has_work:
                return
            for progress in self.step():
                if progress.completion:
                    yield progress.completion

    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling: Sampling | Seq[Sampling] | None = None,
        *,
        keep_features: bool = False,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete all prompts (token ids) and return the completions in the order of the prompts."""
        if sampling is None or isinstance(sampling, Sampling):
            params: Seq[Sampling] = [sampling or Sampling()] * len(prompts)
        else:
            params = sampling
        names = [f"generate-{next(self._names)}" for _ in prompts]
        done = {}
        for completion in self.run(zip(names, prompts, params, strict=True), keep_features=keep_features):
            done[completion.request_id] = completion
            if on_completion:
                on_completion(completion)
        return [done[name] for name in names]

    def set_drafter(self, drafter: Drafter | None) -> None:
        """Swap the drafter between rounds.

        Running requests go on plainly if the new one needs features that they no longer have.
        """
        columns = _feature_columns(self.backend, drafter) if drafter and drafter.target_layer_ids else None
        if drafter:
            drafter.allocate(self.num_slots, self.max_len)
        self._drafter, self._columns = drafter, columns
        self.tree_nodes = min(self.config.tree_nodes, drafter.max_tree_nodes) if drafter else 0
        self._chooser = None
        if drafter and self.config.adapt_draft_length:
            self._chooser = DraftLengthChooser(
                min(self.num_draft_tokens, drafter.max_draft_tokens),
                equal_lengths=self.backend.wants_equal_runs,
                trees=self.tree_nodes > 0,
            )
        for sequence in self._scheduler.running.values():
            sequence.observed, sequence.pending_features = 0, []
            sequence.position_acceptance = PositionAcceptance()
            sequence.draftable = self._columns is None or sequence.cached == 0

    def reset_stats(self) -> None:
        """Start counting anew, such as after a warm-up."""
        self.stats = EngineStats()

    # -- one round ------------------------------------------------------------------------------------------------

    def _draft(self, plan: Plan) -> tuple[list[int], Drafts]:
        """Ask the drafter: how many drafts of each sequence, and the drafts. One that fails costs only its drafts."""
        batch = len(plan.decoding)
        places = [i for i, s in enumerate(plan.decoding) if s.draftable]
        if not places or self._drafter is None:
            return [0] * batch, Drafts.none(batch)
        sequences = [plan.decoding[i] for i in places]
        lengths = self._choose_lengths(sequences, plain_rows=batch - len(places))
        room = [self.max_len - 1 - s.cached for s in sequences]
        lengths = [min(n, most) for n, most in zip(lengths, room, strict=True)]
        number = max(lengths)
        if number < 1:
            return [0] * batch, Drafts.none(batch)
        catching_up = max(s.cached - s.observed for s in sequences)
        started = time.perf_counter()
        try:
            reply = self._drafter.draft(draft_request(sequences, number, self._columns, self.tree_nodes))
            most = lengths if reply.parents_BK is None else [min(n, self.tree_nodes) for n in room]
            drafts = usable_drafts(reply, most, self.backend.vocab_size)
        except Exception as error:  # whatever the drafter does, the request goes on
            self._fall_back(sequences, error)
            return [0] * batch, Drafts.none(batch)
        for s in sequences:
            s.observed, s.pending_features = s.cached, []
        seconds = time.perf_counter() - started
        if not plan.prefilling and catching_up <= self.num_draft_tokens + 1:
            self.stats.timings.draft[len(sequences), number].append(seconds)
            if self._chooser:
                self._chooser.observe_draft(len(sequences), number, seconds)
        if self._chooser and drafts.confidence is not None:
            drafts = drafts.cut(self._chooser.worth_verifying(drafts.confidence, batch - len(places), seconds))
        asked = [0] * batch
        for place, length in zip(places, lengths, strict=True):
            asked[place] = length
        return asked, drafts.spread(places, batch)

    def _choose_lengths(self, sequences: list[Sequence], plain_rows: int) -> list[int]:
        """Drafts to ask for in this round, by sequence."""
        assert self._drafter is not None
        number = min(self.num_draft_tokens, self._drafter.max_draft_tokens)
        lengths = [number] * len(sequences)
        if self._chooser and number:
            self._chooser.max_draft_tokens = number
            lengths = self._chooser.choose([s.position_acceptance for s in sequences], plain_rows)
        self.stats.draft_lengths.update(lengths)
        return lengths

    def _note_step(self, batch: int, drafts: Drafts, seconds: float) -> None:
        drafted = sum(len(t) for t in drafts.tokens)
        self.stats.timings.step[batch, drafted].append(seconds)
        if self._chooser:
            self._chooser.observe_step(batch + drafted, seconds)

    def _fall_back(self, sequences: list[Sequence], error: Exception) -> None:
        reason = type(error).__name__
        if reason not in self.stats.fallbacks:
            log.warning("drafter %s failed, decoding goes on plainly: %s: %s", self.drafter_name, reason, error)
        self.stats.fallbacks[reason] = self.stats.fallbacks.get(reason, 0) + 1
        for s in sequences:  # what the drafter noted before it failed is unknown: it must not go on from there
            s.draftable, s.pending_features = False, []

    def _commit(
        self,
        plan: Plan,
        asked: list[int],
        drafts: Drafts,
        outcomes: list[Outcome],
        features_RF: torch.Tensor | None,
    ) -> list[Progress]:
        """Take the outcomes over into the sequences, keep the features of verified rows, release what is finished."""
        fed = [len(t) + 1 for t in drafts.tokens] + [count for _, count in plan.prefilling]
        sequences = plan.decoding + [s for s, _ in plan.prefilling]
        progress, row = [], 0
        for i, (s, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
            decoding = i < len(plan.decoding)
            kept = [0, *(j + 1 for j in outcome.path)] if decoding else list(range(fed[i]))  # rows that are verified
            self._keep_features(s, features_RF, row, kept)
            if kept[-1] >= len(kept):  # a path through a tree that is not its first rows
                self.backend.move_entries(s.slot, s.cached, [s.cached + j for j in kept])
            row += fed[i]
            s.cached += len(kept)
            if decoding and asked[i]:
                self._note_acceptance(s, asked[i], drafts, i, outcome.path)
            if outcome.new_tokens:
                progress.append(self._advance(s, outcome))
        return progress

    def _note_acceptance(self, s: Sequence, asked: int, drafts: Drafts, i: int, path: list[int]) -> None:
        nodes, depth = len(drafts.tokens[i]), max(drafts.depths(i))
        s.acceptance.record(depth, len(path), nodes)
        self.stats.acceptance.record(depth, len(path), nodes)
        if self._chooser:
            self._chooser.observe_acceptance(s.position_acceptance, asked, len(path))
            if drafts.confidence is not None:
                self._chooser.observe_confidence(drafts.confidence[i], path)

    def _feeds_drafter(self, s: Sequence) -> bool:
        """Whether the drafter will want this sequence's features; with drafting switched off they are not kept."""
        return self._columns is not None and s.draftable and self.num_draft_tokens > 0

    def _keep_features(self, s: Sequence, features_RF: torch.Tensor | None, row: int, kept: list[int]) -> None:
        feeds = self._feeds_drafter(s)
        if self._columns is not None and not feeds:
            s.draftable = False  # pairs are missing from here on
        if features_RF is None:
            return
        if kept[-1] == len(kept) - 1:
            features = features_RF[row : row + len(kept)]
        else:
            features = features_RF[torch.tensor(kept, device=features_RF.device) + row]
        if s.keep_features:
            s.kept_features.append(features.to("cpu", torch.bfloat16, copy=True))
        if feeds:
            s.pending_features.append(features.clone())

    def _advance(self, s: Sequence, outcome: Outcome) -> Progress:
        taken = s.append(outcome.new_tokens)
        self.stats.emitted_tokens += len(taken)
        completion = None
        if s.finish_reason:
            self._scheduler.release(s)
            del self._requests[s.request_id]
            completion = s.completion(self.drafter_name)
        return Progress(
            request_id=s.request_id,
            token_ids=taken,
            num_accepted=min(outcome.num_accepted, len(taken)),
            completion=completion,
        )


def _feature_columns(backend: RowsBackend, drafter: Drafter) -> slice | torch.Tensor:
    """Which columns of the backend's features the drafter wants."""
    have, want = backend.target_layer_ids, tuple(drafter.target_layer_ids)
    if have == want:
        return slice(None)
    missing = sorted(set(want) - set(have))
    if missing:
        raise ValueError(
            f"drafter {drafter.name} taps layers {missing}, which the engine does not tap ({list(have)}); "
            "build the engine with this drafter's target_layer_ids"
        )
    width = backend.hidden_size
    places = torch.tensor([have.index(layer) for layer in want], device=backend.device)
    return (places[:, None] * width + torch.arange(width, device=backend.device)).flatten()
