"""`draftloop compare`: drafters and prompt sets in; compare.json, compare.md, compare.svg and one line of advice out.

Every drafter, prompt lookup and plain decoding meet the same prompts in one engine: tau by draft length is counted
along the target's own answers, the cost of rounds and the speed of answers are measured in turns.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.target import Target, load_target, target_fingerprint
from pipelines.compare_advice import advise
from pipelines.compare_bench import Bench, NamedPrompts, with_speeds
from pipelines.compare_config import CompareConfig, CompareError, names_of
from pipelines.compare_contenders import Contender, find_contenders
from pipelines.compare_figures import CompareReport, DrafterFacts, DrafterTimes, LeftOut, PairFigures, SetFacts
from pipelines.compare_parts import Parts
from pipelines.compare_plot import plot
from pipelines.compare_tables import markdown
from pipelines.evaluate import versions
from pipelines.prompts import read_prompts

JSON, MARKDOWN, PLOT = "compare.json", "compare.md", "compare.svg"


@dataclass(frozen=True)
class CompareProgress:
    """After each unit of work, or with a message that is a line of its own."""

    done: int = 0
    total: int = 0
    text: str = ""
    message: str = ""


OnProgress = Callable[[CompareProgress], None]


def compare(config: CompareConfig, on_progress: OnProgress | None = None) -> CompareReport:
    """Compare the drafters, and write what was found. A drafter that cannot be loaded, or fails, is left out and named
    in the report. Raises CompareError, TargetError, PromptError or EngineBuildError."""
    config.check()
    target = load_target(config.target)
    contenders, left_out = find_contenders(config, target)
    sets = _read_sets(config, target)
    comparison = _Comparison(config, target, contenders, sets, on_progress or (lambda progress: None))
    for out in left_out:
        comparison.leave_out(out)
    if not contenders:
        raise CompareError(f"no drafter can be compared; {left_out[0].name}: {left_out[0].reason}")
    report = comparison.run()
    folder = comparison.folder
    folder.write(JSON, (json.dumps(asdict(report), indent=1) + "\n").encode())
    folder.write(PLOT, plot(report).encode())
    folder.write(MARKDOWN, markdown(report, PLOT).encode())
    return report


def _read_sets(config: CompareConfig, target: Target) -> list[NamedPrompts]:
    room = target.max_len - config.max_new_tokens - config.num_draft_tokens - 1
    if room < 1:
        raise CompareError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt in {target.max_len} tokens of context"
        )
    found = []
    for name, spec in zip(names_of(config.prompts), config.prompts, strict=True):
        read = read_prompts(
            spec, target, max_prompt_tokens=room, chat=config.chat, limit=config.limit, options=config.chat_options
        )
        found.append(NamedPrompts(name, [row.prompt_ids for row in read.rows], read.sha256))
    return found


class _Comparison:
    """Measures what is not in the folder yet."""

    def __init__(
        self,
        config: CompareConfig,
        target: Target,
        contenders: Sequence[Contender],
        sets: Sequence[NamedPrompts],
        on_progress: OnProgress,
    ):
        self.config, self.target, self.sets = config, target, sets
        self.contenders = {contender.name: contender for contender in contenders}
        self.folder = AtomicFolder(config.output, scratch=".")
        self.left_out: list[LeftOut] = []
        self._on_progress = on_progress
        self._parts = Parts(self.folder)
        self._versions, self._commit = versions(), commit()
        self._fingerprint = target_fingerprint(target.path)
        self._done = self._total = 0
        self._incomplete: dict[str, dict[str, Any]] = {}  # parts of this run that a later one is to measure again

    def leave_out(self, out: LeftOut) -> None:
        self.left_out.append(out)
        self.contenders.pop(out.name, None)
        self._on_progress(CompareProgress(message=f"{out.name} is left out: {out.reason}"))

    # -- what is there already ----------------------------------------------------------------------------------------

    def _key(self, name: str, sets: Sequence[NamedPrompts]) -> dict[str, Any]:
        """All that figures of one drafter on these sets depend on."""
        return {
            "config": self.config.measuring(),
            "target": self._fingerprint,
            "drafter": self.contenders[name].sha256,
            "prompts": [one.sha256 for one in sets],
            "versions": self._versions,
            "commit": self._commit,
        }

    def _known(self, name: str) -> dict[str, Any] | None:
        """Facts, times and backend of a drafter."""
        return self._incomplete.get(name) or self._parts.load(name, self._key(name, self.sets))

    def _known_pair(self, name: str, prompts: NamedPrompts) -> PairFigures | None:
        part = f"{prompts.name}--{name}"
        found = self._incomplete.get(part) or self._parts.load(part, self._key(name, [prompts]))
        return None if found is None else PairFigures.from_json(found)

    # -- the work -----------------------------------------------------------------------------------------------------

    def run(self) -> CompareReport:
        new = [name for name in self.contenders if self._known(name) is None]
        missing = {
            one.name: [name for name in self.contenders if self._known_pair(name, one) is None] for one in self.sets
        }
        kept = len(self.contenders) * len(self.sets) - sum(map(len, missing.values()))
        if kept:
            self._on_progress(
                CompareProgress(message=f"{kept} results of an earlier run in {self.folder.uri} are kept")
            )
        if new or any(missing.values()):
            self._measure(new, missing)
        return self._report()

    def _measure(self, new: list[str], missing: dict[str, list[str]]) -> None:
        longest = max(len(prompt) for one in self.sets for prompt in one.prompts)
        bench = Bench(self.config, self.target, list(self.contenders.values()), longest)
        self._drop_failed(bench)
        self._total = bench.times_units(len(new)) if new else 0
        for one in self.sets:
            if missing[one.name]:
                self._total += bench.pairs_units(len(missing[one.name]), one)
        if new:
            times = bench.times(self._still(new), self.sets, self._tick)
            for name, found in times.items():
                values = {
                    "facts": asdict(bench.facts(name)), "times": asdict(found), "backend": bench.engine.backend.name,
                }  # fmt: skip
                self._keep(name, self._key(name, self.sets), values, complete=found.complete)
                if not found.complete:
                    text = f"{name}: some rounds came too seldom to be timed; another run measures it again"
                    self._on_progress(CompareProgress(message=text))
            self._drop_failed(bench)
        for one in self.sets:
            names = self._still(missing[one.name])
            if not names:
                continue
            times = {name: self._times(name) for name in names}
            for pair in bench.pairs(names, one, times, self._tick):
                part, key = f"{one.name}--{pair.drafter}", self._key(pair.drafter, [one])
                # what was timed was chosen by these times
                self._keep(part, key, asdict(pair), complete=times[pair.drafter].complete)
            self._drop_failed(bench)

    def _keep(self, part: str, key: dict[str, Any], values: dict[str, Any], *, complete: bool) -> None:
        if complete:
            self._parts.save(part, key, values)
        else:
            self._incomplete[part] = values

    def _drop_failed(self, bench: Bench) -> None:
        for name, reason in bench.failures.items():
            if name in self.contenders:
                self.leave_out(LeftOut(name=name, reason=reason))

    def _still(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.contenders]

    def _tick(self, text: str) -> None:
        self._done += 1
        self._on_progress(CompareProgress(self._done, self._total, text))

    def _times(self, name: str) -> DrafterTimes:
        known = self._known(name)
        assert known is not None
        return DrafterTimes.from_json(known["times"])

    # -- what came of it ----------------------------------------------------------------------------------------------

    def _report(self) -> CompareReport:
        known = {name: self._known(name) or {} for name in self.contenders}
        times = {name: DrafterTimes.from_json(values["times"]) for name, values in known.items()}
        pairs = []
        for one in self.sets:
            for name in self.contenders:
                pair = self._known_pair(name, one)
                assert pair is not None
                pairs.append(replace(pair, lengths=with_speeds(pair.lengths, times[name])))
        backend = next((values["backend"] for values in known.values()), "")
        exact = self.config.dtype == "float32" or backend == "native"
        unequal = [name for name in known if exact and any(
            s.equal + s.near_ties < s.prompts for p in pairs if p.drafter == name for s in p.speeds
        )]  # fmt: skip
        served = [name for name, contender in self.contenders.items() if contender.path is not None]
        sound = [pair for pair in pairs if pair.drafter not in unequal]
        return CompareReport(
            output=self.folder.uri,
            target=self.config.target,
            backend=backend,
            exact=exact,
            config=asdict(self.config),
            versions=self._versions,
            commit=self._commit,
            sets=[
                SetFacts(name=one.name, prompts=len(one.prompts), sha256=one.sha256, mean_prompt_tokens=one.mean_tokens)
                for one in self.sets
            ],
            drafters=[DrafterFacts(**values["facts"]) for values in known.values()],
            times=list(times.values()),
            pairs=pairs,
            left_out=self.left_out,
            unequal=unequal,
            advice=advise(sound, list(times.values()), self.config.batches, served),
        )


def commit() -> str | None:
    """Of the code that runs, with a mark if it was changed; None where it does not lie in a git tree of its own."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], capture_output=True, text=True, check=False, cwd=here.parent, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    here = Path(__file__)
    # installed below somebody else's tree it would be that one's commit
    return git("describe", "--always", "--dirty") if git("ls-files", "--error-unmatch", here.name) else None
