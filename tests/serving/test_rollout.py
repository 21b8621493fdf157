"""Roll-outs without Ray: replicas of a simulated service report, the machine orders, the registry is a list."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from drafters.registry import Change
from serving.live_tau import LiveTau, Tally, fall
from serving.rollout import Rollout
from serving.rollout_reports import NOTHING, Condemned, Order, Report, Taken
from serving.serve_config import RegistryFollowing

CONFIG = RegistryFollowing(
    uri="none", poll_s=5, observe_s=60, min_rounds=500, max_observe_s=600, tolerance=0.1, report_s=300
)


def tally(rounds: int, tau: float, plain: int = 0) -> Tally:
    """Rounds that accept 0 or 3 drafts."""
    full = round(rounds * (tau - 1) / 3)
    return Tally(rounds=rounds, accepted=3 * full, squares=9 * full, emitted=rounds + 3 * full + plain, first=full)


class Pointer:
    """The registry's champion and its history."""

    def __init__(self, version: str | None = "old"):
        self.history: list[Change] = []
        self.away = False
        if version:
            self.change("promote", version)

    @property
    def champion(self) -> Change | None:
        return self.history[-1] if self.history else None

    def change(self, action, version: str | None) -> Change:
        previous = self.champion.version if self.champion else None
        change = Change(
            number=len(self.history) + 1, action=action, version=version, previous=previous,
            by="somebody", at=datetime.now(UTC), why="because",
        )  # fmt: skip
        self.history.append(change)
        return change

    def tell(self, rollout: Rollout) -> None:
        """What the guard's thread does."""
        condemned = rollout.pending
        if condemned is None or self.away:
            return
        lost = self.champion.number != condemned.change.number
        rollout.rolled_back(condemned, None if lost else self.change("rollback", condemned.back_to.version))


class Replica:
    """Decodes so many rounds a second, with the acceptance of what it serves; does as it is told."""

    def __init__(self, fleet: Fleet, name: str):
        self.fleet, self.name = fleet, name
        self.serves = self.before = self.settled = None
        self.condemned: dict[int, Condemned] = {}
        self.refuses: set[str] = set()
        self.counted: dict[str | None, Tally] = {}
        self.tau = LiveTau(CONFIG.max_observe_s)
        self.next_at = fleet.now
        self.lacks: set[str] = set()  # versions that tap layers which its engine does not
        self.untapped: int | None = None
        self.restart = False
        self.takes_at: float | None = None  # when a swap that it was told of is done
        self.taking: Taken | None = None

    def second(self) -> None:
        fleet = self.fleet
        if self.serves is not None:
            version = self.serves.version
            more = tally(fleet.rounds_per_s, fleet.taus.get(version, 1.0)) if version else Tally(emitted=10)
            if version in fleet.seldom:
                more = Tally(rounds=1, emitted=fleet.rounds_per_s)
            elif version and fleet.drafted_per_s is not None:
                drafted, plain = fleet.drafted_per_s, fleet.rounds_per_s - fleet.drafted_per_s
                more = tally(drafted, fleet.taus[version], plain)
            self.counted[version] = self.counted.get(version, Tally()) + more
        if self.taking is not None and fleet.now >= self.takes_at:
            self._swap(self.taking)
            self.taking = None
        if self.taking is None and fleet.now >= self.next_at:
            self._ask()

    def _ask(self) -> None:
        fleet = self.fleet
        fleet.asked += 1
        if self.serves is not None:
            self.tau.note(fleet.now, self.counted.get(self.serves.version, Tally()))
        refused = {c.number for c in fleet.pointer.history if c.version in self.refuses}
        order = fleet.rollout.report(
            Report(
                replica=self.name, champion=fleet.pointer.champion, serves=self.serves,
                served_s=self.tau.served_s(fleet.now), now=self.tau.now, before=self.before,
                before_tally=self.tau.before, settled=self.settled, refused=frozenset(refused),
                condemned=self.condemned, untapped=self.untapped,
            ),
            fleet.now,
        )  # fmt: skip
        self.condemned, self.settled = dict(order.condemned), order.settled
        self.restart = order.restart
        self.next_at = fleet.now + (order.ask_again_s or CONFIG.poll_s)
        self._obey(order)

    def _obey(self, order: Order) -> None:
        take = order.take
        if take is None or take == self.serves or take.version in self.refuses:
            return
        if take.version in self.lacks:
            self.untapped = take.number
            return
        if self.serves is None or take.version == self.serves.version:
            self._swap(take)
        else:
            self.taking, self.takes_at = take, self.fleet.now + 2  # loading

    def _swap(self, taken: Taken) -> None:
        old, self.serves = self.serves, taken
        if old is not None and old.version == taken.version:
            return
        unproved = old is not None and self.settled is not None and old.number > self.settled.number
        self.tau.took_over(self.fleet.now, self.counted.get(taken.version, Tally()), keep_before=unproved)
        self.before = self.before if unproved else old
        self.fleet.swaps.append((self.fleet.now, self.name, taken.version))


class Fleet:
    """A service with its guard, second by second."""

    def __init__(self, count: int, pointer: Pointer | None = None, settle_s: int = 30):
        self.pointer = pointer or Pointer()
        self.now = 0.0
        self.taus: dict[str | None, float] = {"old": 1.9}
        self.rounds_per_s = 40
        self.asked = 0  # questions to the guard so far
        self.seldom: set[str] = set()
        self.drafted_per_s: int | None = None  # of the rounds, whatever is served; None: all
        self.swaps: list[tuple[float, str, str | None]] = []
        self.rollout = Rollout(CONFIG, self.now)
        self.replicas: dict[str, Replica] = {}
        for _ in range(count):
            self.join()
        self.run(settle_s)

    def join(self) -> Replica:
        replica = Replica(self, f"r{len(self.replicas)}-{self.now:g}")
        self.replicas[replica.name] = replica
        return replica

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            for replica in list(self.replicas.values()):
                replica.second()
            self.pointer.tell(self.rollout)

    def until(self, condition, limit_s: int = 1000) -> None:
        began = self.now
        while not condition():
            assert self.now - began < limit_s, self.rollout._says()
            self.run(1)

    def promote(self, version: str, tau: float) -> Change:
        self.taus[version] = tau
        return self.pointer.change("promote", version)

    @property
    def served(self) -> list[str | None]:
        return [replica.serves.version for replica in self.replicas.values()]

    def having(self, version: str) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.serves and replica.serves.version == version]

    def new_guard(self) -> None:
        self.rollout = Rollout(CONFIG, self.now)

    @property
    def actions(self) -> list[tuple[str, str | None]]:
        return [(change.action, change.version) for change in self.pointer.history]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_good_version_is_taken_by_one_then_by_one_after_another(count):
    fleet = Fleet(count)
    fleet.promote("new", 2.0)
    fleet.until(lambda: fleet.having("new"))
    began = fleet.now
    for _ in range(int(CONFIG.observe_s) - 5):
        fleet.run(1)
        assert len(fleet.having("new")) == 1
    fleet.until(lambda: len(fleet.having("new")) == count)
    assert len({at for at, _, version in fleet.swaps if version == "new"}) == count
    fleet.until(lambda: fleet.rollout._says() == "steady")
    assert fleet.now - began >= 2 * CONFIG.observe_s
    assert fleet.actions == [("promote", "old"), ("promote", "new")]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_bad_version_is_taken_by_one_and_goes_back_by_itself(count):
    fleet = Fleet(count)
    change = fleet.promote("bad", 1.3)
    fleet.until(lambda: fleet.having("bad"))
    fleet.until(lambda: fleet.rollout.condemned)
    assert fleet.rounds_per_s * 30 > CONFIG.min_rounds, "well before the window is over"
    fleet.run(5)
    assert [version for _, _, version in fleet.swaps if version == "bad"] == ["bad"]
    assert fleet.served == ["old"] * count
    condemned = fleet.rollout.condemned[change.number]
    where = "before" if count == 1 else "before and 1.90 on other replicas"
    assert condemned.why.startswith(f"live tau 1.30 against 1.90 {where}, ")
    assert (condemned.reason, condemned.back_to) == ("tau", Taken(number=1, version="old"))
    assert fleet.actions == [("promote", "old"), ("promote", "bad"), ("rollback", "old")]
    fleet.run(1000)
    assert fleet.served == ["old"] * count
    assert fleet.swaps[-1][2] == "old"
    assert fleet.rollout._says() == "steady"
    fleet.promote("bad", 2.0)  # anew, by a later change: it has another chance
    fleet.until(lambda: fleet.served == ["bad"] * count)


def test_a_bad_version_of_which_little_is_seen_stays_with_one_replica_for_a_bounded_time():
    fleet = Fleet(2)
    fleet.rounds_per_s = 0
    fleet.promote("new", 1.3)
    fleet.until(lambda: fleet.having("new"))
    fleet.run(int(CONFIG.max_observe_s) - 10)
    assert len(fleet.having("new")) == 1
    fleet.run(20)
    assert fleet.served == ["new", "new"]
    fleet.rounds_per_s = 40  # within the window that follows, it is still caught
    fleet.run(60)
    assert fleet.served == ["old", "old"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_drafter_that_the_engine_switches_off_is_no_lack_of_traffic(count):
    fleet = Fleet(count)
    fleet.seldom.add("new")
    fleet.promote("new", 1.0)
    fleet.until(lambda: fleet.rollout.condemned)
    assert "tokens per round (it hardly drafts) 1.00 against 1.90" in fleet.rollout.condemned[2].why
    assert fleet.having("old") or count == 1
    fleet.run(10)
    assert fleet.served == ["old"] * count


@pytest.mark.parametrize("drafted", [0, 3])
def test_a_load_that_switches_drafting_off_is_not_blamed_on_the_new_version(drafted):
    """Of one replica, that was quiet before: nobody else tells what the load does."""
    fleet = Fleet(1)
    fleet.run(100)
    fleet.drafted_per_s = drafted
    fleet.promote("new", 1.9)
    fleet.until(lambda: fleet.having("new"))
    fleet.run(int(CONFIG.observe_s) + 60)
    assert "goes on to all" not in "".join(fleet.rollout.news), "with so little it waits"
    fleet.until(lambda: fleet.rollout._says() == "steady")
    assert fleet.served == ["new"]
    fleet.drafted_per_s = None
    fleet.run(int(CONFIG.max_observe_s))
    fleet.drafted_per_s = drafted
    fleet.promote("bad", 1.0)
    fleet.until(lambda: fleet.served == ["bad"])
    fleet.until(lambda: fleet.rollout._says() == "steady")
    fleet.run(5)
    assert fleet.served == (["new"] if drafted else ["bad"]), "a few drafts tell, none do not"


def test_harder_traffic_is_not_blamed_on_the_new_version():
    fleet = Fleet(2)
    fleet.run(100)
    fleet.promote("new", 1.45)
    fleet.taus["old"] = 1.4  # for everybody, from now on
    fleet.until(lambda: fleet.served == ["new", "new"])
    fleet.until(lambda: fleet.rollout._says() == "steady")
    assert not fleet.rollout.condemned


def test_a_fall_that_shows_after_the_first_window_counts_as_well():
    fleet = Fleet(3)
    fleet.promote("new", 2.0)
    fleet.until(lambda: fleet.served == ["new"] * 3)
    fleet.taus["new"] = 1.0
    fleet.run(int(CONFIG.observe_s))
    assert fleet.served == ["old"] * 3
    assert fleet.actions[-1] == ("rollback", "old")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("tau", "ends"), [(2.0, "new"), (1.3, "old")])
@pytest.mark.parametrize("after_s", [0, 1, 8, 40])
def test_a_guard_that_is_made_anew_goes_on_where_the_last_one_was(count, tau, ends, after_s):
    fleet = Fleet(count)
    fleet.rounds_per_s = 10
    fleet.run(300)
    fleet.promote("new", tau)
    fleet.until(lambda: fleet.having("new"))
    fleet.run(after_s)
    fleet.new_guard()
    for _ in range(12):
        fleet.run(1)
        assert len(fleet.having("new")) <= 1
    fleet.until(lambda: set(fleet.served) == {ends} and fleet.rollout._says() == "steady")
    assert len({at for at, _, version in fleet.swaps if version == "new"}) == (count if ends == "new" else 1)


def test_a_guard_that_dies_before_the_registry_is_told_leaves_nothing_behind():
    fleet = Fleet(2)
    fleet.pointer.away = True
    fleet.promote("bad", 1.2)
    fleet.until(lambda: fleet.rollout.condemned)
    fleet.run(5)
    assert fleet.served == ["old", "old"], "the replicas do not wait for the registry"
    asked = fleet.asked
    fleet.run(20)
    assert fleet.asked - asked <= 2 * 20 / CONFIG.poll_s, "nor do they hurry to ask whether it is told"
    fleet.new_guard()
    late = fleet.join()
    fleet.run(30)
    assert fleet.served == ["old"] * 3
    assert late.condemned, "one that joins learns of it"
    fleet.pointer.away = False
    fleet.run(5)
    assert fleet.actions[-1] == ("rollback", "old")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("tau", "ends"), [(2.1, "third"), (1.2, "old")])
def test_another_champion_while_one_is_observed_is_compared_with_what_had_proved_itself(count, tau, ends):
    fleet = Fleet(count)
    fleet.promote("second", 1.85)
    fleet.until(lambda: fleet.having("second"))
    fleet.run(10)
    fleet.promote("third", tau)
    fleet.until(lambda: set(fleet.served) == {ends} and fleet.rollout._says() == "steady")
    assert len([1 for _, _, version in fleet.swaps if version == "second"]) == 1
    if ends == "old":
        assert fleet.actions[-1] == ("rollback", "old"), "not to the second, of which nobody knows"
        assert "against 1.90 before" in fleet.rollout.condemned[3].why or count > 1


def test_the_registry_may_have_moved_on_when_it_is_told():
    fleet = Fleet(2)
    fleet.pointer.away = True
    fleet.promote("bad", 1.2)
    fleet.until(lambda: fleet.rollout.condemned)
    fleet.promote("third", 2.2)
    fleet.pointer.away = False
    fleet.pointer.tell(fleet.rollout)
    assert fleet.actions[-1] == ("promote", "third")
    fleet.until(lambda: fleet.served == ["third", "third"])
    assert ("rollback", "old") not in fleet.actions


def test_a_replica_that_dies_hands_the_trial_to_another_and_three_are_too_many():
    fleet = Fleet(4)
    fleet.promote("new", 2.0)
    for lost in range(3):
        fleet.until(lambda: fleet.having("new"))
        (canary,) = fleet.having("new")
        fleet.run(3)
        del fleet.replicas[canary.name]
        assert fleet.join().serves is None
        fleet.run(1)
        assert set(fleet.served) == {"old"}, "one that starts gets what has proved itself"
        assert not fleet.rollout.condemned, lost
    fleet.until(lambda: fleet.rollout.condemned)
    assert fleet.rollout.condemned[2].reason == "lost"
    fleet.run(10)
    assert fleet.actions[-1] == ("rollback", "old")
    assert set(fleet.served) == {"old"}


def test_a_lone_replica_that_dies_is_not_forgotten_while_the_next_one_starts():
    fleet = Fleet(1)
    fleet.promote("new", 2.0)
    for lost in range(3):
        fleet.until(lambda: fleet.having("new"))
        assert not fleet.rollout.condemned, lost
        fleet.run(3)
        fleet.replicas.clear()
        fleet.run(200)
        fleet.join()
    fleet.until(lambda: fleet.rollout.condemned)
    assert fleet.rollout.condemned[2].reason == "lost"
    fleet.run(10)
    assert fleet.actions[-1] == ("rollback", "old")
    assert fleet.served == ["old"]


def test_a_guard_that_nobody_reached_takes_nobody_for_lost():
    fleet = Fleet(5)
    fleet.promote("new", 2.0)
    fleet.until(lambda: fleet.served == ["new"] * 5)
    assert fleet.rollout._says().startswith("rolling out new")
    fleet.now += 120
    fleet.until(lambda: fleet.rollout._says() == "steady")
    assert not fleet.rollout.condemned
    assert "lost" not in "".join(fleet.rollout.news)
    assert fleet.served == ["new"] * 5


@pytest.mark.parametrize("count", [1, 3])
def test_replicas_that_tap_other_layers_are_started_anew_one_by_one(count):
    fleet = Fleet(count, Pointer(None))
    for replica in fleet.replicas.values():
        replica.lacks = {"first"}
    fleet.promote("first", 1.8)

    def restarting() -> list[str]:
        return [name for name, replica in fleet.replicas.items() if replica.restart]

    for number in range(count):
        fleet.until(restarting)
        assert len(fleet.having("first")) == number, "the one before does not serve yet"
        (name,) = restarting()
        fleet.run(30)
        assert restarting() == [name]
        del fleet.replicas[name]
        fleet.rollout.leave(name)
        fleet.run(30)
        assert restarting() == []
        fleet.join()
        if number == 0:
            fleet.until(lambda: fleet.having("first"))
            fleet.run(int(CONFIG.observe_s) - 10)
            assert restarting() == [], "the first is observed alone"
    fleet.until(lambda: len(fleet.having("first")) == count and fleet.rollout._says() == "steady")
    assert fleet.actions == [("promote", "first")]


def test_replicas_that_are_stopped_are_not_lost():
    fleet = Fleet(4)
    fleet.promote("new", 2.0)
    for _ in range(3):
        fleet.until(lambda: fleet.having("new"))
        (canary,) = fleet.having("new")
        del fleet.replicas[canary.name]
        fleet.rollout.leave(canary.name)
    fleet.until(lambda: fleet.served == ["new"])
    fleet.run(100)
    assert not fleet.rollout.condemned


def test_a_replica_that_cannot_load_it_lets_another_try_and_the_registry_stays():
    fleet = Fleet(2)
    first, second = fleet.replicas.values()
    first.refuses = second.refuses = {"new"}
    fleet.promote("new", 2.0)
    fleet.run(200)
    assert fleet.served == ["old", "old"]
    second.refuses = set()
    fleet.until(lambda: fleet.served == ["old", "new"])
    fleet.run(500)
    assert fleet.served == ["old", "new"]
    first.refuses = set()
    fleet.until(lambda: fleet.served == ["new", "new"])
    assert len(fleet.actions) == 2


def test_a_roll_back_by_hand_is_followed_at_once_by_all():
    fleet = Fleet(3)
    fleet.promote("new", 2.0)
    fleet.until(lambda: fleet.served == ["new"] * 3)
    fleet.until(lambda: fleet.rollout._says() == "steady")
    fleet.pointer.change("rollback", "old")
    fleet.run(int(CONFIG.poll_s) + 3)
    assert fleet.served == ["old"] * 3
    fleet.pointer.change("rollback", None)
    fleet.run(int(CONFIG.poll_s) + 3)
    assert fleet.served == [None] * 3
    fleet.promote("new", 2.0)  # after plain decoding there is nothing to compare with, but it comes one by one
    fleet.until(lambda: fleet.having("new"))
    fleet.run(int(CONFIG.observe_s) - 10)
    assert len(fleet.having("new")) == 1
    fleet.until(lambda: fleet.served == ["new"] * 3)


def test_an_empty_registry_and_its_first_champion():
    fleet = Fleet(2, Pointer(None))
    assert [replica.serves for replica in fleet.replicas.values()] == [NOTHING] * 2
    fleet.promote("first", 1.8)
    fleet.until(lambda: fleet.served == ["first", "first"])
    fleet.until(lambda: fleet.rollout._says() == "steady")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_one_has_it_alone_and_all_end_with_the_same(seed):
    """Guards and replicas come and go, champions change, the registry is away: in any order."""
    rng = random.Random(seed)
    fleet = Fleet(3)
    good = {"old"}
    for i in range(12):
        event = rng.choice(["promote", "promote", "guard", "die", "join", "away", "back", "by hand"])
        if event == "promote":
            tau = rng.choice([1.2, 2.0])
            good |= {f"v{i}"} if tau > 1.5 else set()
            fleet.promote(f"v{i}", tau)
        elif event == "guard":
            fleet.new_guard()
        elif event == "die" and len(fleet.replicas) > 2:
            del fleet.replicas[rng.choice(list(fleet.replicas))]
        elif event == "join":
            fleet.join()
        elif event == "by hand":
            fleet.pointer.change("rollback", "old")
        fleet.pointer.away = event == "away" or (fleet.pointer.away and event != "back")
        fleet.run(rng.randrange(1, 120))
    fleet.pointer.away = False
    fleet.run(2500)
    (served,) = set(fleet.served)
    assert served == fleet.pointer.champion.version
    assert fleet.rollout._says() == "steady"


def test_tallies_and_what_is_a_fall():
    counts = {
        ("spec_decode_num_drafts", ""): 10, ("spec_decode_num_accepted_tokens", ""): 12,
        ("engine_emitted_tokens", ""): 30,
        ("spec_decode_num_accepted_tokens_per_pos", "0"): 7, ("spec_decode_num_accepted_tokens_per_pos", "1"): 5,
    }  # fmt: skip
    seen = Tally.of(counts)
    assert (seen.tau, seen.steps, seen.squares) == (2.2, 18, 2 * 1 + 5 * 4)
    assert Tally().tau is None
    assert seen - seen == Tally()
    rule = {"tolerance": 0.1, "min_rounds": 100}
    assert fall(tally(99, 1.0), {"before": tally(10**4, 2.0)}, **rule) is None, "too few of the new"
    assert fall(tally(10**4, 1.0), {"before": tally(99, 2.0)}, **rule) is None, "too few of the old"
    assert fall(tally(10**6, 1.81), {"before": tally(10**6, 2.0)}, **rule) is None, "within the tolerance"
    assert fall(tally(10**6, 1.78), {"before": tally(10**6, 2.0)}, **rule)
    assert fall(tally(200, 1.78), {"before": tally(200, 2.0)}, **rule) is None, "within the noise"
    assert fall(tally(10**4, 1.5), {"before": tally(10**4, 2.0), "beside": tally(10**4, 1.5)}, **rule) is None
    quiet, few, bad = tally(10**4, 2.0), tally(60, 2.0, 3000), tally(60, 1.0, 3000)
    assert fall(few, {"before": quiet}, **rule) is None, "the load may have switched it off"
    assert fall(few, {"before": quiet, "on other replicas": quiet}, **rule), "but it has not where others draft"
    assert fall(bad, {"before": quiet}, **rule), "nor where first drafts are wrong"
    assert fall(bad, {"before": tally(60, 2.0, 3000)}, **rule) is None, "too few rounds with drafts for a fall of them"
    assert "first drafts" in str(fall(bad, {"before": tally(99, 2.0, 3000)}, **rule))
    assert fall(tally(20, 1.0, 3000), {"before": tally(99, 2.0, 3000)}, **rule) is None, "too few of the new"


def test_a_drafter_that_is_never_right_is_seen_where_the_old_one_hardly_drafted_either():
    """Figures of a service under traffic for which drafting did not pay: 1.02 tokens per round had nothing to lose."""
    old = Tally(rounds=3063, accepted=269, squares=281, emitted=11_118, first=263)
    rule = {"tolerance": 0.1, "min_rounds": 500}
    wrong = Tally(rounds=172, accepted=1, squares=1, emitted=42_103, first=1)
    assert fall(wrong, {"before": old}, **rule) == (
        "first drafts accepted (it hardly drafts) 0.01 against 0.09 before, 172 rounds, tolerance 25%"
    )
    as_good = Tally(rounds=172, accepted=14, squares=14, emitted=42_103, first=14)
    assert fall(as_good, {"before": old}, **rule) is None


def test_the_window_before_a_swap_is_recent():
    live = LiveTau(window_s=100)
    for at in range(0, 1000, 10):
        live.note(at, tally(3 * at, 2.0 if at < 500 else 1.6))
    live.note(1000, tally(3000, 1.6))
    live.took_over(1000, tally(30, 2.0))
    assert 240 <= live.before.rounds <= 330
    live.note(1005, tally(90, 2.0))
    assert (live.now, live.served_s(1005)) == (tally(60, 2.0), 5)
