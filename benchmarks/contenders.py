"""The ways to decode that benchmarks/engine.py compares: transformers, llama.cpp, and our engine with its drafters.

Each takes a batch of token-id prompts and gives their greedy continuations, prefill included, ended by an
end-of-sequence token or the limit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from gguf_file import write_gguf  # siblings: the folder of a script that is run is where Python looks first
from llama_cpp import LlamaCpp
from references import Decode, transformers_decode

from drafters.checkpoint import read_config
from drafters.drafter import Drafter
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.target import Target, load_model
from serving.engine.build import DTYPES, TORCH_THREADS, build_engine, load_drafter_for
from serving.engine.drafting import MOST_TREE_NODES, TREE_DEPTH, TREE_NODES
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling

MAX_LEN = 1024
LOOKUP_TOKENS = 8  # drafts of a prompt lookup, ours and transformers'


@dataclass
class Contender:
    """One way to decode a batch, and what it took."""

    name: str
    decode: Decode
    slow: bool  # decodes only the first batches of a run
    engine: Engine | None = None
    close: Callable[[], None] = lambda: None
    runs: list[list[tuple[int, float]]] = field(default_factory=list)  # per run: (tokens, seconds) of each batch
    outputs: list[list[int]] = field(default_factory=list)  # of the last run

    @property
    def adapts(self) -> bool:
        """Whether the engine chooses its draft lengths."""
        return self.engine is not None and self.engine.config.adapt_draft_length

    def rates(self, batches: int | None = None) -> list[float]:
        """Tokens per second of each run, over its first batches (None: all)."""
        return [sum(t for t, _ in run[:batches]) / sum(s for _, s in run[:batches]) for run in self.runs]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all contenders of a table share."""

    target: Target
    drafter: Path
    dtype: str
    batch: int
    tokens: int  # new ones per prompt, at most
    num_draft_tokens: int


def transformers_contenders(setting: Setting) -> list[Contender]:
    """`generate`, as one left-padded batch; at batch 1 with prompt lookup too, which knows no larger one."""
    target = setting.target
    model = load_model(target.path, DTYPES[setting.dtype])

    def contender(name: str, **options: object) -> Contender:
        generate = transformers_decode(model, target, setting.tokens, **options)

        def decode(prompts: list[list[int]]) -> list[list[int]]:
            torch.set_num_threads(TORCH_THREADS)
            return generate(prompts)

        return Contender(f"transformers, {name}", decode, slow=True)

    found = [contender("generate")]
    if setting.batch == 1:
        found.append(contender("prompt lookup", prompt_lookup_num_tokens=LOOKUP_TOKENS))
    return found


def llama_cpp_contender(setting: Setting) -> Contender:
    """The same weights as F32 or F16, whose products llama.cpp's kernels are made for."""
    weights = {"float32": "float32", "bfloat16": "float16"}[setting.dtype]
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / f"target-{weights}.gguf"
    write_gguf(setting.target.path, path, weights)
    peer = LlamaCpp(path, setting.batch, MAX_LEN, TORCH_THREADS)

    def close() -> None:
        peer.close()
        folder.cleanup()

    return Contender(f"llama.cpp, {weights} weights", lambda p: peer.decode(p, setting.tokens), slow=False, close=close)


def our_contenders(setting: Setting, backend: str) -> list[Contender]:
    """Our loop on one backend: plain first, then with each drafter."""
    most, native = setting.num_draft_tokens, backend == "native"
    engine = build_engine(
        setting.target.path, dtype=setting.dtype, backend=backend, num_slots=setting.batch, max_len=MAX_LEN,
        target_layer_ids=read_config(setting.drafter).target_layer_ids,
    )  # fmt: skip
    threads = torch.get_num_threads()  # what build_engine found best beside this backend

    def mtp() -> Drafter:  # one for each engine: a drafter keeps the state of one engine's slots
        return load_drafter_for(engine.backend, setting.drafter, setting.target.path)

    plans: list[tuple[str, Drafter | None, EngineConfig]] = [
        ("plain", None, EngineConfig()),
        ("prompt lookup", PromptLookupDrafter(), EngineConfig(num_draft_tokens=LOOKUP_TOKENS)),
        (f"MTP, {most} drafts", mtp(), EngineConfig(num_draft_tokens=most)),
        (f"MTP, trees of {TREE_NODES}", mtp(), EngineConfig(num_draft_tokens=TREE_DEPTH, tree_nodes=TREE_NODES)),
    ]
    chosen = EngineConfig(num_draft_tokens=TREE_DEPTH, tree_nodes=MOST_TREE_NODES, adapt_draft_length=True)
    if native:
        plans += [
            ("MTP, length chosen", mtp(), EngineConfig(num_draft_tokens=most, adapt_draft_length=True)),
            ("MTP, trees chosen", mtp(), chosen),
            ("MTP, switched off", mtp(), EngineConfig(num_draft_tokens=0)),
        ]
    found = []
    for name, drafter, config in plans:
        config = replace(config, reuse_prefixes=False)  # every run decodes the same prompts
        one = Engine(engine.backend, drafter, config=config, eos_token_ids=setting.target.eos_token_ids)

        def decode(prompts: list[list[int]], one: Engine = one) -> list[list[int]]:
            torch.set_num_threads(threads)
            return [c.token_ids for c in one.generate(prompts, Sampling(max_new_tokens=setting.tokens))]

        found.append(Contender(f"ours, {backend}, {name}", decode, slow=not native, engine=one))
    return found
