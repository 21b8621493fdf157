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
            except httpx.HTTPError as error:
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
                self.counts["changed"] += answer.text != self._expected[at]

    async def _leaver(self, client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self._until:
            body = asking(chance.choice(self._bodies))
            with contextlib.suppress(httpx.HTTPError):
                async with client.stream("POST", "completions", json=body) as answer:
                    lines = answer.aiter_lines()
                    for _ in range(chance.randrange(1, 40)):
                        if await anext(lines, None) is None:
                            break
                self.counts["left in the middle"] += 1

    async def _refused(self, client: httpx.AsyncClient) -> None:
        chance = random.Random(0)
        while time.monotonic() < self._until:
            change, status = chance.choice(BAD)
            answer = await client.post("completions", json=self._bodies[0] | change)
            self.counts["refused as they should be"] += answer.status_code == status
            if answer.status_code != status:
                self._fail(f"{change} gave {answer.status_code}")
            await asyncio.sleep(chance.random())

    async def _killer(self) -> None:
        chance = random.Random(1)
        while time.monotonic() < self._until:
            await asyncio.sleep(chance.uniform(0.3, 1.0) * self._args.kill_every_s)
            for pid in await asyncio.to_thread(self._cluster.pids, "DrafterActor"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.counts["drafters killed"] += 1

    async def _watcher(self) -> None:
        (replica,) = await asyncio.to_thread(self._cluster.pids, "Replica")
        process, begun = psutil.Process(replica), time.monotonic()
        while time.monotonic() < self._until:
            memory = process.memory_full_info().uss / 1e6
            self.samples.append(
                {"s": time.monotonic() - begun, "mb": memory, "tokens": self.counts["tokens"], "fds": process.num_fds()}
            )
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
        cluster = ServeCluster(Path(folder), served | {"max_len": 1024, "disaggregated": {"hang_timeout_s": 5.0}})
        try:
            cluster.deploy(drafter)
            wait(cluster.card, "the endpoint does not answer")
            soak = Soak(args, cluster, bodies)
            asyncio.run(soak.run())
            wait(lambda: cluster.metric("num_requests_running") == 0, "slots are still taken")
            left = cluster.metric("num_requests_running") + cluster.metric("num_requests_waiting")
            restarts = cluster.card()["restarts"]
            fallbacks = cluster.metric("spec_decode_fallbacks_total")
        finally:
            cluster.close()
    write(args, soak, left, restarts, fallbacks)


def write(args: argparse.Namespace, soak: Soak, left: float, restarts: dict[str, int], fallbacks: float) -> None:
    samples = soak.samples
    third = len(samples) // 3
    parts = (samples[third : 2 * third], samples[2 * third :])
    early, late = (sum(s["mb"] for s in part) / len(part) for part in parts)
    figure, (memory, speed) = two_panels(3.5)
    memory.plot([s["s"] / 60 for s in samples], [s["mb"] for s in samples])
    memory.set(xlabel="minutes", ylabel="MB", title="memory of the replica's process", ylim=(0, None))
    pairs = list(zip(samples, samples[6:], strict=False))
    speed.plot([b["s"] / 60 for _, b in pairs], [(b["tokens"] - a["tokens"]) / (b["s"] - a["s"]) for a, b in pairs])
    speed.set(xlabel="minutes", ylabel="tokens/s of finished answers", title="half a minute's mean", ylim=(0, None))
    date = datetime.date.today().isoformat()
    order = ("answered", "failed", "changed", "turned away (503)", "left in the middle", "refused as they should be")
    lines = [
        f"# Soak, {date}",
        "",
        f"{args.target}, float32, {args.minutes:g} minutes, target and drafter apart, {args.at_once} slots and as many "
        f"readers, {args.at_once // 2} clients that leave, one that sends bad requests, {args.tokens} new tokens at "
        f"most; the drafter's process killed {soak.counts['drafters killed']} times (replaced: {restarts}). "
        f"{fallbacks:.0f} rounds went without drafts for it.",
        "",
        "| requests | |",
        "|---|---|",
        *(f"| {name} | {soak.counts[name]:,} |" for name in order),
        f"| slots or queue places taken at the end | {left:.0f} |",
        f"| memory of the replica's process, means of the second and the last third | {early:.0f} MB, {late:.0f} MB |",
        f"| open files, second third and end | {samples[third]['fds']:.0f}, {samples[-1]['fds']:.0f} |",
    ]
    facts = {
        "args": vars(args) | {"drafter": Path(args.drafter).name},
        "versions": versions(),
        "counts": dict(soak.counts),
        "samples": samples,
        "failures": soak.first_failures,
    }
    write_json(RESULTS / f"soak-{date}.json", facts)
    write_text(RESULTS / f"soak-{date}.md", "\n".join(lines) + "\n")
    write_text(RESULTS / f"soak-{date}.svg", svg_text(figure))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
