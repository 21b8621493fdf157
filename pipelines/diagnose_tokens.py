"""A drafter's tokens against those that its target says: vocabulary, mask, token paths, and kinds of text.

In: the target's answers, the drafter's proposals on them, what its training expected. Out: checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drafters.acceptance import Acceptance
from drafters.dflash import DFlashModule
from drafters.drafter_module import DrafterModule
from drafters.target import Target
from pipelines.diagnose_answers import Answer
from pipelines.diagnose_measure import Measuring
from pipelines.diagnose_report import SUSPECTED, Check
from pipelines.token_paths import is_path_mismatch, retokenised, share_of_path_mismatches, token_text

LEAST_COVERAGE = 0.8  # of the target's tokens: below that every fifth round ends at a token that cannot be drafted
COVERAGE_FALL = 0.15  # against the training's own text
MANY_MISMATCHES = 0.25  # of the refused drafts
LEAST_REJECTIONS = 20  # that say anything
LEAST_RETOKENISED = 5
NORM_RANGE = (0.2, 5.0)  # of an embedding, as a multiple of the median: outside of it a token is out of the ordinary
LITTLE_BY_KIND = 0.5  # drafts accepted of one kind of text, as a share of those of the best one
LEAST_ROUNDS = 30  # of one kind of text


def vocabulary_check(module: DrafterModule, answers: Sequence[Answer], provenance: Mapping[str, Any]) -> Check:
    """Which share of the target's own tokens can be drafted at all."""
    ids_W = module.draft_vocab_ids.cpu()
    vocab_size, size = module.config.vocab_size, len(ids_W)
    if size == vocab_size:
        return Check(name="vocabulary", grade="ok", evidence=f"all {size:,} tokens of the target can be drafted")
    drafted_V = torch.zeros(vocab_size, dtype=torch.bool)
    drafted_V[ids_W] = True
    said = torch.cat([answer.ids_T[answer.prompt_len :] for answer in answers])
    coverage, trained = float(drafted_V[said].float().mean()), provenance.get("draft_vocab_coverage")
    before = f" ({trained:.1%} in its training)" if isinstance(trained, float) else ""
    evidence = f"{size:,} of {vocab_size:,} tokens, which are {coverage:.1%} of what the target says here{before}"
    expected = trained if isinstance(trained, float) else 1.0
    if coverage >= LEAST_COVERAGE or expected - coverage < COVERAGE_FALL:
        return Check(name="vocabulary", grade="ok", evidence=evidence)
    other_text = trained_kinds(provenance) and not set(_kinds(answers)) <= set(trained_kinds(provenance))
    return Check(
        name="vocabulary",
        grade="note" if other_text else "fault",  # other text has other words; on its own text it should have them
        evidence=evidence,
        cause="vocabulary",
        says="most of what the target says cannot be drafted: its token ids are off, or it learned from other text",
        mend="check that its d2t became token ids of this target, or train it on text like these prompts",
        rank=SUSPECTED + expected - coverage,
    )


def trained_kinds(provenance: Mapping[str, Any]) -> list[str]:
    """The categories of the text that it was trained on, as far as they are known."""
    curve = provenance.get("training_curve") or [{}]
    return sorted(filter(None, curve[-1].get("tau_by_category") or {}))


def _kinds(answers: Sequence[Answer]) -> list[str]:
    return sorted({answer.category for answer in answers} - {""})


def mask_check(module: DrafterModule, target: Target, answers: Sequence[Answer], trained: int | None) -> Check | None:
    """Whether DFlash's mask is a token of its own; None for drafters without one."""
    if not isinstance(module, DFlashModule):
        return None
    mask, tokenizer = module.config.mask_token_id, target.tokenizer
    names = [name for name in ("pad", "eos", "bos", "unk") if getattr(tokenizer, f"{name}_token_id", None) == mask]
    odd = []
    if names:
        odd.append(f"it is the {' and '.join(names)} token")
    elif mask in target.eos_token_ids:
        odd.append("it ends a turn")
    count = sum(int((answer.ids_T == mask).sum()) for answer in answers)
    if count and not names:
        odd.append(f"it occurs {count} times in these prompts and answers")
    norms_V = module.embedding_VD.float().norm(dim=1).cpu()
    times = float(norms_V[mask] / norms_V.median().clamp(min=1e-12))
    if not NORM_RANGE[0] <= times <= NORM_RANGE[1]:
        odd.append(f"its embedding is {times:.2g} times as long as a usual one")
    shown = tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else None
    evidence = f"{mask} ({shown or 'a row past the tokenizer'})" + "".join(f"; {text}" for text in odd)
    if not odd or trained == mask:  # what it was trained with it may have, however odd
        return Check(name="mask token", grade="ok", evidence=evidence)
    return Check(name="mask token", grade="note", evidence=evidence)


def path_checks(measuring: Measuring, target: Target, only_first: bool) -> tuple[list[Check], float | None]:
    """Refused drafts that spell the target's text in other tokens, and their share."""
    rejections, decode = measuring.rejections(only_first), token_text(target.tokenizer)
    share = share_of_path_mismatches(rejections, decode)
    if share is None:
        return [], None
    mismatched = [rejection for rejection in rejections if is_path_mismatch(rejection, decode)]
    anew, elsewhere = retokenised(mismatched, target.tokenizer)
    evidence = f"{share:.1%} of {len(rejections)} refused drafts spell what the target said, in other tokens"
    if mismatched:
        example = mismatched[0]
        spelt = ("+".join(repr(decode([token])) for token in tokens[:3]) for tokens in (example.drafted, example.said))
        evidence += " ({} against {})".format(*spelt)
    tokenised_anew = elsewhere >= LEAST_RETOKENISED and anew > elsewhere / 2
    if tokenised_anew:
        evidence += f"; {anew} are the tokens that the tokenizer itself makes of that text"
    if len(rejections) < LEAST_REJECTIONS or share < MANY_MISMATCHES:
        return [Check(name="token paths", grade="ok", evidence=evidence)], share
    text = "text that was tokenised anew" if tokenised_anew else "text that was tokenised anew, or by another tokenizer"
    fault = Check(
        name="token paths",
        grade="fault",
        evidence=evidence,
        cause="token paths",
        says=f"it was trained on {text}",
        mend="train it on the target's own token ids, as `draftloop generate` writes them",
        rank=SUSPECTED + 5 + share,
    )
    return [fault], share


def position_check(acceptance: Acceptance) -> Check:
    """Acceptance by draft position."""
    shares = "  ".join(f"{share:.2f}" for share in acceptance.by_position)
    return Check(name="by position", grade="ok", evidence=f"{shares} of {acceptance.rounds} rounds")


def category_check(measuring: Measuring) -> tuple[Check | None, dict[str, float]]:
    """tau of every kind of text; a note where some kind is far behind the best one."""
    groups: dict[str, list[Answer]] = {}
    for answer in measuring.answers:
        groups.setdefault(answer.category, []).append(answer)
    found = {category: measuring.acceptance(answers) for category, answers in groups.items()}
    taus = {category: a.tau for category, a in found.items() if a.tau is not None}
    if len(taus) < 2:
        return None, taus
    enough = {category: tau for category, tau in taus.items() if found[category].rounds >= LEAST_ROUNDS}
    best = max(enough.values(), default=1.0)
    behind = [category for category, tau in enough.items() if tau - 1 < LITTLE_BY_KIND * (best - 1)]
    evidence = "  ".join(f"{category or '(none)'} {tau:.2f}" for category, tau in sorted(taus.items()))
    if behind:
        evidence += f"; far behind: {', '.join(category or '(none)' for category in sorted(behind))}"
    return Check(name="by category", grade="note" if behind else "ok", evidence=evidence), taus
