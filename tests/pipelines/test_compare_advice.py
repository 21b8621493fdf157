"""The advice of a comparison, from figures that are made up: what is chosen, why, and when it cannot be told."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from pipelines.compare_advice import advise, margin_of
from pipelines.compare_figures import (
    BatchTimes,
    DrafterTimes,
    LengthFigures,
    PairFigures,
    ShapeTimes,
    SpeedFigures,
)

STEADY = (0.98, 1.0, 1.02, 1.0)  # spread of the ratios of four groups
MTP_TAUS, FLASH_TAUS = (1.6, 1.9, 2.0, 2.0), (1.6, 2.2, 2.7, 3.1)  # by chain length


def pair(
    name: str,
    speed: float,
    taus=MTP_TAUS,
    drafts: int = 2,
    prompt_set: str = "maths",
    spread=STEADY,
    large: float = 0.9,
) -> PairFigures:
    """A drafter with chains of up to 4, timed at batch 1 with S `speed` and at batch 8 with S `large`."""
    lengths = [
        LengthFigures(
            depth=k, nodes=0, rounds=100, tau=tau, acceptance_by_position=[0.5] * k, offered=[0.0] * k + [1.0],
            s_predicted=[1.0, 1.0],
        )
        for k, tau in enumerate(taus, start=1)
    ]  # fmt: skip
    speeds = [
        SpeedFigures(
            batch=batch, depth=drafts, nodes=0, prompts=4, tau=2.0, tau_counted=2.0, s_measured=s,
            ratios=[s * factor for factor in spread], tokens_per_s=s * 50, tokens_per_s_plain=50.0, t_base_s=0.02,
            t_draft_s=0.002, t_verify_s=0.02, equal=4,
        )
        for batch, s in ((1, speed), (8, large))
    ]  # fmt: skip
    return PairFigures(
        drafter=name, prompt_set=prompt_set, prompts=40, lengths=lengths, rejections=1, path_mismatch_share=0.0,
        speeds=speeds,
    )  # fmt: skip


def times(name: str, draft_ms=(2.0, 4.0, 6.0, 8.0), verify_ms=(20.0, 22.0, 25.0, 30.0)) -> DrafterTimes:
    shapes = [
        ShapeTimes(depth=k, nodes=0, t_draft_s=draft / 1e3, t_verify_s=verify / 1e3)
        for k, (draft, verify) in enumerate(zip(draft_ms, verify_ms, strict=True), start=1)
    ]
    return DrafterTimes(drafter=name, batches=[BatchTimes(batch=b, t_base_s=0.02, shapes=shapes) for b in (1, 8)])


def advice(*contenders: tuple[list[PairFigures] | PairFigures, DrafterTimes], served=("mtp", "flash")):
    pairs = [p for one, _ in contenders for p in (one if isinstance(one, list) else [one])]
    return advise(pairs, [t for _, t in contenders], (1, 8), served)


def test_short_blocks_where_length_costs():
    found = advice((pair("mtp", 1.5), times("mtp")), (pair("flash", 1.2, FLASH_TAUS, 4), times("flash")))
    assert (found.drafter, found.serve, found.shape, found.runner_up) == ("mtp", "mtp", "chain of 2", "flash")
    assert "choose mtp with a chain of 2: S 1.50 at batch 1" in found.line
    assert "1.90 tokens in the time of 1.30 plain steps" in found.line
    assert "T_verify grows by 50% and T_draft by 300%; tau 1.90 at 2, 2.00 at 4): short pays" in found.line
    assert "faster than flash (S 1.20; +25%, +25% to +25%)" in found.line
    assert found.told_apart
    assert found.others == ["at batch 8 decode plainly: the best drafter, mtp, has S 0.90"]


def test_long_blocks_where_there_is_compute_to_spare():
    flat = times("flash", draft_ms=(3.0, 3.0, 3.1, 3.1), verify_ms=(20.0, 20.2, 20.4, 21.0))
    found = advice((pair("mtp", 1.5), times("mtp")), (pair("flash", 2.1, FLASH_TAUS, 4, large=1.3), flat))
    assert found.drafter == "flash"
    assert "compute to spare (from 1 to 4 drafts T_verify grows by 5% and T_draft by 3%)" in found.line
    assert "tau still rises (2.20 at 2 drafts, 3.10 at 4): long blocks pay" in found.line
    assert found.others == []


def test_the_winner_follows_from_the_figures_and_not_from_its_name():
    swapped = advice((pair("flash", 1.5), times("flash")), (pair("mtp", 1.2, FLASH_TAUS, 4), times("mtp")))
    assert swapped.drafter == "flash"
    assert "short pays" in swapped.line


def test_none_where_no_speed_is_above_plain_decoding():
    found = advice((pair("mtp", 0.9), times("mtp")), (pair("flash", 0.8, large=1.2), times("flash")))
    assert (found.drafter, found.serve) == (None, None)
    assert found.line.startswith("serve without a drafter: none makes decoding faster here (the best is mtp, S 0.90")
    assert found.told_apart, "it is surely slower"
    assert found.others == ["at batch 8 flash is the fastest (S 1.20)"]


def test_a_gain_within_the_noise_is_no_gain():
    noisy = pair("mtp", 1.05, spread=(0.7, 0.9, 1.1, 1.4))
    found = advice((noisy, times("mtp")))
    assert found.drafter is None
    assert "cannot be told apart from plain decoding" in found.line
    assert not found.told_apart
    few = advice((pair("mtp", 1.5, spread=(1.0, 1.0)), times("mtp")))
    assert "too few timed prompts to know the noise" in few.line


def test_two_that_cannot_be_told_apart():
    uneven = pair("flash", 1.5, spread=(0.8, 1.2, 0.8, 1.2))
    found = advice((pair("mtp", 1.52), times("mtp")), (uneven, times("flash")))
    assert found.drafter == "mtp"
    assert not found.told_apart
    assert "it cannot be told apart from flash" in found.line
    assert found.margin[1] < 0 < found.margin[2]


def test_prompt_lookup_where_it_wins_and_what_serve_takes_instead():
    free = times("prompt lookup", draft_ms=(0.1, 0.1, 0.1, 0.1))
    found = advice((pair("prompt lookup", 2.4), free), (pair("mtp", 1.5), times("mtp")))
    assert (found.drafter, found.serve) == ("prompt lookup", "mtp")
    assert "drafting costs next to nothing (0.1 ms)" in found.line
    assert found.others[0].endswith("it takes mtp (S 1.50)")
    alone = advice((pair("prompt lookup", 2.4), free), (pair("mtp", 0.7), times("mtp")))
    assert alone.serve is None
    assert alone.others[0].endswith("it takes no other drafter")


def test_a_set_where_it_is_otherwise_is_named():
    free = times("prompt lookup", draft_ms=(0.1, 0.1, 0.1, 0.1))
    lookup = [pair("prompt lookup", 1.1), pair("prompt lookup", 1.9, prompt_set="russian")]
    mtp = [pair("mtp", 2.4), pair("mtp", 1.2, prompt_set="russian")]
    found = advice((mtp, times("mtp")), (lookup, free))
    assert found.drafter == "mtp"
    assert "on russian prompt lookup is faster (S 1.90 against 1.20)" in found.others


def test_a_sure_gain_is_chosen_before_a_larger_one_that_is_noise():
    wild = pair("flash", 1.8, spread=(0.3, 1.0, 1.0, 3.3))
    found = advice((pair("mtp", 1.5), times("mtp")), (wild, times("flash")))
    assert found.drafter == "mtp"
    assert "it cannot be told apart from flash (S 1.80; -16%" in found.line


def test_sets_that_differ_are_no_noise():
    pairs = [pair("mtp", 1.1), pair("mtp", 2.8, drafts=4, prompt_set="russian")]
    found = advice((pairs, times("mtp")))
    assert found.drafter == "mtp"
    assert found.speed == pytest.approx((1.1 * 2.8) ** 0.5, rel=0.01)
    assert "choose mtp with a chain of 2 on maths and a chain of 4 on russian: S 1.75" in found.line


def test_a_set_without_rounds_is_left_out_of_means():
    none = [replace(one, rounds=0, tau=None, offered=[0.0] * (one.depth + 1)) for one in pair("mtp", 1.5).lengths]
    short = replace(pair("mtp", 1.5, prompt_set="short"), lengths=none)
    found = advice(([pair("mtp", 1.5), short], times("mtp")))
    assert "1.90 tokens in the time of 1.30 plain steps" in found.line
    assert "tau 1.90 at 2, 2.00 at 4" in found.line
    assert "a round brings - tokens" in advice((short, times("mtp"))).line


def test_the_interval_is_students():
    """Quantiles of t at 97.5%: 4.303, 3.182 and 2.069 with 2, 3 and 23 degrees of freedom."""
    for number, t in ((3, 4.303), (4, 3.182), (24, 2.069)):
        logs = [0.1 + i * 0.01 for i in range(number)]
        mean, half = statistics.fmean(logs), t * statistics.stdev(logs) / number**0.5
        assert math.log1p(margin_of([logs]).high) == pytest.approx(mean + half, rel=0.02)
    two = margin_of([[0.1, 0.2, 0.3, 0.4], [1.1, 1.2, 1.3, 1.4]])
    half = 2.447 * (2 * statistics.variance([0.1, 0.2, 0.3, 0.4]) / 4) ** 0.5 / 2  # 6 degrees of freedom
    assert math.log1p(two.low) == pytest.approx(0.75 - half, rel=0.01)
