"""`draftloop redistill`: a window of the traffic log in; a challenger, the gate's verdict, and perhaps a champion out.

    select -> rollouts with features -> train from the champion -> gate -> publish -> promote or reject -> report

The window is the key: each stage leaves one whole file behind (`window_folder.py`), so that a killed run goes on where
it stopped and a finished one is not repeated. What has been selected is kept: the log may lose its oldest files
meanwhile. One run at a time works for a registry (`run_lease.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import read_config
from drafters.registry import ChampionChangedError, Change, Registry, Version
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import Target, load_target, target_fingerprint
from pipelines.gate import GatePrompt, GateReport, regression_prompts
from pipelines.gate_ancestors import ancestors, with_ancestors
from pipelines.gate_lines import HELD_OUT
from pipelines.gate_task import GateTask, hold_gate
from pipelines.redistill_config import RedistillConfig, RedistillError, RedistillReport, Verdict
from pipelines.rollout_store import RolloutError, open_rollouts
from pipelines.run_lease import RunLease
from pipelines.traffic_rollouts import TrafficRolloutsConfig, write_rollouts
from pipelines.traffic_selection import Selection, TrafficWindow, WindowError, load_selection, save_selection
from pipelines.traffic_window import select
from pipelines.train import train
from pipelines.train_config import TrainConfig
from pipelines.window_folder import (
    START,
    TRAINING,
    WindowFolder,
    drop_old_rollouts,
    interrupted,
    known_windows,
    next_begin,
    tie_work,
    used_windows,
)
from serving.chat_options import ChatTemplate
from serving.traffic_schema import TrafficMetadata

ALIKE = ("target_layer_ids", "target_fingerprint", "tokenizer_hash", "chat_template_hash", "chat_options")  # to replay
MOST_GATES = 3  # times that a challenger is held against yet another champion before the run gives up

OnStage = Callable[[str], None]


def redistill(config: RedistillConfig, on_stage: OnStage | None = None) -> RedistillReport:
    """One window, from the log to the verdict; what was done before is not done again.

    Raises RedistillError, LeaseHeldError if another run is at work, or the stages' own errors: the same command goes
    on after them.
    """
    target = load_target(config.target)
    registry = AtomicFolder(config.registry)
    tie_work(config.work, registry=registry.uri, target_fingerprint=target_fingerprint(target.path))
    folder = WindowFolder(config.work, next_window(config))
    if (report := folder.report()) is not None:
        return replace(report, repeated=True)
    with RunLease(registry, f"redistill of {folder.window.id}") as lease:
        folder = WindowFolder(config.work, next_window(config))  # a run that we have waited for may have used the other
        if (report := folder.report()) is not None:
            return replace(report, repeated=True)
        report = _Run(config, target, folder, on_stage or (lambda line: None), lease).go()
    drop_old_rollouts(config.work, keep=config.replay_windows)
    return report


def next_window(config: RedistillConfig, now: datetime | None = None) -> TrafficWindow:
    """The window that a run with these options works on: one that was begun, or the next.

    Raises RedistillError if there is none.
    """
    now = now or datetime.now(UTC)
    until = (config.until or now - timedelta(seconds=config.settle_s)).astimezone(UTC).replace(microsecond=0)
    if config.since is None and (before := _begun(config.work, until if config.until else None)) is not None:
        return before.window
    if until > now:
        raise RedistillError(f"until is {until.isoformat()}, which is not over yet; give a time in the past")
    since = (config.since or next_begin(config.work)).astimezone(UTC).replace(microsecond=0)
    if since >= until:
        raise RedistillError(f"the window of {since.isoformat()} to {until.isoformat()} is empty; give a later until")
    return TrafficWindow(since=since, until=until)


def _begun(work: str, until: datetime | None) -> WindowFolder | None:
    """The window that ends then, done or not; without an end one that was interrupted."""
    if until is None:
        return interrupted(work)
    return next((folder for folder in reversed(known_windows(work)) if folder.window.until == until), None)


class _Run:
    """The stages of one window, in their order."""

    def __init__(
        self, config: RedistillConfig, target: Target, folder: WindowFolder, on_stage: OnStage, lease: RunLease
    ):
        self._config, self._target, self._folder, self._tell, self._lease = config, target, folder, on_stage, lease
        self._registry = Registry(config.registry)
        self._by = f"redistill of {folder.window.id}"

    def go(self) -> RedistillReport:
        if (report := self._decided_before()) is not None:
            return report
        try:
            selection = self._select()
            if (too_few := self._too_few(selection)) is not None:
                return self._end(*too_few)
            if self._folder.read(TRAINING) is None:
                champion = self._start()
                self._read(selection, champion)
                self._train(champion)
        except WindowError as error:  # repeated garbage, answers of another target
            return self._end("rejected", str(error))
        return self._decide(selection)

    def _say(self, line: str) -> None:
        """A stage begins or ends; one that lost its lease stops here."""
        self._lease.check()
        self._tell(line)

    # -- stages -------------------------------------------------------------------------------------------------------

    def _select(self) -> Selection:
        """Which requests. Once chosen they stay, whatever becomes of the log."""
        selection = load_selection(self._folder.folder)
        if selection is None:
            template = ChatTemplate(self._target, self._config.chat_options)
            expected = TrafficMetadata.of(self._config.target, self._target, template)
            selection = select(self._config.traffic, self._folder.window, expected, self._config.window)
            save_selection(self._folder.folder, selection)
        refused = ", ".join(f"{count} {reason}" for reason, count in selection.refused.items())
        self._say(
            f"{selection.read} requests: {len(selection.training)} to train on, {len(selection.held_out)} held out"
            + (f", refused {refused}" if refused else "")
        )
        return selection

    def _too_few(self, selection: Selection) -> tuple[Verdict, str] | None:
        """Little traffic waits for the next window; traffic of which little can be used would wait for ever."""
        usable, need = len(selection.training), self._config.min_rows
        held_out, prompts = len(selection.held_out), self._config.gate.min_prompts
        if usable >= need and held_out >= prompts:
            return None
        why = f"{usable} usable requests for training, {need} are needed"
        if usable >= need:
            return "skipped", f"{held_out} held-out prompts, the gate needs {prompts}"
        if selection.read * (1 - self._config.window.held_out) < need:
            return "skipped", why
        reasons = ", ".join(f"{count} {reason}" for reason, count in selection.refused.items())
        return "rejected", f"{why}: of {selection.read} were refused {reasons}"

    def _start(self) -> Version | None:
        """The champion that the challenger begins as, which a run that goes on does not choose anew."""
        if self._folder.read(START) is None:
            champion = self._registry.champion()
            self._folder.write(START, {"champion": champion.version if champion else None})
        name = self._parent()
        return self._registry.version(name) if name else None

    def _parent(self) -> str | None:
        """The version that the challenger began as."""
        name: str | None = (self._folder.read(START) or {}).get("champion")
        return name

    def _read(self, selection: Selection, champion: Version | None) -> None:
        """The target reads the requests: rollouts with the features that the champion's kind needs."""
        config, like = self._config, champion or next(reversed(self._registry.versions()), None)
        # without a champion, as after a roll-back to plain decoding, those of the registry's other versions: it holds
        # drafters of the same layers only
        taps = read_config(local_checkpoint(like.uri)).target_layer_ids if like else None
        self._say(f"features: {config.target} reads {len(selection.training)} answers")
        write_rollouts(
            selection.training,
            self._target,
            self._folder.rollouts,
            TrafficRolloutsConfig(
                target=config.target,
                chat_options=config.chat_options,
                target_layer_ids=taps,
                num_taps=config.num_taps,
                features_dtype=config.features_dtype,
                dtype=config.dtype,
                batch=config.batch,
                num_actors=config.num_actors,
                gpus_per_actor=float(config.use_gpu),
            ),
        )

    def _train(self, champion: Version | None) -> None:
        """The champion goes on with the window's rollouts and older ones."""
        config, sets = self._config, self._rollout_sets()
        self._say(f"train: {champion.name if champion else 'a fresh drafter'} on {len(sets)} rollout sets")
        report = train(
            TrainConfig(
                target=config.target,
                rollouts=tuple(sets),
                rollout_weights=tuple(sets.values()),
                output=self._folder.challenger,
                init_from=champion.uri if champion else None,
                kind="recursive" if champion else config.kind,  # the first is what a run says that goes on from another
                steps=config.steps,
                num_workers=config.num_workers,
                cpus_per_worker=config.cpus_per_worker,
                use_gpu=config.use_gpu,
            )
        )
        self._folder.write(TRAINING, asdict(report))
        tau = "-" if report.expected_tau is None else f"{report.expected_tau:.2f}"
        self._say(f"{report.steps} steps in {report.seconds:.0f} s, expected tau {tau}")

    def _rollout_sets(self) -> dict[str, float]:
        """Address and weight of the window's own set and of those that are replayed."""
        own = self._folder.rollouts
        earlier = [f.rollouts for f in used_windows(self._config.work) if f.window.until <= self._folder.window.since]
        found = [*self._config.replay, *earlier[len(earlier) - min(len(earlier), self._config.replay_windows) :]]
        mine = open_rollouts(own)
        sizes = {}
        for uri in found:
            try:
                rollouts = open_rollouts(uri)
            except RolloutError:
                if uri in self._config.replay:
                    raise
                continue  # of a window that was rejected before it was read
            if uri in self._config.replay or all(
                getattr(rollouts.metadata, name) == getattr(mine.metadata, name) for name in ALIKE
            ):
                sizes[uri] = rollouts.manifest.rows
        return {own: 1.0} | replay_weights(mine.manifest.rows, sizes, self._config.replay_share)

    def _decide(self, selection: Selection) -> RedistillReport:
        """Gate, publish, promote or reject; once more, if the champion changed meanwhile."""
        for _ in range(MOST_GATES):
            if (report := self._decided_before()) is not None:
                return report
            champion = self._registry.champion()
            previous = champion.version if champion else None
            gate = self._gate(selection, champion)
            if not gate.passed and not gate.decided:  # its requests are in the next window too
                return self._end("skipped", gate.reason(), None, previous, gate)
            version = self._publish(gate)
            self._lease.renew()
            if not gate.passed:
                self._registry.reject(version.name, by=self._by, why=gate.reason(), report=gate.as_json())
                return self._end("rejected", gate.reason(), version.name, previous, gate)
            try:
                self._registry.promote(version.name, by=self._by, why=gate.reason(), expected=champion)
            except ChampionChangedError as error:
                self._say(f"{error}: the challenger is held against the new one")
                continue
            return self._end("promoted", gate.reason(), version.name, previous, gate)
        raise RedistillError(f"the champion changed {MOST_GATES} times during the gate; run the same command again")

    def _gate(self, selection: Selection, champion: Change | None) -> GateReport:
        name = f"gate-{champion.number if champion else 0:08d}.json"
        if (known := self._folder.read(name)) is not None:
            return GateReport.from_json(known)
        config, newest = self._config, selection.held_out[-self._config.held_out_limit :]
        held_out = [GatePrompt([*map(int, row.prompt_ids)], "traffic") for row in newest]
        regression = [
            prompt
            for spec in config.regression
            for prompt in regression_prompts(
                spec, self._target, per_category=config.regression_limit, options=config.chat_options
            )
        ]
        against = champion.version if champion and champion.version else None
        self._say(f"gate: against {against or 'plain decoding'} on the newest {len(held_out)} prompts")
        gate = hold_gate(
            GateTask(
                target=config.target,
                target_path=str(self._target.path.absolute()),
                target_fingerprint=target_fingerprint(self._target.path),
                champion=self._registry.version(against).uri if against else None,
                challenger=self._folder.challenger,
                held_out=held_out,
                regression=regression,
                config=config.gate,
            ),
            num_gpus=float(config.use_gpu),
            while_waiting=self._lease.check,
        )
        gate = with_ancestors(gate, ancestors(self._registry, against or self._parent()))
        if gate.decided:
            self._folder.write(name, gate.as_json())
        return gate

    def _publish(self, gate: GateReport) -> Version:
        """The challenger as a version that is called like its window: published twice it is the same."""
        window = self._folder.window
        tau = next((line.challenger for line in gate.lines if line.name == HELD_OUT), None)
        return self._registry.publish(
            self._folder.challenger,
            name=window.id,
            parent=self._parent(),
            data={
                "window": window.id,
                "since": window.since.isoformat(),
                "until": window.until.isoformat(),
                "traffic": self._config.traffic,
            },
            evaluation={"tau": tau, "gate": gate.as_json()},
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def _decided_before(self) -> RedistillReport | None:
        """What a run of this window decided that was killed before it could report, or what others did since."""
        name = self._folder.window.id
        for change in self._registry.history():
            if change.action == "promote" and change.version == name:
                return self._end("promoted", change.why, name, change.previous)
        if (verdict := self._registry.verdict(name)) is not None:
            gate = GateReport.from_json(verdict["report"])
            return self._end("rejected", verdict["why"], name, self._parent(), gate)
        return None

    def _end(
        self,
        verdict: Verdict,
        why: str,
        version: str | None = None,
        previous: str | None = None,
        gate: GateReport | None = None,
    ) -> RedistillReport:
        selection = load_selection(self._folder.folder)
        report = RedistillReport(
            window=self._folder.window.id,
            verdict=verdict,
            why=why,
            version=version,
            previous=previous,
            counts=selection.counts() if selection else {},
            gate=gate.as_json() if gate else None,
            training=self._folder.read(TRAINING),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return self._folder.finish(report)


def replay_weights(own_rows: int, sizes: Mapping[str, int], share: float) -> dict[str, float]:
    """How often each older set is read per epoch, so that `share` of all rows are theirs; at most once each."""
    rows = sum(sizes.values())
    if not rows or not share:
        return {}
    weight = min(1.0, share / (1 - share) * own_rows / rows)
    return dict.fromkeys(sizes, weight)
