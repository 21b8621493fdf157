"""The options of `draftloop generate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipelines.cores import usable_cores
from pipelines.feature_codec import ENGINE_DTYPE, FEATURE_DTYPES
from serving.chat_options import ChatOptions
from serving.engine.sampling import Sampling


class GenerateError(ValueError):
    """Options or circumstances that generation cannot work with; one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to generate, and with what. Fields up to `drafter` decide the bytes, and torch's threads on CPUs."""

    target: str = "smollm2"  # name, Hugging Face id, folder or .gguf file
    prompts: str = "gsm8k_train"  # shipped set, or path, URI or pattern of .jsonl, .jsonl.gz and .parquet files
    output: str = "rollouts"  # folder or s3:// address of the rollout set
    limit: int | None = None  # accepted prompt rows to use; None: all
    chat: bool = False  # wrap raw `prompt` rows into a user turn of the chat template
    chat_options: ChatOptions = field(default_factory=ChatOptions)  # another template, a system turn, thinking
    max_prompt_tokens: int | None = None  # longer prompts are rejected; None: what the target's context leaves
    max_new_tokens: int = 128  # most tokens of a reply; rows of several turns get as many replies
    temperature: float = 0.0  # 0: the target's argmax
    top_k: int = 0  # keep the k most probable tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches p
    seed: int = 0  # each row draws from a stream of its own, made from this and the row's id
    with_features: bool = True  # store the target's hidden states for offline training
    features_dtype: str = ENGINE_DTYPE  # bfloat16 as the engine keeps them, float32, or int8 with scales
    target_layer_ids: tuple[int, ...] | None = None  # layers to tap, from 0; None: `num_taps`, spread up to the last
    num_taps: int = 3  # layers to tap where `target_layer_ids` is not given
    dtype: str = "float32"  # of the target: float32 or bfloat16
    backend: str = "auto"  # of the engine: auto, native or torch
    batch: int = 8  # sequences that an actor decodes at once
    rows_per_shard: int = 64  # prompts per Parquet file, the unit of resuming
    drafter: str | None = None  # folder of a drafter that makes generation faster; None: plain decoding
    threads_per_actor: int | None = None  # compute threads; None: cpus_per_actor
    num_actors: tuple[int, int] = (1, 1)  # least and most actors of the pool
    cpus_per_actor: float | None = None  # CPUs that Ray sets aside; None: this machine's cores divided among the actors
    gpus_per_actor: float = 0.0  # GPUs for an actor; 0 runs on the CPU
    resources: tuple[tuple[str, float], ...] = ()  # custom ones that an actor's node must have: (name, amount)
    max_bytes: int | None = None  # refuse to write more than this; None: what the disk holds
    stall_timeout_s: float = 1800.0  # give up when no actor reports progress for so long

    def __post_init__(self) -> None:
        for name, bad, mend in (
            ("limit", self.limit is not None and self.limit < 1, "at least 1"),
            ("batch", self.batch < 1, "at least 1"),
            ("rows_per_shard", self.rows_per_shard < 1, "at least 1"),
            ("num_taps", self.with_features and self.num_taps < 1, "at least 1, or switch features off"),
            ("features_dtype", self.features_dtype not in FEATURE_DTYPES, f"one of {', '.join(FEATURE_DTYPES)}"),
            ("features_dtype", not self.with_features and self.features_dtype != ENGINE_DTYPE, "it with features on"),
            ("num_actors", not 1 <= self.num_actors[0] <= self.num_actors[1], "1 <= least <= most"),
            ("cpus_per_actor", self.cpus_per_actor is not None and self.cpus_per_actor <= 0, "more than 0"),
            ("gpus_per_actor", self.gpus_per_actor < 0, "0 or more"),
            ("gpus_per_actor", self.gpus_per_actor > 1 and self.gpus_per_actor % 1 > 0, "whole GPUs, or a part of one"),
            ("threads_per_actor", self.threads_per_actor is not None and self.threads_per_actor < 1, "at least 1"),
            ("dtype", self.dtype not in ("float32", "bfloat16"), "float32 or bfloat16"),
        ):
            if bad:
                raise GenerateError(f"{name} is {getattr(self, name)}; give {mend}")
        try:
            self.sampling(0)
        except ValueError as error:
            raise GenerateError(str(error)) from None

    @property
    def cpus(self) -> float:
        """CPUs of one actor, as given or by default."""
        return self.cpus_per_actor or max(1, usable_cores() // self.num_actors[1])

    @property
    def threads(self) -> int:
        """Compute threads of one actor, as given or by default."""
        return self.threads_per_actor or math.ceil(self.cpus)

    def sampling(self, seed: int) -> Sampling:
        """The sampling parameters of one row."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
        )
