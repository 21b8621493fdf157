"""Reference answers: greedy decoding by transformers' `generate` or by our own plain loop, done once and kept in JSON.

In: prompts and a decoder. Out: their answers, under the decoder's name, which must hold all that they depend on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drafters.atomic_files import AtomicFolder
from drafters.target import Target
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling

Decode = Callable[[list[list[int]]], list[list[int]]]  # prompts of one batch to their answers
SAVE_EVERY_S = 10
ROOT = Path(__file__).parent.parent


class AnswerCache:
    """A JSON file {decoder: {digest of the prompt: answer}}; a run that was killed continues where it was saved."""

    def __init__(self, file: Path):
        self.file = file
        self._answers: dict[str, dict[str, list[int]]] = json.loads(file.read_text()) if file.exists() else {}

    def known(self, decoder: str, prompts: list[list[int]]) -> list[list[int] | None]:
        """Answers that are there already."""
        answers = self._answers.get(decoder, {})
        return [answers.get(_key(prompt)) for prompt in prompts]

    def fill(
        self, decoder: str, prompts: list[list[int]], make_decode: Callable[[], Decode], batch: int = 1
    ) -> list[list[int]]:
        """Answers to all prompts, `batch` decoded at a time; `make_decode` is called only if one is missing."""
        answers = self._answers.setdefault(decoder, {})
        missing = [prompt for prompt in prompts if _key(prompt) not in answers]
        if missing:
            decode = make_decode()
            started = saved = time.perf_counter()
            for first in range(0, len(missing), batch):
                group = missing[first : first + batch]
                answers.update(zip(map(_key, group), decode(group), strict=True))
                now, done = time.perf_counter(), first + len(group)
                if now - saved > SAVE_EVERY_S or done == len(missing):
                    write_json(self.file, self._answers)
                    print(f"{decoder}: {done} of {len(missing)} prompts, {now - started:.0f} s", flush=True)
                    saved = now
        return [answers[_key(prompt)] for prompt in prompts]


def _key(prompt: list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def transformers_decode(model: torch.nn.Module, target: Target, tokens: int, **options: object) -> Decode:
    """`generate`, greedy, prompts padded on the left to one length; `options` go to it too."""
    ends = list(target.eos_token_ids)

    def decode(prompts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[ends[0]] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0],
            temperature=None, top_p=None, **options,
        )  # fmt: skip
        answers = []
        for row in out[:, longest:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            answers.append(row[:end])
        return answers

    return decode


def plain_decode(engine: Engine, tokens: int) -> Decode:
    """Our own loop without a drafter, one prompt with nobody beside it."""
    return lambda prompts: [engine.generate([p], Sampling(max_new_tokens=tokens))[0].token_ids for p in prompts]


@functools.cache  # the code that runs is the code that lay here at the start
def code_digest() -> str:
    """Hash of the sources that decide what our engine decodes."""
    files = sorted([*(ROOT / "drafters").glob("*.py"), *(ROOT / "serving" / "engine").glob("*.*")])
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.suffix in (".py", ".cpp", ".h"))).hexdigest()[:12]


def write_json(file: Path, content: object) -> None:
    """Write a JSON file whole or not at all."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    AtomicFolder(str(file.parent), scratch=".").write(file.name, text.encode())
