"""What a drafter is trained on: addresses of rollout sets in, chunks of rows and a vocabulary out. No Ray.

Several sets are one, in the order given: made by one target with one chat template and the same taps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from drafters.target import Target, target_fingerprint
from pipelines.draft_vocabulary import TokenCounts, draft_vocabulary
from pipelines.pack_source import Fetch
from pipelines.rollout_index import index_rollouts, read_chunk
from pipelines.rollout_schema import RolloutMetadata
from pipelines.rollout_store import RolloutSet, open_rollouts
from pipelines.step_order import Chunk
from pipelines.train_config import DRAFT_VOCAB_COVERAGE, TrainConfig, TrainError
from pipelines.training_sequence import TrainingSequence
from pipelines.warm_start import started_vocabulary

ALIKE = ("tokenizer_hash", "chat_template_hash", "chat_options")  # in what several sets must agree
ALIKE_IN_FEATURES = ("target_layer_ids", "target_fingerprint")  # and in what, where their features are read
CHUNKS_AHEAD = 2  # that are read while others are trained on


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The rows of a run, and what their tokens say."""

    training: list[Chunk]
    held_out: list[Chunk]
    response_tokens: int  # of the training rows
    draft_vocab_ids: list[int]  # ascending
    training_coverage: float | None  # share of the training rows' response tokens that can be drafted
    held_out_coverage: float | None

    @property
    def training_rows(self) -> int:
        return sum(len(chunk.rows) for chunk in self.training)

    @property
    def held_out_rows(self) -> int:
        return sum(len(chunk.rows) for chunk in self.held_out)


def training_data(config: TrainConfig, sets: Sequence[RolloutSet], target: Target) -> TrainingData:
    """Read the sets' tokens, choose rows and vocabulary. Raises RolloutError or TrainError."""
    lanes = config.steps.order(config.num_workers).lanes
    vocab_size = int(target.config.get_text_config().vocab_size)
    index = index_rollouts(
        sets, vocab_size=vocab_size, held_out=config.held_out, lanes=lanes, weights=config.rollout_weights
    )
    if len(index.training) < lanes:
        raise TrainError(
            f"{index.rows} usable rollouts cannot feed {lanes} micro-batches; generate more, or lower num_workers"
        )
    coverage = config.draft_vocab_coverage or DRAFT_VOCAB_COVERAGE
    vocabulary = started_vocabulary(config)
    if vocabulary is None:
        vocabulary = draft_vocabulary(index.counts, config.draft_vocab_size, coverage)
    return TrainingData(
        training=index.training,
        held_out=index.held_out,
        response_tokens=index.response_tokens,
        draft_vocab_ids=vocabulary.tolist(),
        training_coverage=TokenCounts.total(index.counts).coverage_of(vocabulary),
        held_out_coverage=index.held_out_counts.coverage_of(vocabulary),
    )


def fetch_from(sets: Sequence[RolloutSet], chunks: Sequence[Chunk], *, with_features: bool = True) -> Fetch:
    """Reads chunks from the sets' files, a few ahead of their use."""

    def fetch(wanted: Sequence[int]) -> Iterator[tuple[int, list[TrainingSequence]]]:
        with ThreadPoolExecutor(max_workers=1) as reader:
            ahead: deque[tuple[int, Future[list[TrainingSequence]]]] = deque()
            for c in wanted:
                ahead.append((c, reader.submit(read_chunk, sets, chunks[c], with_features=with_features)))
                if len(ahead) > CHUNKS_AHEAD:
                    number, future = ahead.popleft()
                    yield number, future.result()
            for number, future in ahead:
                yield number, future.result()

    return fetch


def first_sequences(fetch: Fetch, chunks: Sequence[Chunk], count: int) -> list[TrainingSequence]:
    """The first `count` sequences, or all."""
    ends = accumulate(len(chunk.rows) for chunk in chunks)
    wanted = sum(end < count for end in ends) + 1  # chunks
    return [s for _, rows in fetch(range(min(wanted, len(chunks)))) for s in rows][:count]


def open_sets(uris: Sequence[str], *, tokens_only: bool = False) -> list[RolloutSet]:
    """The finished sets at `uris`, or only what they hold of tokens.

    Raises RolloutError, or TrainError if they cannot be trained on together.
    """
    names = ALIKE if tokens_only else (*ALIKE, *ALIKE_IN_FEATURES)
    sets = [open_rollouts(uri) for uri in uris]
    for place, rollouts in enumerate(sets):
        if rollouts.manifest_sha256 in [other.manifest_sha256 for other in sets[:place]]:
            raise TrainError(f"rollouts {uris[place]} are given twice; give every set once")
        if differing := _differing(sets[0].metadata, rollouts.metadata, names):
            name, first, this = differing
            raise TrainError(
                f"rollouts {uris[0]} and {uris[place]} differ in {name} ({first} and {this}); give sets that agree"
            )
    return sets


def _differing(
    first: RolloutMetadata, other: RolloutMetadata, names: Sequence[str]
) -> tuple[str, object, object] | None:
    """The first fact in which two sets may not differ but do, with both values."""
    for name in names:
        mine, theirs = getattr(first, name), getattr(other, name)
        if mine != theirs:
            return name, mine, theirs
    return None


def check_sets(uris: Sequence[str], target: Target, *, tokens_only: bool = False) -> list[RolloutSet]:
    """The sets, if this target made them and they are whole, with features unless only tokens are read.

    Raises RolloutError or TrainError.
    """
    sets = open_sets(uris, tokens_only=tokens_only)
    for uri, rollouts in zip(uris, sets, strict=True):
        rollouts.check_target(target_fingerprint(target.path, rollouts.metadata.target_layer_ids))
        if not rollouts.has_features and not tokens_only:
            raise TrainError(f"rollouts {uri} have no features; generate them again with features, or train online")
        if rollouts.folder.local:  # from afar it would mean to fetch everything twice
            rollouts.check()
    return sets
