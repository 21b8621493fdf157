"""What every drafter would draft at every place of the target's own text, from one plain decoding.

In: an engine that decodes plainly, and drafters that look on: each is asked for its longest chain and its largest tree
in every round, and nothing of it is verified. Out: by shape, the rounds that the engine would run. That is exact and
not an estimate: greedy drafts depend on the verified text alone, a shorter chain or smaller tree is the beginning of
the longer one, and the text goes on past its end by as many tokens as the last round drafts. (Kernels that round
otherwise for another batch may draft otherwise at near-ties.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drafters.acceptance import Acceptance
from drafters.drafter import Drafter, DraftReply, DraftRequest, empty_reply
from pipelines.compare_config import Shape
from pipelines.compare_figures import LengthFigures
from pipelines.token_paths import Rejection, share_of_path_mismatches, token_text
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling

SAID = 8  # tokens of the target that a refused draft is held against


@dataclass(frozen=True)
class Drafted:
    """What one drafter proposed after one verified token."""

    chain: list[int]
    tree: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # of the tree's nodes, -1 is the anchor

    def kept(self, shape: Shape, said: Sequence[int]) -> tuple[int, int, int]:
        """(drafts verified, their depth, drafts kept) of a round of this shape, when the target says `said`."""
        if not shape.nodes:
            chain = self.chain[: shape.depth]
            kept = next((i for i, (a, b) in enumerate(zip(chain, said, strict=False)) if a != b), len(chain))
            return len(chain), len(chain), kept
        tokens, parents = self.tree[: shape.nodes], self.parents[: shape.nodes]
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        node, kept = -1, 0
        while True:
            following = (j for j, above in enumerate(parents) if above == node and tokens[j] == said[kept])
            node = next(following, -2)
            if node < 0:
                return len(tokens), max(depths, default=0), kept
            kept += 1


class Onlooker:
    """A drafter that is told what is verified and asked twice a round: for a chain, and for a tree."""

    def __init__(self, drafter: Drafter, shapes: Sequence[Shape]):
        self.drafter = drafter
        self.depth = max(shape.depth for shape in shapes)
        self.nodes = max(shape.nodes for shape in shapes)
        self.failure: str | None = None  # why it is not asked any more
        self._outer: dict[int, int] = {}  # by slot, the engine's epoch
        self._epochs: dict[int, int] = {}  # by slot, the one that the drafter is told: the tree's call begins a new one
        self.drafted: dict[tuple[int, int], dict[int, Drafted]] = {}  # (slot, engine's epoch) -> by anchor's position

    def look(self, request: DraftRequest, columns: Tensor | None) -> None:
        """Note what it would draft now. `columns` of the request's features are its own; None: it reads none."""
        features = None
        if columns is not None:
            assert request.features_NF is not None
            features = request.features_NF[:, columns.to(request.features_NF.device)]
        for slot, epoch in zip(request.slots, request.epochs, strict=True):
            if self._outer.get(slot) != epoch:
                self._outer[slot], self._epochs[slot] = epoch, self._epochs.get(slot, -1) + 1
        own = replace(request, features_NF=features, epochs=[self._epochs[slot] for slot in request.slots])
        wanted = request.num_draft_tokens > 0  # else it is only told of a long prompt
        reply = self.drafter.draft(replace(own, num_draft_tokens=self.depth if wanted else 0))
        if not wanted:
            return
        tree = self._tree(own) if self.nodes else None
        for b, key in enumerate(zip(request.slots, request.epochs, strict=True)):
            anchor = request.starts[b] + request.counts[b]
            tokens, parents = ([], []) if tree is None else (_offered(tree, b), _parents(tree, b))
            self.drafted.setdefault(key, {})[anchor] = Drafted(_offered(reply, b), tokens, parents)

    def _tree(self, request: DraftRequest) -> DraftReply:
        """The newest pair once more, in an epoch that goes on from all before it."""
        last_B = torch.tensor(request.counts).cumsum(0) - 1
        features = request.features_NF
        for slot in request.slots:
            self._epochs[slot] += 1
        again = replace(
            request,
            epochs=[self._epochs[slot] for slot in request.slots],
            reused_epochs=request.epochs,
            counts=[1] * len(request.slots),
            starts=[start + count - 1 for start, count in zip(request.starts, request.counts, strict=True)],
            tokens_N=request.tokens_N[last_B],
            features_NF=None if features is None else features[last_B.to(features.device)],
            num_draft_tokens=self.depth,
            tree_nodes=self.nodes,
        )
        return self.drafter.draft(again)


def _offered(reply: DraftReply, b: int) -> list[int]:
    tokens = reply.tokens_BK[b].tolist()
    return tokens if reply.counts is None else tokens[: reply.counts[b]]


def _parents(reply: DraftReply, b: int) -> list[int]:
    count = len(_offered(reply, b))
    return list(range(-1, count - 1)) if reply.parents_BK is None else reply.parents_BK[b].tolist()[:count]


class Onlookers:
    """`Drafter` for the engine: lets several drafters look on, and proposes nothing itself."""

    name = "onlookers"
    max_tree_nodes = 0

    def __init__(self, onlookers: dict[str, Onlooker], width: int):
        """`width` of the target's hidden states."""
        self.onlookers = onlookers
        self.max_draft_tokens = max(o.depth for o in onlookers.values())
        self.target_layer_ids = tuple(sorted({i for o in onlookers.values() for i in o.drafter.target_layer_ids}))
        self.texts: dict[tuple[int, int], list[int]] = {}  # (slot, epoch) -> tokens that were verified
        self._columns: dict[str, Tensor | None] = {}
        for name, onlooker in onlookers.items():
            places = [self.target_layer_ids.index(layer) for layer in onlooker.drafter.target_layer_ids]
            columns = (torch.tensor(places)[:, None] * width + torch.arange(width)).flatten() if places else None
            self._columns[name] = columns

    def allocate(self, num_slots: int, max_len: int) -> None:
        for onlooker in self.onlookers.values():
            onlooker.drafter.allocate(num_slots, max_len)

    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. One that fails is not asked again."""
        parts = request.tokens_N.split(request.counts)
        for b, key in enumerate(zip(request.slots, request.epochs, strict=True)):
            self.texts.setdefault(key, [request.first_tokens[b]]).extend(parts[b].tolist())
        for name, onlooker in self.onlookers.items():
            if onlooker.failure is None:
                try:
                    onlooker.look(request, self._columns[name])
                except Exception as error:  # whatever a drafter does, the others go on
                    onlooker.failure = f"{type(error).__name__}: {error}"
        return empty_reply(len(request.slots))


@dataclass(frozen=True)
class Answer:
    """The target's greedy answer to one prompt, and what each drafter would have drafted along it."""

    text: list[int]  # tokens, further ones behind its end
    end: int  # tokens of the answer itself
    drafted: dict[str, list[Drafted | None]]  # by drafter, after token i; None: it was not asked

    def rounds(self, drafter: str, shape: Shape) -> list[tuple[int, Drafted, tuple[int, int, int]]]:
        """(place, drafts, `Drafted.kept`) of the rounds that the engine would run with drafts of this shape."""
        found, place = [], 0
        while place + 1 < self.end:
            drafted = self.drafted[drafter][place]
            kept = 0
            if drafted is not None:
                outcome = drafted.kept(shape, self.text[place + 1 :])
                found.append((place, drafted, outcome))
                kept = outcome[2]
            place += kept + 1
        return found


def watched_answers(
    engine: Engine,
    onlookers: dict[str, Onlooker],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_answer: Callable[[], None],
) -> list[Answer]:
    """Decode the prompts plainly, all slots busy, while drafters look on. The engine needs room for the longest chain
    behind `max_new_tokens`."""
    watching = Onlookers(onlookers, engine.backend.hidden_size)
    beyond = watching.max_draft_tokens
    engine.set_drafter(watching)
    engine.num_draft_tokens, engine.tree_nodes = beyond, 0
    sampling = Sampling(max_new_tokens=max_new_tokens + beyond, ignore_eos=True)
    index = {engine.add(prompt, sampling, request_id=f"watched-{i}"): i for i, prompt in enumerate(prompts)}
    texts: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for progress in engine.step():
            text = texts[index[progress.request_id]]
            text += progress.token_ids
            if progress.completion:
                on_answer()
            elif len(text) >= answer_end(text, max_new_tokens, engine.eos_token_ids) + beyond:
                engine.cancel(progress.request_id)
    engine.set_drafter(None)
    ends = [answer_end(text, max_new_tokens, engine.eos_token_ids) for text in texts]
    keys = [_key_of([*prompt, *text], watching) for prompt, text in zip(prompts, texts, strict=True)]
    return [
        Answer(text, end, {name: _by_place(o, key, len(prompt), end) for name, o in onlookers.items()})
        for prompt, text, end, key in zip(prompts, texts, ends, keys, strict=True)
    ]


def answer_end(text: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]) -> int:
    """Tokens of an answer, the one that ends it included."""
    stops = (i + 1 for i, token in enumerate(text[:max_new_tokens]) if token in eos_token_ids)
    return next(stops, max_new_tokens)


def _key_of(ids: list[int], watching: Onlookers) -> tuple[int, int] | None:
    """Under which slot and epoch the drafters were told of a text; None: never, as of one of a single token."""
    return next((key for key, told in watching.texts.items() if told == ids[: len(told)]), None)


def _by_place(onlooker: Onlooker, key: tuple[int, int] | None, prompt_len: int, end: int) -> list[Drafted | None]:
    drafted = {} if key is None else onlooker.drafted.get(key, {})
    return [drafted.get(prompt_len + i) for i in range(end)]


def length_figures(answers: Sequence[Answer], drafter: str, shape: Shape) -> LengthFigures:
    """All rounds of one shape."""
    acceptance, offered = Acceptance(), [0] * (shape.drafts + 1)
    for answer in answers:
        for _, _, (drafts, depth, kept) in answer.rounds(drafter, shape):
            acceptance.record(depth, kept, drafts)
            offered[drafts] += 1
    return LengthFigures(
        depth=shape.depth,
        nodes=shape.nodes,
        rounds=acceptance.rounds,
        tau=acceptance.tau,
        acceptance_by_position=acceptance.by_position,
        offered=[count / max(1, acceptance.rounds) for count in offered],
    )


def path_mismatches(answers: Sequence[Answer], drafter: str, chain: Shape, tokenizer: Any) -> tuple[int, float | None]:
    """(rounds in which a draft was refused, the share of them in which only the token boundaries were to blame)."""
    rejections = []
    for answer in answers:
        for place, drafted, (drafts, _, kept) in answer.rounds(drafter, chain):
            if kept < drafts:
                first = place + 1 + kept
                said = tuple(answer.text[first : first + SAID])
                rejections.append(Rejection(drafted=tuple(drafted.chain[kept:drafts]), said=said))
    return len(rejections), share_of_path_mismatches(rejections, token_text(tokenizer))


def first_answers(answers: Sequence[Answer], count: int) -> list[Answer]:
    """`count` of them, from the beginning again where there are fewer."""
    return list(itertools.islice(itertools.cycle(answers), count))
