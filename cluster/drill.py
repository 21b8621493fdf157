"""`draftloop drill`: the closed loop on a real target, watched. Traffic shifts, tau falls, the loop mends it.

A drafter of GSM8K serves; clients ask maths, then programming tasks, then Russian. After each shift `redistill` makes a
challenger of the logged traffic, the gate decides, and the endpoint swaps while the streams go on. Then what must not
do harm: two poisoned windows, and a drafter that looks well and drafts badly (`drill_faults.py`). In the
end the static drafter and the loop's last one are measured side by side on held-out prompts. All of it lies in the
output folder: drill.json, drill.svg, drill.md.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster import show
from cluster.drill_faults import POISONS, poison, publish_bad
from cluster.drill_report import Event, markdown, plot, stretches
from cluster.drill_traffic import Traffic
from cluster.quickstart import first_drafter, free_port
from cluster.show_drill import drill_tables
from drafters.registry import Registry
from pipelines.data import shipped
from pipelines.evaluate import EvaluateConfig, Evaluation, evaluate, versions
from pipelines.gate import GateConfig
from pipelines.ray_session import start_ray
from pipelines.redistill import redistill
from pipelines.redistill_config import RedistillConfig, RedistillReport
from pipelines.step_config import StepConfig
from pipelines.traffic_window import WindowConfig
from pipelines.window_folder import known_windows
from serving.serve_app import run_app, shutdown
from serving.serve_config import RegistryFollowing, ServeConfig
from serving.traffic_log import TrafficLogConfig

PHASES = ("gsm8k_test", "mbpp", "russian")  # the first is what the drafter was trained for
HELD_OUT = 20  # the last prompts of a set: no client asks them
WORK = "redistill"  # folder of the windows
GATE_TOKENS = 64  # of each of the gate's answers
LOOK_EVERY_S = 0.5  # at what the endpoint serves
FLUSH_S = 2.0  # until an answer is in the log
CALM_PAUSE_S = 6.0  # of a client between two questions while redistill works


class DrillError(RuntimeError):
    """A drill that cannot go on; one line."""


@dataclass(frozen=True, kw_only=True)
class DrillConfig:
    """How large the drill is."""

    target: str = "smollm2"
    output: Path = Path("draftloop-out/drill")
    drafter: Path | None = None  # of GSM8K; None: one is trained
    replay: str | None = None  # its rollouts; None: those that are made for it
    questions: int = 400  # GSM8K questions that it is trained on
    shifts: int = 2  # kinds of traffic that follow GSM8K; 0: only the drafter that looks well
    answers: int = 100  # per phase, before the loop runs
    answers_after: int = 40  # per phase, after it
    max_tokens: int = 96
    concurrency: int = 2
    epochs: float = 4.0  # of a challenger
    deadline_s: float = 1800.0  # for anything that is waited for
    port: int = 8000


def drill(console: Console, config: DrillConfig) -> dict[str, Any]:
    """All of it; returns the facts of drill.json. Raises the stages' own errors, or DrillError."""
    config.output.mkdir(parents=True, exist_ok=True)
    registry = Registry(str(config.output / "registry"))
    _refuse_earlier(config.output, registry)
    drafter, replay = config.drafter, config.replay
    if drafter is None:
        made = first_drafter(console, config.target, config.output, config.questions, 8.0, ("1 of 4", "2 of 4"))
        drafter, replay = made.drafter, str(made.rollouts)
    if registry.champion() is None:
        first = registry.publish(drafter, data={"drill": "GSM8K"})
        registry.promote(first.name, by="draftloop drill", why="the first drafter", expected=None)
    static = registry.history()[0].version
    assert static is not None
    start_ray()
    with show.stage(console, "3 of 4  the loop: traffic shifts, the drafter follows", quiet=False) as stage:
        run = _Drill(config, registry, [replay] if replay else [], stage)
        with run.serving():
            run.phase(PHASES[0], config.answers)
            for phase in PHASES[1 : 1 + config.shifts]:
                run.phase(phase, config.answers, learns=True)
            if config.shifts:
                run.poisoned()
                run.phase(PHASES[0], config.answers_after)  # drafts are worth most here: who drafts badly is seen
            run.bad_live()
    compared: list[dict[str, Any]] = []
    if config.shifts:
        with show.stage(console, "4 of 4  the static drafter against the loop's", quiet=False) as stage:
            champion = registry.champion()
            assert champion is not None
            compared = _compare(config, registry, static, champion.version or static, stage)
    return _write(console, config, run, compared)


def _refuse_earlier(output: Path, registry: Registry) -> None:
    """Another drill's versions and windows are no beginning; its rollouts and drafter are. Raises DrillError."""
    if len(registry.history()) > 1 or known_windows(str(output / WORK)):
        left = ", ".join(str(output / name) for name in ("registry", "traffic*", f"{WORK}*"))
        raise DrillError(f"an earlier drill has been here; give another --output, or remove {left}")


class _Drill:
    """The endpoint, its clients, and what happened."""

    def __init__(self, config: DrillConfig, registry: Registry, replay: list[str], stage: show.Stage):
        self._config, self._registry, self._replay, self._stage = config, registry, replay, stage
        self._started, self.began = time.monotonic(), datetime.now(UTC)
        self.events: list[Event] = []
        self.reports: list[RedistillReport] = []
        self.traffic: Traffic | None = None
        self._serves = ""
        self._over = threading.Event()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The endpoint and its clients, until the end."""
        config = self._config
        served = ServeConfig(
            target=config.target,
            # tau before the swap is that of this phase alone: max_observe_s must not reach back over a shift
            registry=RegistryFollowing(uri=self._registry.uri, poll_s=2.0, observe_s=20.0, max_observe_s=60.0),
            traffic_log=TrafficLogConfig(uri=str(config.output / "traffic"), flush_interval_s=FLUSH_S),
            num_slots=config.concurrency,
            max_len=1024,
            port=free_port(config.port),
        )
        base_url = run_app(served)
        self.traffic = Traffic(
            base_url, served.served_name, concurrency=config.concurrency, max_tokens=config.max_tokens,
            started=self._started,
        )  # fmt: skip
        watcher = threading.Thread(target=self._watch, args=(base_url,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self.traffic.close()
            self._over.set()
            watcher.join(timeout=10)
            shutdown()

    def phase(self, name: str, answers: int, learns: bool = False) -> None:
        """Traffic of one kind; if the loop learns, until the endpoint serves what the loop has decided on."""
        assert self.traffic is not None
        self._note("shift", name)
        self.traffic.shift(name, _chats(name)[:-HELD_OUT])
        before = self._answers(name)
        self._until(lambda: self._answers(name) - before >= answers, f"{answers} answers to {name}")
        if not learns:
            return
        time.sleep(3 * FLUSH_S)  # the log is a little behind
        self._note("redistill", f"redistill on {name}")
        self.traffic.pause_s = CALM_PAUSE_S  # training, gate and endpoint share this machine's cores
        report = redistill(self._redistill_config(), self._stage.say)
        self.traffic.pause_s = 0.0
        self.reports.append(report)
        self._note(report.verdict, report.why)
        if report.verdict == "promoted":
            self._until(lambda: (report.version or "") in self._serves, f"the endpoint serves {report.version}")
        before = self._answers(name)
        self._until(
            lambda: self._answers(name) - before >= self._config.answers_after,
            f"{self._config.answers_after} answers after it",
        )

    def poisoned(self) -> None:
        """Windows that nothing may be learnt from; the endpoint serves what it served."""
        traffic, until = self._config.output / "traffic", datetime.now(UTC).replace(microsecond=0)
        for kind in POISONS:
            log = poison(traffic, self._config.output / f"traffic-{kind}", kind)
            settings = replace(
                self._redistill_config(), traffic=str(log), work=str(self._config.output / f"{WORK}-{kind}"),
                until=until,
            )  # fmt: skip
            serves = self._serves
            report = redistill(settings, self._stage.say)
            self.reports.append(report)
            self._note(report.verdict, f"poisoned window ({kind}): {report.why}")
            if report.verdict != "rejected" or self._serves != serves:
                raise DrillError(f"a window poisoned with {kind} was {report.verdict}, {self._serves} serves")

    def bad_live(self) -> None:
        """A version with a good evaluation and bad weights is promoted by hand; service takes it back by itself."""
        before = self._registry.champion()
        assert before is not None
        assert before.version is not None
        bad = publish_bad(self._registry, before.version, self._config.output / "bad-live")
        self._registry.promote(bad, by="draftloop drill", why="its evaluation is good", expected=before)
        self._note("promoted", f"{bad}, which drafts badly")

        def rolled_back() -> bool:
            change = self._registry.champion()
            return change is not None and change.action == "rollback" and change.version == before.version

        self._until(rolled_back, f"{bad} is rolled back")
        self._note("rolled back", str(self._registry.history()[-1].why))
        self._until(lambda: str(before.version) in self._serves, f"the endpoint serves {before.version} again")
        answers = len(self.traffic.replies) if self.traffic else 0
        more = self._config.answers_after // 2
        self._until(lambda: self.traffic and len(self.traffic.replies) >= answers + more, f"{more} answers after it")

    def _redistill_config(self) -> RedistillConfig:
        config = self._config
        return RedistillConfig(
            target=config.target,
            traffic=str(config.output / "traffic"),
            registry=self._registry.uri,
            work=str(config.output / WORK),
            since=self._phase_began(),
            settle_s=FLUSH_S,
            min_rows=min(60, config.answers // 2),
            replay=tuple(self._replay),
            regression=(PHASES[0],),
            regression_limit=20,
            held_out_limit=24,
            window=WindowConfig(held_out=0.25, max_repeated_share=0.9),  # a small target repeats itself in Russian
            steps=StepConfig(epochs=config.epochs, learning_rate=1e-3),
            # S is measured beside a service that takes what it can get of the same cores
            gate=GateConfig(
                max_new_tokens=GATE_TOKENS, min_prompts=12, regression_tolerance=0.1, most_speed_tolerance=0.5
            ),
        )

    def _phase_began(self) -> datetime:
        """When the present phase's traffic began: what came before it is what the champion has seen."""
        shift = [event for event in self.events if event.kind == "shift"][-1]
        return datetime.fromtimestamp(int(self.began.timestamp() + shift.at_s), UTC)

    def _answers(self, phase: str) -> int:
        assert self.traffic is not None
        return sum(reply.phase == phase for reply in self.traffic.replies)

    def _note(self, kind: str, what: str) -> None:
        at_s = time.monotonic() - self._started
        self.events.append(Event(at_s=at_s, kind=kind, what=what))
        self._stage.say(f"{at_s:5.0f} s  {kind}: {what}")

    def _until(self, reached: Any, what: str) -> None:
        deadline = time.monotonic() + self._config.deadline_s
        while not reached():
            if time.monotonic() > deadline:
                raise DrillError(f"{what}: not within {self._config.deadline_s:.0f} s; see Ray's serve logs")
            time.sleep(0.1)

    def _watch(self, base_url: str) -> None:
        """Note when the endpoint serves another version."""
        while not self._over.wait(LOOK_EVERY_S):
            try:
                with urllib.request.urlopen(f"{base_url}/models", timeout=10) as answer:
                    card = json.loads(answer.read())["data"][0]["metadata"]["drafter"]
                version = card["version"] or "plain decoding"
            except (OSError, ValueError, LookupError, TypeError, HTTPException):
                continue  # a look that failed is not the drill's end
            if version != self._serves:
                self._serves = version
                self._note("serving", version)


def _chats(name: str) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in shipped(name).read_text("utf-8").splitlines()]


def _compare(
    config: DrillConfig, registry: Registry, static: str, last: str, stage: show.Stage
) -> list[dict[str, Any]]:
    """Both drafters on each set's held-out prompts, each against plain decoding."""
    found = []
    for name in PHASES:
        prompts = config.output / f"held-out-{name}.jsonl"
        prompts.write_text("\n".join(shipped(name).read_text("utf-8").splitlines()[-HELD_OUT:]) + "\n", "utf-8")
        results: list[Evaluation] = []
        for version in (static, last):
            stage.say(f"{name}: {version}")
            output = str(config.output / f"evaluation-{name}-{version}.json")
            results.append(
                evaluate(
                    EvaluateConfig(
                        target=config.target, drafter=registry.version(version).uri, prompts=str(prompts),
                        limit=HELD_OUT, max_new_tokens=config.max_tokens, output=output,
                    )
                )
            )  # fmt: skip
        one, two = results
        found.append(
            {
                "prompts": name, "count": one.prompts, "static": static, "loop": last,
                "static_tau": one.tau, "static_s": one.s_measured, "loop_tau": two.tau, "loop_s": two.s_measured,
                "equal": one.equal + two.equal, "of": one.prompts + two.prompts,
            }
        )  # fmt: skip
    return found


def _write(console: Console, config: DrillConfig, run: _Drill, compared: list[dict[str, Any]]) -> dict[str, Any]:
    """The drill's files, and the table on the terminal."""
    assert run.traffic is not None
    replies = run.traffic.replies
    rows = stretches(replies, run.events)
    facts = {
        "began": run.began.isoformat(timespec="seconds"),
        "config": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()},
        "versions": versions(),
        "events": [asdict(event) for event in run.events],
        "stretches": [asdict(row) for row in rows],
        "compared": compared,
        "reports": [asdict(report) for report in run.reports],
        "replies": [asdict(reply) for reply in replies],
    }
    (config.output / "drill.json").write_text(json.dumps(facts, indent=1) + "\n")
    title = f"{config.target}, {config.concurrency} streams, which pause while redistill works on the same cores"
    (config.output / "drill.svg").write_text(plot(replies, run.events, title))
    (config.output / "drill.md").write_text(markdown(rows, compared))
    console.print(drill_tables(rows, compared))
    return facts
