"""What happens to requests when the drafter of a disaggregated endpoint is disturbed, or swapped: two tables.

    python benchmarks/faults.py --drafter DRAFTER --other OTHER_DRAFTER

On a local cluster of three nodes with `serve deploy`: streams run without a pause while the drafter's process is
killed, stopped for a while, stopped for good, its node removed and brought back; then while drafters are swapped, good
and bad ones. Every answer is compared with plain decoding by the same endpoint before anything happened. Writes
benchmarks/results/faults-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_load import Streamed, bodies_of, run_streams
from references import write_json, write_text
from serve_cluster import ServeCluster, quick_to_notice_deaths, wait

from drafters.target import load_target
from pipelines.evaluate import versions
from pipelines.prompts import read_prompts

RESULTS = Path(__file__).parent / "results"


@dataclass
class Outcome:
    """What clients saw during one event."""

    name: str
    answers: list[Streamed] = field(default_factory=list)
    differing: list[bool] = field(default_factory=list)  # by answer, whether it is another than plain decoding's
    back_s: float | None = None  # from the event until drafts were accepted again

    def row(self) -> str:
        failed = [a for a in self.answers if a.error is not None]
        stall = max(max(a.first_s, a.longest_gap_s) for a in self.answers)
        back = "" if self.back_s is None else f"{self.back_s:.1f}"
        return f"| {self.name} | {len(self.answers)} | {len(failed)} | {sum(self.differing)} | {stall:.2f} | {back} |"


class Clients:
    """Streams that go on until told to stop, and what their answers have to be."""

    def __init__(self, cluster: ServeCluster, bodies: list[dict[str, Any]], at_once: int):
        self._cluster, self._bodies, self._at_once = cluster, bodies, at_once
        plain = [body | {"num_draft_tokens": 0} for body in bodies]
        answers, _ = asyncio.run(run_streams(cluster.base_url, plain, at_once))
        self._expected = [answer.text for answer in answers]
        if any(answer.error for answer in answers):
            raise SystemExit(str([answer.error for answer in answers]))

    def during(self, name: str, event: Callable[[], float | None]) -> Outcome:
        """Streams before, while and after the event, which returns the seconds until drafting was back."""
        outcome, over = Outcome(name), threading.Event()

        def keep_asking(worker: int) -> None:
            number = worker
            while not over.is_set():
                body = self._bodies[number % len(self._bodies)]
                (answer,), _ = asyncio.run(run_streams(self._cluster.base_url, [body], 1))
                outcome.answers.append(answer)
                expected = self._expected[number % len(self._bodies)]
                outcome.differing.append(answer.error is None and answer.text != expected)
                number += self._at_once

        with ThreadPoolExecutor(self._at_once) as pool:
            asking = [pool.submit(keep_asking, worker) for worker in range(self._at_once)]
            time.sleep(2.0)
            try:
                outcome.back_s = event()
                time.sleep(2.0)
            finally:
                over.set()
            for future in asking:
                future.result(300)
        print(outcome.row(), flush=True)
        return outcome


def faults(cluster: ServeCluster, clients: Clients) -> list[Outcome]:
    """Every way in which a drafter is lost."""

    def drafting() -> float:
        return cluster.metric("spec_decode_num_accepted_tokens_total") or 0.0

    def back_after(disturb: Callable[[], None]) -> float:
        begun = time.monotonic()
        disturb()
        time.sleep(0.5)  # drafts that were under way are through
        before = drafting()
        wait(lambda: drafting() > before and cluster.card().get("away", "") is None, "no drafts", 0.1)
        return time.monotonic() - begun

    def send(*signals: signal.Signals) -> None:
        (pid,) = cluster.pids("DrafterActor")
        for number, each in enumerate(signals):
            time.sleep(1.0 if number else 0.0)
            os.kill(pid, each)

    def lose_node() -> None:
        cluster.cluster.remove_node(cluster.drafter_node, allow_graceful=False)
        wait(lambda: cluster.card().get("away") is not None, "nobody noticed")
        cluster.drafter_node = cluster.add_drafter_node()

    return [
        clients.during("nothing", lambda: None),
        clients.during("drafter killed (SIGKILL)", lambda: back_after(lambda: send(signal.SIGKILL))),
        clients.during(
            "stopped for a second (SIGSTOP, SIGCONT)",
            lambda: back_after(lambda: send(signal.SIGSTOP, signal.SIGCONT)),
        ),
        clients.during("stopped for good (SIGSTOP)", lambda: back_after(lambda: send(signal.SIGSTOP))),
        clients.during("its node removed, another one added", lambda: back_after(lose_node)),
    ]


def swaps(cluster: ServeCluster, clients: Clients, good: list[str], work: Path) -> list[tuple[Outcome, str]]:
    """Good drafters and bad ones; with each what the endpoint said of it."""
    truncated, foreign = work / "truncated", work / "foreign"
    shutil.copytree(good[1], truncated)
    os.truncate(truncated / "model.safetensors", 1000)
    shutil.copytree(good[1], foreign)
    provenance = foreign / "provenance.json"
    provenance.write_text(provenance.read_text().replace('"target_fingerprint": "', '"target_fingerprint": "0'))
    cases = [
        ("another drafter", good[1]),
        ("truncated weights", str(truncated)),
        ("of another target", str(foreign)),
        ("no such folder", str(work / "none")),
        ("the first one again", good[0]),
    ]
    found = []
    for name, drafter in cases:
        before = told_of(cluster)

        def swap(drafter: str = drafter, before: Any = before) -> float:
            begun = time.monotonic()
            cluster.deploy(drafter)
            wait(lambda: told_of(cluster) not in (None, before), f"{drafter} was neither taken nor refused", 0.05)
            return time.monotonic() - begun

        outcome = clients.during(name, swap)
        told = told_of(cluster)
        refused = told[1] if told else None
        for folder in (truncated, foreign, work):
            refused = refused and refused.replace(str(folder), folder.name if folder != work else "...")
        found.append((outcome, f"refused: {refused}" if refused else "serves it"))
    return found


def told_of(cluster: ServeCluster) -> tuple[Any, Any] | None:
    """The drafter that the endpoint says it serves, and why the last swap was refused; None while it says nothing."""
    card = cluster.card()
    return (card["path"], card["last_swap_refused"]) if card else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--other", required=True, help="another drafter of the same target")
    parser.add_argument("--prompts", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=0.25)
    args = parser.parse_args()
    good = [str(Path(path).resolve()) for path in (args.drafter, args.other)]
    rows = read_prompts(args.prompts, load_target(args.target), limit=args.limit).rows
    bodies = bodies_of(args.target, rows, args.tokens)
    with quick_to_notice_deaths(), tempfile.TemporaryDirectory() as folder:
        limits = {"draft_deadline_s": args.deadline_s, "hang_timeout_s": 5.0}
        served = {
            "target": args.target,
            "model_name": args.target,
            "drafter": good[0],
            "num_slots": args.at_once,
            "adapt_draft_length": False,
        }
        cluster = ServeCluster(Path(folder), served | {"max_len": 1024, "disaggregated": limits})
        try:
            cluster.deploy(good[0])
            wait(cluster.card, "the endpoint does not answer")
            clients = Clients(cluster, bodies, args.at_once)
            lost = faults(cluster, clients)
            swapped = swaps(cluster, clients, good, Path(folder))
        finally:
            cluster.close()
    write_tables(args, lost, swapped)


def write_tables(args: argparse.Namespace, lost: list[Outcome], swapped: list[tuple[Outcome, str]]) -> None:
    date = datetime.date.today().isoformat()
    note = (
        f"{Path(args.target).name}, float32, target and drafter on nodes of their own, {args.at_once} streams at "
        f"a time over HTTP without a pause, {args.tokens} new tokens at most, half of them sampled with seeds; trees "
        f"of fixed size, draft deadline {args.deadline_s:g} s. Changed: answers that differ from the same endpoint's "
        "plain decoding."
    )
    lines = [f"# Faults and swaps, {date}", "", note, ""]
    lines += ["| event | requests | failed | changed | longest wait for a token, s | drafts again after, s |"]
    lines += ["|---|---|---|---|---|---|", *(outcome.row() for outcome in lost), ""]
    columns = (
        "requests | failed | changed | longest wait for a token, s | `serve deploy` to told, s | the endpoint says"
    )
    lines += [f"| swap to | {columns} |"]
    lines += ["|---|---|---|---|---|---|---|", *(f"{outcome.row()} {said} |" for outcome, said in swapped)]
    facts = {
        "args": vars(args) | {name: Path(getattr(args, name)).name for name in ("target", "drafter", "other")},
        "versions": versions(),
        "rows": [outcome.row() for outcome in [*lost, *(outcome for outcome, _ in swapped)]],
    }
    write_json(RESULTS / f"faults-{date}.json", facts)
    write_text(RESULTS / f"faults-{date}.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
