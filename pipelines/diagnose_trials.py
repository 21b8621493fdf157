"""What is tried with a drafter that accepts little: one thing changed at a time, each the mend of a well-known fault.

In: a drafter, its target's facts. Out: trials. A trial says which features the drafter is shown, what of it is changed
while it drafts, and where in the text its drafts are looked for; `diagnose_measure.py` counts what is accepted then.
Whatever a kind of drafter does not have is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.dflash import DFlashModule
from drafters.drafter_module import DrafterModule
from drafters.target import SharedWeights, Target
from drafters.training_batch import TrainingBatch
from pipelines.diagnose_answers import EMBEDDING, Answer
from pipelines.diagnose_changes import causal_blocks, with_config, with_theta, with_vocabulary
from pipelines.diagnose_fingerprint import import_again, layers_mend
from pipelines.mask_token import mask_candidates

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)  # bases of rotary embeddings in use

Features = Callable[[Answer], Tensor]
Change = Callable[[DrafterModule], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A drafter with one thing changed."""

    cause: str  # the fault that it would mend, one word
    says: str  # that fault in words
    name: str  # the change, as a table shows it
    mend: str
    features: Features | None = None  # None: the layers that the drafter taps
    change: Change = nullcontext  # made to the drafter while it drafts
    shift: int = 0  # its drafts are compared with what stands so many places further on
    displaced: int = 0  # it is told that its anchors stand so many positions further on
    given_away: int = 0  # first drafts that the change itself tells, which do not count


@dataclass(frozen=True)
class Known:
    """What trials need to know of drafter and target."""

    module: DrafterModule
    shared: SharedWeights
    target: Target
    trained_mask: int | None = None  # the mask token of the provenance

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.module.config.target_layer_ids)


def layers_to_tap(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Of the target, ascending: the drafter's layers, and for the trials those beside them."""
    beside = {layer + step for layer in layers for step in (-1, 0, 1)}
    return tuple(sorted(layer for layer in beside if 0 <= layer < num_layers))


def trials_for(known: Known) -> list[Trial]:
    """Everything that makes sense for this kind of drafter."""
    made = [*_label_trials()]
    if known.layers:
        made += [*_layer_trials(known), *_pair_trials(known)]
    if isinstance(known.module, DFlashModule):
        made += [*_mask_trials(known), _causal_trial()]
    if hasattr(known.module, "inverse_frequency"):
        made += [*_rotary_trials(known.module), *_position_trials()]
    return [*made, *_vocabulary_trials(known)]


# -- features ---------------------------------------------------------------------------------------------------------


def _layer_trials(known: Known) -> Iterator[Trial]:
    """All layers or one of them a step lower or higher, another order, and the last layer after the final norm."""
    layers, last = known.layers, known.target.num_layers - 1

    def moved(steps: Sequence[int]) -> tuple[int, ...]:
        # there is nothing below the embedding, nor above the last layer
        return tuple(min(last, max(EMBEDDING, layer + step)) for layer, step in zip(layers, steps, strict=True))

    seen = {layers}
    for step in (-1, 1):
        each = [[step if i == j else 0 for j in range(len(layers))] for i in range(len(layers))]
        for steps in ([step] * len(layers), *each):
            other = moved(steps)
            if other not in seen:
                seen.add(other)
                whole = all(steps)
                yield _layer_trial(known, other, "tapped layers off by one" if whole else "a tapped layer off by one")
    if len(layers) > 1 and (backwards := tuple(reversed(layers))) not in seen:
        yield _layer_trial(known, backwards, "tapped layers in another order")
    if last in layers:
        yield Trial(
            cause="layers",
            says="features of the last layer taken without the final norm",
            name="last layer after the final norm",
            mend="train on the last layer's own output: the engine hands over nothing behind the final norm",
            features=partial(_normed_last, known),
        )


def _layer_trial(known: Known, layers: tuple[int, ...], says: str) -> Trial:
    shown = ", ".join("embedding" if layer == EMBEDDING else str(layer) for layer in layers)
    steps = {other - layer for other, layer in zip(layers, known.layers, strict=True)}
    by = f"layers {steps.pop():+d} ({shown})" if len(steps) == 1 else f"layers {shown}"
    mend = layers_mend(known.module.config, layers)
    if EMBEDDING in layers and not import_again(known.module.config):
        mend = "train it on outputs of decoder layers: the engine does not hand over the embedding"
    return Trial(
        cause="layers",
        says=says,
        name=by,
        mend=mend,
        features=lambda answer: answer.tapped(layers, known.shared),
    )


def _normed_last(known: Known, answer: Answer) -> Tensor:
    width, shared = known.target.width, known.shared
    features = answer.tapped(known.layers).clone()
    for i, layer in enumerate(known.layers):
        if layer == known.target.num_layers - 1:
            part = features[:, i * width : (i + 1) * width]
            normed = F.rms_norm(part.float(), (width,), shared.final_norm_D.float().cpu(), shared.rms_eps)
            features[:, i * width : (i + 1) * width] = normed.to(features.dtype)
    return features


def _pair_trials(known: Known) -> Iterator[Trial]:
    """Features of the place before, or of the anchor itself, in place of those before the anchor.

    The anchor's own features tell the next token to the target's LM head: any drafter close to that would be right.
    """
    for step, where, given_away in ((-1, "one place earlier", 0), (1, "one place later, first draft not counted", 1)):
        yield Trial(
            cause="alignment",
            says="features and tokens were paired one place apart (anchor layout)",
            name=f"features of {where}",
            mend="train it anew on pairs of the features at p with the token at p + 1",
            features=partial(_along_text, known.layers, step),
            given_away=given_away,
        )


def _along_text(layers: Sequence[int], step: int, answer: Answer) -> Tensor:
    """Row t becomes that of t + step; the ends repeat."""
    features_TF = answer.tapped(layers)
    place_T = torch.arange(len(features_TF)) + step
    return features_TF[place_T.clamp(0, len(features_TF) - 1)]


# -- where the drafts belong ------------------------------------------------------------------------------------------


def _label_trials() -> Iterator[Trial]:
    for shift, where in ((1, "one place further on"), (-1, "one place before, at the anchor")):
        yield Trial(
            cause="alignment",
            says="labels were shifted by one place in its training",
            name=f"drafts match {where}",
            mend="train it anew: step k predicts the token at p + 1 + k, where p + 1 is the anchor",
            shift=shift,
        )


def _position_trials() -> Iterator[Trial]:
    for step in (-1, 1):
        yield Trial(
            cause="positions",
            says="positions of drafts and context are off by one against its training",
            name=f"draft positions {step:+d}",
            mend="train it anew: the anchor stands at p + 1, its first draft at p + 2, absolute positions",
            displaced=step,
        )


def displaced_batch(batch: TrainingBatch, step: int) -> TrainingBatch:
    """The batch with anchors that say they stand `step` positions further on than they do."""
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return _DisplacedBatch(**fields, step=step)


@dataclass(frozen=True, kw_only=True)
class _DisplacedBatch(TrainingBatch):
    step: int

    def anchor_positions(self) -> Tensor:
        return super().anchor_positions() + self.step


# -- the drafter itself -----------------------------------------------------------------------------------------------


def _mask_trials(known: Known) -> Iterator[Trial]:
    """The token of the provenance, and those that other programs fall back to."""
    assert isinstance(known.module, DFlashModule)
    config, tokenizer = known.module.config, known.target.tokenizer
    named = [
        ("of the provenance", known.trained_mask),
        *((name, getattr(tokenizer, f"{name}_token_id", None)) for name in ("mask", "pad", "eos", "bos", "unk")),
        *(("by the trainer's rule", token) for token in mask_candidates(known.target, config.vocab_size)[:2]),
        ("the last id", config.vocab_size - 1),
        ("id 0", 0),
    ]
    seen = {config.mask_token_id}
    for name, token in named:
        if token is not None and token not in seen and 0 <= token < config.vocab_size:
            seen.add(token)
            yield Trial(
                cause="mask",
                says="the mask token is not the one of its training",
                name=f"mask token {token} ({name})",
                mend=f"set mask_token_id to {token} in config.json",
                change=partial(with_config, mask_token_id=int(token)),
            )


def _causal_trial() -> Trial:
    return Trial(
        cause="attention",
        says="it was trained with causal attention inside the block",
        name="causal inside the block",
        mend="train it anew with attention both ways inside the block, as it is served",
        change=causal_blocks,
    )


def _rotary_trials(module: DrafterModule) -> Iterator[Trial]:
    own = getattr(module.config, "rope_theta", None)
    for theta in THETAS:
        if own is not None and theta != own:
            yield Trial(
                cause="positions",
                says="rope_theta is not that of its training",
                name=f"rope_theta {theta:g}",
                mend=f"set rope_theta to {theta:g} in config.json",
                change=partial(with_theta, theta=theta),
            )


def _vocabulary_trials(known: Known) -> Iterator[Trial]:
    """Draft vocabularies that were stored as distances from their index (d2t), or one id aside."""
    ids_W = known.module.draft_vocab_ids.cpu()
    vocab_size = known.module.config.vocab_size
    index_W = torch.arange(len(ids_W))
    if len(ids_W) == vocab_size:
        return
    seen = {tuple(ids_W.tolist())}
    for name, other_W in (
        ("ids that are distances from their index", ids_W + index_W),
        ("ids without their index", ids_W - index_W),
        ("ids + 1", ids_W + 1),
        ("ids - 1", ids_W - 1),
    ):
        whole = int(other_W.min()) >= 0 and int(other_W.max()) < vocab_size and bool((other_W.diff() > 0).all())
        if whole and tuple(other_W.tolist()) not in seen:
            seen.add(tuple(other_W.tolist()))
            yield Trial(
                cause="vocabulary",
                says="the draft vocabulary's token ids are off",
                name=name,
                mend="write draft_vocab_ids anew: ascending token ids of the target (index + d2t, of offsets)",
                change=partial(with_vocabulary, shared=known.shared, ids_W=other_W),
            )
