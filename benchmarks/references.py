"""Reference answers: greedy decoding of one prompt at a time, kept in a JSON file so that it is done once.

In: prompts and a decoder, by transformers' `generate` or by our own plain loop. Out: their answers. Answers are kept
under the decoder's name, which must hold all that they depend on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drafters.target import Target
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling

Decode = Callable[[list[int]], list[int]]
SAVE_EVERY_S = 10
ROOT = Path(__file__).parent.parent


class AnswerCache:
    """A JSON file {decoder: {digest of the prompt: answer}}; a run that was killed continues where it was saved."""

    def __init__(self, file: Path):
        self.file = file
        self._answers: dict[str, dict[str, list[int]]] = json.loads(file.read_text()) if file.exists() else {}

    def fill(self, decoder: str, prompts: list[list[int]], make_decode: Callable[[], Decode]) -> list[list[int]]:
        """Answers to all prompts; `make_decode` is called only if one is missing."""
        known = self._answers.setdefault(decoder, {})
        keys = [hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16] for prompt in prompts]
        missing = [i for i, key in enumerate(keys) if key not in known]
        if missing:
            decode = make_decode()
            started = saved = time.perf_counter()
            for done, i in enumerate(missing, start=1):
                known[keys[i]] = decode(prompts[i])
                now = time.perf_counter()
                if now - saved > SAVE_EVERY_S or done == len(missing):
                    write_json(self.file, self._answers)
                    print(f"{decoder}: {done} of {len(missing)} prompts, {now - started:.0f} s", flush=True)
                    saved = now
        return [known[key] for key in keys]


def transformers_decode(model: torch.nn.Module, target: Target, tokens: int) -> Decode:
    """`generate`, greedy, one prompt without padding."""
    ends = list(target.eos_token_ids)

    def decode(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=ends,
            pad_token_id=ends[0] if ends else None, temperature=None, top_p=None,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    return decode


def plain_decode(engine: Engine, tokens: int) -> Decode:
    """Our own loop without a drafter, one prompt with nobody beside it."""
    return lambda prompt: engine.generate([prompt], Sampling(max_new_tokens=tokens))[0].token_ids


@functools.cache  # the code that runs is the code that lay here at the start
def code_digest() -> str:
    """Hash of the sources that decide what our engine decodes."""
    files = sorted([*(ROOT / "drafters").glob("*.py"), *(ROOT / "serving" / "engine").glob("*.*")])
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.suffix in (".py", ".cpp", ".h"))).hexdigest()[:12]


def write_json(file: Path, content: object) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    work = file.with_name(f".{file.name}.part")
    work.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(work, file)
