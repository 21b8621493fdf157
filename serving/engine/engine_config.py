"""What an engine is told when it is built."""

from __future__ import annotations

from dataclasses import dataclass

from serving.engine.overlap import Overlap


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs its rounds."""

    num_draft_tokens: int = 4  # drafts per round, cut to what the drafter can do; 0 switches drafting off
    tree_nodes: int = 0  # most nodes of a draft tree of depth num_draft_tokens, if the drafter makes trees; 0: chains
    adapt_draft_length: bool = False  # choose each sequence's number by cost, with num_draft_tokens as the most
    max_prefill_rows: int = 512  # prompt rows per pass
    # seconds that a pass may take for prompts while others decode, at least 16 rows; None: as it takes. With the torch
    # backend rounding depends on how a prompt is cut, so that with a bound answers may part at near-ties
    max_prefill_stall_s: float | None = None
    sampled_drafts: bool = True  # False: drafters that sample propose their likeliest drafts, at any temperature
    keep_history: bool = False  # keep running sequences' features (bfloat16), so that a new drafter drafts for them too
    draft_deadline_s: float = 0.25  # a round waits so long for the drafts of a drafter elsewhere, then goes on plainly
    overlap: Overlap = "auto"  # with a drafter elsewhere: rounds by halves, drafting and verifying at the same time
    reuse_prefixes: bool = True  # prompts go on from what a free slot still holds; not for those that keep features
