"""The prompt sets that are shipped; NOTICE.md has their origin and licence. Train on one, measure on the other."""

from __future__ import annotations

from pathlib import Path

# name -> what it holds
SHIPPED = {
    "gsm8k_train": "800 grade-school maths questions of GSM8K's training set",
    "gsm8k_test": "200 questions of GSM8K's test set; never train on them",
    "mbpp": "240 programming tasks of MBPP, in English with tests in Python",
    "russian": "190 questions and small tasks in Russian",
}


def shipped(name: str) -> Path:
    """The file of a shipped prompt set. Raises KeyError for a name that is not in SHIPPED."""
    if name not in SHIPPED:
        raise KeyError(name)
    return Path(__file__).parent / f"{name}.jsonl"
