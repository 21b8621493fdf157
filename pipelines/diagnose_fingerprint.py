"""Which part of a target's fingerprint a drafter does not fit: layers, chat template, tokenizer, config or weights.

The provenance holds the whole hash, of newer drafters also one for each part. Where it does not, parts are tried: other
tapped layers, and the chat template that the provenance names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drafters.drafter_module import DrafterConfig
from drafters.gemma_assistant import GemmaAssistantConfig
from drafters.own_mtp_module import OwnMtpConfig
from drafters.target import (
    Target,
    dflash_target_layer_ids,
    fingerprint_of,
    fingerprinted,
    mtp_target_layer_ids,
    part_digests,
)
from pipelines.diagnose_report import RECORDED, Check

Layers = tuple[int, ...]
FINGERPRINT = "fingerprint"
OTHER_TARGET_MEND = "give it its own target, or train a drafter for this one"
WORDS = {"chat_template": "chat template"}


def fingerprint_check(config: DrafterConfig, provenance: Mapping[str, Any], target: Target) -> Check:
    """Whether it was made for this target, and what differs if it was not."""
    recorded = provenance.get("target_fingerprint")
    layers = tuple(config.target_layer_ids)
    parts = fingerprinted(target.path)
    if recorded is None:
        return Check(name=FINGERPRINT, grade="note", evidence="the provenance names no target")
    if fingerprint_of(parts, layers) == recorded:
        return Check(name=FINGERPRINT, grade="ok", evidence="made for this target and these layers")
    template = _trained_template(provenance)
    for candidate in (layers, *layer_candidates(layers, target.num_layers)):
        if fingerprint_of(parts, candidate) == recorded:
            return _other_layers(config, candidate)
        if template and fingerprint_of(parts | {"chat_template": template}, candidate) == recorded:
            return _other_part("its target had another chat template", "chat template", cause="template")
    return _other_part(*_explained(provenance, target, template is not None and template == parts["chat_template"]))


def layer_candidates(layers: Layers, num_layers: int) -> Iterator[Layers]:
    """Layers that may have been meant: all or one of them off by one, another order, the rules of both kinds."""
    for step in (-1, 1):
        yield tuple(layer + step for layer in layers)
        for i in range(len(layers)):
            yield (*layers[:i], layers[i] + step, *layers[i + 1 :])
    yield tuple(sorted(layers))
    yield tuple(reversed(layers))
    yield mtp_target_layer_ids(num_layers, len(layers))
    yield dflash_target_layer_ids(num_layers, len(layers))


def _trained_template(provenance: Mapping[str, Any]) -> str | None:
    """The hash of the target's own template, as far as the training used that."""
    options = provenance.get("chat_options")
    own = not isinstance(options, Mapping) or options.get("template") is None
    found = provenance.get("chat_template_hash")
    return found if own and isinstance(found, str) else None


def layers_mend(config: DrafterConfig, layers: Sequence[int]) -> str:
    """How the drafter is made to read these layers."""
    shown = f"set target_layer_ids to {list(layers)} in config.json (0: the first decoder layer's output)"
    return import_again(config) or shown


def import_again(config: DrafterConfig) -> str | None:
    """The mend for kinds that targets come with, whose layers follow from the target; None for others."""
    own = isinstance(config, OwnMtpConfig | GemmaAssistantConfig)
    return "import it again for its own target with `draftloop import`" if own else None


def _other_layers(config: DrafterConfig, trained: Layers) -> Check:
    layers = tuple(config.target_layer_ids)
    steps = {before - now for now, before in zip(layers, trained, strict=True)}
    off = f"off by {'one' if steps <= {0, 1} or steps <= {-1, 0} else 'more than one'}"
    return Check(
        name=FINGERPRINT,
        grade="fault",
        evidence=f"the target's fingerprint fits with layers {list(trained)}, config.json has {list(layers)}",
        cause="layers",
        says=f"tapped layers {off}",
        mend=layers_mend(config, trained),
        rank=RECORDED + 3,
    )


def _explained(provenance: Mapping[str, Any], target: Target, same_template: bool) -> tuple[str, str]:
    """(what differs in words, its parts) by the hashes of the parts, or what is left to differ."""
    recorded = provenance.get("target_parts")
    if isinstance(recorded, Mapping):
        now = part_digests(target.path)
        differing = [WORDS.get(name, name) for name, digest in now.items() if recorded.get(name) != digest]
        if differing:
            return "it was made for another target", ", ".join(differing)
        return "tapped layers other than those it was trained with", "the tapped layers: all else is the same"
    left = ["config", "tokenizer", "weights", *([] if same_template else ["chat template"]), "tapped layers"]
    return "it was made for another target", f"one of {', '.join(left)}, which its provenance does not tell apart"


def _other_part(says: str, part: str, cause: str = "fingerprint") -> Check:
    return Check(
        name=FINGERPRINT,
        grade="fault",
        evidence=f"made for another target; what differs: {part}",
        cause=cause,
        says=says,
        mend=OTHER_TARGET_MEND,
        rank=RECORDED + 1,
    )
