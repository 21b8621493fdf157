"""The traffic log of a time window in, the rows that a drafter may learn from and those that test it out. No Ray.

`draftloop redistill` begins here. Rows that another target, tokenizer, chat template or other chat options produced are
refused, what is too short, too long or a loop is left out, nothing is there twice. The latest part is held out. The
same log and window give the same rows in the same order.

Memory: the token ids of `max_rows` rows (four bytes a token, so `max_rows * max_tokens * 4` bytes at most) with about a
kilobyte each beside them, one shard of the log, and about 300 bytes for every different row of the window.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipelines.traffic_selection import RefusedFile, Selection, TrafficWindow, WindowError
from serving.traffic_schema import TrafficColumns, TrafficMetadata, TrafficRow
from serving.traffic_shards import count_rows, live_tau, read_shards

__all__ = ["Selection", "TrafficWindow", "WindowConfig", "WindowError", "count_rows", "live_tau", "select"]

# why rows are refused, beside another origin
FINISH, SHORT, LONG, LOOP, SAMPLING = "finish reason", "too short", "too long", "a loop", "sampling out of range"
DUPLICATE, FREQUENT, SURPLUS, SHIELDED = "duplicate", "prompt too frequent", "over max_rows", "prompt is held out"
TYPES = "columns of other types"

_MIX = 0x9E3779B97F4A7C15  # odd; its powers weigh the tokens of an n-gram


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """Which rows are taken."""

    min_response_tokens: int = 4  # shorter responses leave nothing to draft
    max_tokens: int = 4096  # of prompt and response together
    finish_reasons: tuple[str, ...] = ("stop", "length")  # that are taken
    loop_ngram: int = 8  # tokens that make a repetition
    max_repeated_share: float = 0.8  # of a response's n-grams that were there before in it
    max_per_prompt: int = 4  # different responses to the same prompt; the first ones are taken
    max_rows: int = 20_000  # a spread over the window beyond
    held_out: float = 0.1  # share of the taken rows: the latest

    def __post_init__(self) -> None:
        for name, bad, mend in (
            ("min_response_tokens", self.min_response_tokens < 1, "at least 1"),
            ("max_tokens", self.max_tokens <= self.min_response_tokens, "more than min_response_tokens"),
            ("finish_reasons", not self.finish_reasons, "at least one"),
            ("loop_ngram", self.loop_ngram < 1, "at least 1"),
            ("max_repeated_share", not 0 <= self.max_repeated_share <= 1, "0 to 1"),
            ("max_per_prompt", self.max_per_prompt < 1, "at least 1"),
            ("max_rows", self.max_rows < 1, "at least 1"),
            ("held_out", not 0 <= self.held_out < 1, "0 or more, less than 1"),
        ):
            if bad:
                raise WindowError(f"{name} is {getattr(self, name)}; give {mend}")


def select(uri: str, window: TrafficWindow, expected: TrafficMetadata, config: WindowConfig | None = None) -> Selection:
    """The rows of a window that are to be learnt from, and those held out.

    `expected` says which target, tokenizer, chat template and chat options must have answered: `TrafficMetadata.of`.
    Requests are logged when they are answered, by their arrival: let `until` lie longer ago than an answer and the
    log's flush interval take.

    More than `max_rows`: those with the least hash of their id are taken, which spreads them evenly over the window
    whatever its bursts, needs no second reading, and does not depend on the order of reading. The newest would be the
    last minutes of busy hours.

    A prompt of the held-out slice is nowhere else: rows that have it leave training, and the slice has it once. They
    would be missed more in the slice, which is small, and whose noise decides what a gate can see.
    """
    chosen = _Choice(config or WindowConfig())
    files: list[RefusedFile] = []

    def skipped(address: str, problem: str) -> None:
        files.append(RefusedFile(name=address, reason=problem, rows=0))

    for name, table in read_shards(uri, since=window.since, until=window.until, on_skipped=skipped):
        if reason := chosen.take(table, expected):
            files.append(RefusedFile(name=name, reason=reason, rows=table.num_rows))
    training, held_out = chosen.split()
    selection = Selection(
        window=window,
        origin=expected,
        training=training,
        held_out=held_out,
        read=chosen.read,
        refused=dict(sorted(chosen.refused.items())),
        refused_files=files,
    )
    assert selection.read == selection.kept + sum(selection.refused.values())
    return selection


def foreign(found: TrafficMetadata, expected: TrafficMetadata) -> str | None:
    """In what a file's origin is another than expected, in words; None if a drafter may learn from its rows."""
    words = {
        "target_fingerprint": "target",
        "tokenizer_hash": "tokenizer",
        "chat_template_hash": "chat template",
        "chat_options": "chat options",
    }
    differing = [word for name, word in words.items() if getattr(found, name) != getattr(expected, name)]
    return f"another {', '.join(differing)}" if differing else None


def repeated_share(ids: np.ndarray, n: int) -> float:
    """The share of a text's n-grams that occur earlier in it; 0 where there is none.

    Counted over all n-grams and not for the most frequent one, which a loop longer than n tokens has no oftener than
    any other.
    """
    if len(ids) < n + 1:
        return 0.0
    weights = np.array([pow(_MIX, k + 1, 2**64) for k in range(n)], dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + np.uint64(1), n)
    hashes = (windows * weights).sum(axis=1, dtype=np.uint64)  # wraps around
    return 1.0 - len(np.unique(hashes)) / len(hashes)


@dataclass
class _Choice:
    """The rows taken so far, and why others were not."""

    config: WindowConfig
    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    _rows: list[tuple[int, int, TrafficRow]] = field(default_factory=list)  # heap of (- hash of the id, place read)
    _seen: set[bytes] = field(default_factory=set)  # digests of prompt and response
    _prompts: Counter[bytes] = field(default_factory=Counter)  # by digest of the prompt

    def take(self, table: pa.Table, expected: TrafficMetadata) -> str | None:
        """Choose among the rows of a file; the reason if it is refused as a whole."""
        origin = foreign(TrafficMetadata.from_texts(table.schema.metadata), expected)
        if origin is None:
            try:
                columns = TrafficColumns(table)
            except pa.ArrowException:
                origin = TYPES
        if origin is not None:
            self.read += table.num_rows
            self.refused[origin] += table.num_rows
            return origin
        for i in range(len(columns)):
            self.read += 1
            if reason := self._take(columns, i):
                self.refused[reason] += 1
        return None

    def _take(self, columns: TrafficColumns, i: int) -> str | None:
        """Why a row is refused, be it an earlier one that makes room for this; None if none is."""
        config, prompt, response = self.config, columns.prompts[i], columns.responses[i]
        if columns.value("finish_reason", i) not in config.finish_reasons:
            return FINISH
        if not len(prompt) or len(response) < config.min_response_tokens:
            return SHORT
        if len(prompt) + len(response) > config.max_tokens:
            return LONG
        if repeated_share(response, config.loop_ngram) > config.max_repeated_share:
            return LOOP
        of_prompt, of_both = _digest(prompt), _digest(prompt, response)
        if of_both in self._seen:
            return DUPLICATE
        if self._prompts[of_prompt] >= config.max_per_prompt:
            return FREQUENT
        try:
            row = columns.row(i)
        except ValueError:
            return SAMPLING
        self._seen.add(of_both)
        self._prompts[of_prompt] += 1
        return self._keep(row)

    def _keep(self, row: TrafficRow) -> str | None:
        rank = int.from_bytes(hashlib.blake2b(row.request_id.encode(), digest_size=8).digest())
        heapq.heappush(self._rows, (-rank, self.read, row))
        if len(self._rows) <= self.config.max_rows:
            return None
        heapq.heappop(self._rows)  # this row or an earlier one
        return SURPLUS

    def split(self) -> tuple[list[TrafficRow], list[TrafficRow]]:
        """Training and held-out rows. Further rows with a prompt of the held-out ones are refused."""
        rows = sorted((row for _, _, row in self._rows), key=lambda row: (row.arrived_us, row.request_id))
        count = round(self.config.held_out * len(rows))
        if self.config.held_out and len(rows) > 1:
            count = max(1, count)
        cut = len(rows) - count
        held_out: dict[bytes, TrafficRow] = {}
        for row in rows[cut:]:
            held_out.setdefault(_digest(row.prompt_ids), row)
        training = [row for row in rows[:cut] if _digest(row.prompt_ids) not in held_out]
        if shielded := len(rows) - len(training) - len(held_out):
            self.refused[SHIELDED] += shielded
        return training, list(held_out.values())


def _digest(*parts: Sequence[int] | np.ndarray) -> bytes:
    """Of token ids, where one part ends and the next begins included."""
    digest = hashlib.blake2b(digest_size=16)
    for array in map(np.asarray, parts):
        digest.update(len(array).to_bytes(8) + array.tobytes())
    return digest.digest()
