"""The decode engine: requests in, tokens out, in rounds. Plain decoding is the same loop with no drafter.

    engine = build_engine(target_path, drafter_path=...)
    for completion in engine.generate([[1, 2, 3]], Sampling(max_new_tokens=64)): ...

One thread drives it; `async_engine` puts it behind an async stream. No Ray here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

from drafters.drafter import AwaitedDrafter, Drafter
from serving.engine.awaited_drafting import AwaitedDrafting
from serving.engine.drafter_counts import ByVersion, CountsByDrafter
from serving.engine.drafting import Drafting, EngineStats
from serving.engine.engine_config import EngineConfig
from serving.engine.load import Load, load_of
from serving.engine.overlap import OverlapChoice
from serving.engine.prefill_budget import PrefillBudget
from serving.engine.round import Drafts, Outcome, accepted_entries, assemble_rows, decide
from serving.engine.rows import RowsBackend
from serving.engine.sampling import Sampling
from serving.engine.scheduler import Plan, Scheduler
from serving.engine.sequence import Completion, Progress, Sequence
from serving.engine.slot_memory import FeatureUse, SlotMemory

if TYPE_CHECKING:
    from serving.engine.memory_plan import MemoryPlan


class RequestError(ValueError):
    """A request that the engine cannot take; the message names the mend."""


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
        self.memory: MemoryPlan | None = None  # what it takes, if `build_engine` made it
        self.num_draft_tokens = self.config.num_draft_tokens
        self.tree_nodes = 0
        self._memory = SlotMemory(
            backend.num_slots, reuse=self.config.reuse_prefixes, lowest_first=backend.wants_equal_runs
        )
        self._prefill = PrefillBudget(self.config.max_prefill_rows, self.config.max_prefill_stall_s)
        self._scheduler = Scheduler(backend.num_slots, self._prefill, self._memory)
        self._requests: dict[str, Sequence] = {}
        self._finished: list[Progress] = []  # cancelled since the last step
        self._names = itertools.count()
        self._drafting: Drafting | None = None
        self._counts = CountsByDrafter()
        self._drafter_version: str | None = None
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
        return self._drafting.drafter.name if self._drafting else None

    @property
    def drafter_version(self) -> str | None:
        """Which drafter serves, told from those of the same name before and after it; None: it decodes plainly."""
        return (self._drafter_version or self._drafting.drafter.name) if self._drafting else None

    @drafter_version.setter
    def drafter_version(self, version: str | None) -> None:
        self._drafter_version = version

    def counts_by_drafter(self) -> ByVersion:
        """What `stats` hold, by version of the drafter."""
        return self._counts.totals(self.drafter_version, self.stats)

    def load(self) -> Load:
        """How much it has to do."""
        return load_of(self._scheduler, self.max_len)

    @property
    def drafter(self) -> Drafter | None:
        return self._drafting.drafter if self._drafting else None

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
            keep_history=self.config.keep_history and bool(self.target_layer_ids) and sampling.num_draft_tokens != 0,
            draftable=sampling.num_draft_tokens != 0,
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
        self._finished.append(self._progress(sequence, [], Outcome([], [])))

    def step(self) -> list[Progress]:
        """One round for everybody: draft, verify, keep. Returns what each request gained."""
        finished, self._finished = self._finished, []
        self._memory.claim(self.backend)
        plan = self._scheduler.plan(self._feature_use())
        self.stats.prefix_tokens += sum(s.prefix_tokens for s in plan.admitted)
        if self._drafting:
            plan = self._drafting.turn(plan)
        if not plan.decoding and not plan.prefilling:
            return finished
        batch = len(plan.decoding)
        asked, drafts = [0] * batch, Drafts.none(batch)
        if self._drafting:
            failures = self._drafting.failures
            asked, drafts = self._drafting.draft(plan, self.num_draft_tokens, self.tree_nodes, self.stats)
            if self._drafting.failures > failures:
                untold = [s for s in self._scheduler.running.values() if s.draftable and s.reused_epoch >= 0]
                self._forget_drafter(untold)
        started = time.perf_counter()
        members = plan.decoding + [s for s, _ in plan.prefilling]
        wanted = any(s.keeps_features or self._feeds_drafter(s) for s in members)
        rows = assemble_rows(plan, drafts, with_features=wanted)
        output = self.backend.forward(rows)
        outcomes = decide(plan, drafts, output)
        moves = [m for s, outcome in zip(plan.decoding, outcomes, strict=False) if (m := accepted_entries(s, outcome))]
        if moves:
            self.backend.move_entries(moves)
        self._note_pass(plan, drafts, time.perf_counter() - started)
        self.stats.passes += 1
        self.stats.rows += len(rows.ids_R)
        progress = self._commit(plan, asked, drafts, outcomes, output.features_RF)
        if self._drafting:
            running = [s for _, s in sorted(self._scheduler.running.items())]
            self._drafting.ahead(running, self.num_draft_tokens, self.tree_nodes, self.stats)
        return finished + progress

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

    def set_drafter(self, drafter: Drafter | None, version: str | None = None) -> None:
        """Swap the drafter between rounds. `version` is what counters go by; None: the drafter's name.

        Running requests go on plainly if the new one needs features that were not kept.
        """
        nodes = min(self.config.tree_nodes, drafter.max_tree_nodes) if drafter else 0
        drafting = self._drafting_with(drafter, nodes > 0) if drafter else None
        self._counts.close(self.drafter_version, self.stats)
        self._drafting, self.tree_nodes = drafting, nodes  # not before: a drafter that does not fit leaves the old one
        self._drafter_version = version
        self._forget_drafter(list(self._scheduler.running.values()))

    def _drafting_with(self, drafter: Drafter, trees: bool) -> Drafting:
        config = self.config
        options: dict[str, Any] = {
            "most_drafts": self.num_draft_tokens,
            "trees": trees,
            "adapt": config.adapt_draft_length,
            "sampled": config.sampled_drafts,
        }
        if not isinstance(drafter, AwaitedDrafter):
            return Drafting(drafter, self.backend, **options)
        overlap = OverlapChoice(config.overlap)
        return AwaitedDrafting(drafter, self.backend, deadline_s=config.draft_deadline_s, overlap=overlap, **options)

    def fetch_answers(self) -> None:
        """Take what a drafter elsewhere has answered, which an idle engine would not look at."""
        if self._drafting:
            self._drafting.fetch(0.0)

    def reset_stats(self) -> None:
        """Start counting anew, such as after a warm-up."""
        self.stats, self._counts = EngineStats(), CountsByDrafter()

    # -- one round ------------------------------------------------------------------------------------------------

    def _columns(self) -> slice | torch.Tensor | None:
        """The features that the drafter reads, if it reads any."""
        return self._drafting.columns if self._drafting else None

    def _feature_use(self) -> FeatureUse:
        if self._columns() is None:
            return FeatureUse.NONE
        return FeatureUse.KEPT if self.num_draft_tokens > 0 else FeatureUse.DROPPED

    def _forget_drafter(self, sequences: list[Sequence]) -> None:
        """The drafter knows nothing of these sequences, nor of what is left of earlier ones in free slots."""
        self._memory.forget_drafter()
        for s in sequences:
            s.forget_drafter(self._columns() is not None, self.backend.device)

    def _note_pass(self, plan: Plan, drafts: Drafts, seconds: float) -> None:
        batch = len(plan.decoding)
        self._prefill.observe(
            batch + sum(len(tokens) for tokens in drafts.tokens), sum(count for _, count in plan.prefilling), seconds
        )
        if plan.prefilling:
            return
        if self._drafting:
            self._drafting.note_step(batch, drafts, seconds, self.stats)
        else:
            self.stats.timings.note_step(batch, 0, seconds)

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
            row += fed[i]
            s.cached += len(kept)
            if decoding and asked[i] and self._drafting:
                gained = self._drafting.note_outcome(s, asked[i], drafts, i, outcome.path)
                self.stats.acceptance.add(gained)
            if outcome.new_tokens:
                progress.append(self._advance(s, outcome))
        return progress

    def _feeds_drafter(self, s: Sequence) -> bool:
        """Whether the drafter will want this sequence's features; with drafting switched off they are not kept."""
        return self._feature_use() is FeatureUse.KEPT and s.draftable

    def _keep_features(self, s: Sequence, features_RF: torch.Tensor | None, row: int, kept: list[int]) -> None:
        feeds = self._feeds_drafter(s)
        if self._columns() is not None and not feeds:
            s.draftable = False  # pairs are missing from here on
        if features_RF is None:
            return
        if kept[-1] == len(kept) - 1:
            features = features_RF[row : row + len(kept)]
        else:
            features = features_RF[torch.tensor(kept, device=features_RF.device) + row]
        if s.keeps_features:  # for a rollout on the host; for the next drafter where they are: no wait for the device
            where = "cpu" if s.keep_features else features.device
            s.kept_features.append(features.to(where, torch.bfloat16, copy=True))
        if feeds:
            s.pending_features.append(features.clone())

    def _advance(self, s: Sequence, outcome: Outcome) -> Progress:
        taken = s.append(outcome.new_tokens)
        self.stats.emitted_tokens += len(taken)
        if s.finish_reason:
            self._scheduler.release(s)
            del self._requests[s.request_id]
        return self._progress(s, taken, outcome)

    def _progress(self, s: Sequence, token_ids: list[int], outcome: Outcome) -> Progress:
        return Progress(
            request_id=s.request_id,
            token_ids=token_ids,
            num_accepted=min(outcome.num_accepted, len(token_ids)),
            num_drafts=outcome.num_drafts,
            logprobs=outcome.logprobs and outcome.logprobs[: len(token_ids)],
            completion=s.completion(self.drafter_name) if s.finish_reason else None,
            admitted_at=s.admitted_at,
            drafter_version=self.drafter_version,
        )
