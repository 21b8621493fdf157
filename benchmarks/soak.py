"""An endpoint at full load for a long time, with clients that leave, bad requests and drafters that die.

    python benchmarks/soak.py --drafter DRAFTER --minutes 20

Target and drafter apart on this machine. Some clients stream and read to the end, some hang up in the middle, some send
what must be refused; the drafter's process is killed every now and then. Every answer is compared with the endpoint's
own plain decoding. At the end no slot may be taken, no request lost, memory as after the warm-up. Writes
benchmarks/results/soak-DATE.{json,md,svg}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from http_load import asking, bodies_of, run_streams, stream
from references import write_json, write_text
from serve_cluster import ServeCluster, quick_to_notice_deaths, wait
from svg_plot import svg_text, two_panels

from drafters.target import load_target
from pipelines.evaluate import versions
from pipelines.prompts import read_prompts

RESULTS = Path(__file__).parent / "results"
SAMPLE_EVERY_S = 5.0
BAD: list[tuple[dict[str, Any], int]] = [
    ({"max_tokens": 10**7}, 400),
    ({"temperature": -1}, 400),
    ({"model": "other"}, 404),
    ({"prompt": []}, 400),
    ({"best_of": 3}, 400),
]


class Soak:
    """Clients, and what became of their requests."""

    def __init__(self, args: argparse.Namespace, cluster: ServeCluster, bodies: list[dict[str, Any]]):
        self._args, self._cluster, self._bodies = args, cluster, bodies
        self.counts: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.first_failures: list[str] = []
        plain = [body | {"num_draft_tokens": 0} for body in bodies]
        answers, _ = asyncio.run(run_streams(cluster.base_url, plain, args.at_once))
        if wrong := [answer.error for answer in answers if answer.error is not None]:
            raise SystemExit(f"plain decoding fails: {wrong[0]}")
        self._expected = [answer.text for answer in answers]
        self._until = 0.0

    async def run(self) -> None:
        """Everything at once, until the time is over."""
        self._until = time.monotonic() + 60 * self._args.minutes
        timeout = httpx.Timeout(120.0)
        limits = httpx.Limits(max_connections=200)
        url = self._cluster.base_url + "/"
        async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
            clients = [self._reader(client, number) for number in range(self._args.at_once)]
            clients += [self._leaver(client, number) for number in range(self._args.at_once // 2)]
            await asyncio.gather(*clients, self._refused(client), self._killer(), self._watcher())

    async def _reader(self, client: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < self._until:
            at = number % len(self._bodies)
            number += self._args.at_once
            try:
                answer = await stream(client, self._bodies[at])
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self._fail(f"{type(error).__name__}: {error}")
                continue
            if answer.error is not None and answer.error.startswith("503"):
                self.counts["turned away (503)"] += 1
                await asyncio.sleep(1.0)
            elif answer.error is not None:
                self._fail(answer.error)
            else:
                self.counts["answered"] += 1
                self.counts["tokens"] += answer.tokens
                self.counts["rounds"] += answer.rounds
                self.counts["accepted drafts"] += answer.accepted
                self.counts["changed"] += answer.text != self._expected[at]

    async def _leaver(self, client: httpx.AsyncClient, number: int) -> None:
        """Leaves in the middle of a stream, or before its first byte."""
        chance = random.Random(number)
        while time.monotonic() < self._until:
            body, patience_s = asking(chance.choice(self._bodies)), chance.choice([0.05, 0.3, 120.0])
            try:
                async with client.stream("POST", "completions", json=body, timeout=patience_s) as answer:
                    lines, left = answer.aiter_lines(), True
                    for _ in range(chance.randrange(1, 40)):
                        left = left and await anext(lines, None) is not None
                if answer.status_code in (200, 503):
                    self.counts["left in the middle" if left else "answered before it left"] += 1
                else:
                    self._fail(f"who meant to leave got {answer.status_code}")
            except httpx.ReadTimeout:
                self.counts["left before the first byte, or a gap"] += 1
            except httpx.HTTPError as error:
                self._fail(f"{type(error).__name__}: {error}")

    async def _refused(self, client: httpx.AsyncClient) -> None:
        chance = random.Random(0)
        while time.monotonic() < self._until:
            change, status = chance.choice(BAD)
            try:
                answer = await client.post("completions", json=self._bodies[0] | change)
            except httpx.HTTPError as error:
                self._fail(f"{change}: {type(error).__name__}: {error}")
                continue
            self.counts["refused as they should be"] += answer.status_code == status
            if answer.status_code != status:
                self._fail(f"{change} gave {answer.status_code}")
            await asyncio.sleep(chance.random())

    async def _killer(self) -> None:
        chance = random.Random(1)
        while True:
            pause = chance.uniform(0.3, 1.0) * self._args.kill_every_s
            if time.monotonic() + pause > self._until - 10:
                return
            await asyncio.sleep(pause)
            with contextlib.suppress(Exception):  # a look-up that failed, a process that is gone: the next time then
                for pid in await asyncio.to_thread(self._cluster.pids, "DrafterActor"):
                    os.kill(pid, signal.SIGKILL)
                    self.counts["drafters killed"] += 1

    async def _watcher(self) -> None:
        (replica,) = await asyncio.to_thread(self._cluster.pids, "Replica")
        process, begun = psutil.Process(replica), time.monotonic()
        while time.monotonic() < self._until:
            try:
                memory, files = process.memory_full_info().uss / 1e6, process.num_fds()
            except psutil.NoSuchProcess:
                self._fail("the replica's process is gone")
                return
            now = time.monotonic() - begun
            self.samples.append({"s": now, "mb": memory, "tokens": self.counts["tokens"], "fds": files})
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _fail(self, why: str) -> None:
        self.counts["failed"] += 1
        if len(self.first_failures) < 10:
            self.first_failures.append(why)
            print("failed:", why, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=8, help="readers; half as many leavers")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    args = parser.parse_args()
    drafter = str(Path(args.drafter).resolve())
    rows = read_prompts(args.prompts, load_target(args.target), limit=args.limit).rows
    bodies = bodies_of(args.target, rows, args.tokens)
    with quick_to_notice_deaths(), tempfile.TemporaryDirectory() as folder:
        served = {"target": args.target, "model_name": args.target, "drafter": drafter, "num_slots": args.at_once}
        cluster = ServeCluster(
            Path(folder),
            served | {"max_len": 1024, "adapt_draft_length": False, "disaggregated": {"hang_timeout_s": 5.0}},
        )
        try:
            cluster.deploy(drafter)
            wait(cluster.card, "the endpoint does not answer")
            soak = Soak(args, cluster, bodies)
            try:
                asyncio.run(soak.run())
            finally:
                write(args, soak, ending_of(cluster))
        finally:
            cluster.close()


def ending_of(cluster: ServeCluster) -> dict[str, Any]:
    """What the endpoint says a little after the last request: slots, and what became of drafters."""
    with contextlib.suppress(TimeoutError):
        wait(lambda: cluster.metric("num_requests_running") == 0, "slots are still taken")
    return {
        "running": cluster.metric("num_requests_running"),
        "waiting": cluster.metric("num_requests_waiting"),
        "fallbacks": cluster.metric("spec_decode_fallbacks_total"),
        "restarts": cluster.metric("drafter_restarts_total"),
        "late or dropped replies": cluster.metric("draft_link_events_total"),
        "prompt tokens found in slots": cluster.metric("prefix_cache_hits_total"),
    }


def write(args: argparse.Namespace, soak: Soak, ending: dict[str, Any]) -> None:
    """The tables and the plot, of a run that broke off too."""
    samples, counts = soak.samples, soak.counts
    third = len(samples) // 3
    parts = (samples[third : 2 * third], samples[2 * third :])
    early, late = (sum(s["mb"] for s in part) / max(1, len(part)) for part in parts)
    figure, (memory, speed) = two_panels(3.5)
    memory.plot([s["s"] / 60 for s in samples], [s["mb"] for s in samples])
    memory.set(xlabel="minutes", ylabel="MB", title="memory of the replica's process", ylim=(0, None))
    pairs = list(zip(samples, samples[6:], strict=False))
    speed.plot([b["s"] / 60 for _, b in pairs], [(b["tokens"] - a["tokens"]) / (b["s"] - a["s"]) for a, b in pairs])
    speed.set(xlabel="minutes", ylabel="tokens/s of finished answers", title="half a minute's mean", ylim=(0, None))
    date = datetime.date.today().isoformat()
    name = Path(args.target).name
    tau = round(counts["accepted drafts"] / counts["rounds"] + 1, 2) if counts["rounds"] else None
    told_apart = {"tokens", "rounds", "accepted drafts", "drafters killed"}
    order = ["answered", "failed", "changed", *sorted(counts.keys() - told_apart - {"answered", "failed", "changed"})]
    lines = [
        f"# Soak, {date}",
        "",
        f"{name}, float32, {args.minutes:g} minutes, target and drafter apart, {args.at_once} slots and as many "
        f"readers, {args.at_once // 2} clients that leave, one that sends bad requests, {args.tokens} new tokens at "
        f"most, half of the requests sampled with seeds, trees of fixed size; the drafter's process killed "
        f"{counts['drafters killed']} times. Changed: answers that differ from the same endpoint's plain decoding.",
        "",
        "| requests | |",
        "|---|---|",
        *(f"| {key} | {counts[key]:,} |" for key in order),
        f"| tokens of answers; verify rounds; tau | {counts['tokens']:,}; {counts['rounds']:,}; {tau} |",
        *(f"| at the end: {key} | {value} |" for key, value in ending.items()),
        f"| memory of the replica's process, means of the second and the last third | {early:.0f} MB, {late:.0f} MB |",
    ]
    if samples:
        files = f"{samples[third]['fds']:.0f}, {samples[-1]['fds']:.0f}"
        lines.append(f"| open files after a third, and at the end | {files} |")
    facts = {
        "args": vars(args) | {"drafter": Path(args.drafter).name, "target": name},
        "versions": versions(),
        "counts": dict(counts),
        "ending": ending,
        "memory_mb": [early, late],
        "samples": samples,
        "failures": soak.first_failures,
    }
    write_json(RESULTS / f"soak-{date}.json", facts)
    write_text(RESULTS / f"soak-{date}.md", "\n".join(lines) + "\n")
    write_text(RESULTS / f"soak-{date}.svg", svg_text(figure))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
