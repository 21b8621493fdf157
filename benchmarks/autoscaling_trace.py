"""The endpoint under a load that grows and falls: requests, replicas and latency, second by second.

    python benchmarks/autoscaling_trace.py                    # SmolLM2, about 4 minutes
    python benchmarks/autoscaling_trace.py --target TOYDIR    # any small target, 1 minute

Starts the app with autoscaling and sends streamed requests at a rate that follows the profile (quiet, ramp, peak,
quiet), each at its time whether earlier ones have been answered or not. A replica has one thread; there are as many at
most as cores. Writes benchmarks/results/autoscaling-DATE.{md,json,svg}. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import openai
from ray import serve
from references import write_json, write_text
from svg_plot import svg_text, two_panels

from pipelines.cores import usable_cores
from pipelines.data import shipped
from pipelines.evaluate import versions
from pipelines.ray_session import start_ray
from serving.autoscaling import AutoscaleConfig
from serving.serve_app import APP_NAME, run_app, shutdown
from serving.serve_config import ServeConfig

RESULTS = Path(__file__).parent / "results"
ANSWER_DEADLINE_S = 120.0  # of a request; later ones count as failed
PHASES = (("quiet", 1), ("ramp", 2), ("peak", 4), ("quiet again", 5))  # and their share of the time


@dataclass(frozen=True)
class Scale:
    """Figures that suit a target; every one is an option."""

    seconds: int  # of the whole profile
    quiet_rps: float  # requests per second
    peak_rps: float  # more than one replica answers, less than all of them
    tokens: int  # of an answer
    prompt_chars: int
    num_slots: int  # of a replica


SCALES = {
    "smollm2": Scale(seconds=220, quiet_rps=0.3, peak_rps=3.0, tokens=64, prompt_chars=400, num_slots=8),
    "other": Scale(seconds=40, quiet_rps=1.0, peak_rps=10.0, tokens=400, prompt_chars=60, num_slots=2),
}


@dataclass
class Request:
    """What came of one request; seconds are those of the profile."""

    phase: str
    sent_s: float
    ended_s: float | None = None
    error: str | None = None

    @property
    def latency_s(self) -> float | None:
        return None if self.ended_s is None or self.error else self.ended_s - self.sent_s


@dataclass
class Second:
    """One second of the profile, as it ends."""

    second: int
    arrived: int
    in_flight: int
    replicas: int  # that take requests
    starting: int
    stopping: int
    p50_s: float | None  # latency of the answers that ended in it
    failed: int


@dataclass
class Trace:
    """Everything that was seen."""

    requests: list[Request] = field(default_factory=list)
    seconds: list[Second] = field(default_factory=list)


def profile(scale: Scale) -> Iterator[tuple[str, float]]:
    """(phase, the second at which to send) of every request."""
    parts, began, at = sum(share for _, share in PHASES), 0.0, 0.0
    for phase, share in PHASES:
        length = scale.seconds * share / parts
        while at < began + length:
            yield phase, at
            done = (at - began) / length
            low, more = scale.quiet_rps, scale.peak_rps - scale.quiet_rps
            at += 1.0 / (low + more * {"ramp": done, "peak": 1.0}.get(phase, 0.0))
        began += length


async def send(client: openai.AsyncOpenAI, options: dict[str, Any], request: Request, now: Callable[[], float]) -> None:
    """Send one request and note how it ended."""
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            async for _ in await client.chat.completions.create(**options, stream=True):
                pass
    except (openai.OpenAIError, TimeoutError) as error:
        request.error = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    request.ended_s = now()


def replica_states() -> dict[str, int]:
    """Replicas by state, as Serve reports them."""
    found = serve.status().applications[APP_NAME].deployments["Replica"].replica_states
    return {str(getattr(state, "value", state)): count for state, count in found.items()}


async def watch(trace: Trace, now: Callable[[], float]) -> None:
    """Add a line every second, until it is cancelled."""
    for second in itertools.count():
        await asyncio.sleep(max(0.0, second + 1 - now()))
        states = await asyncio.to_thread(replica_states)
        ended = [r for r in trace.requests if r.ended_s is not None and second <= r.ended_s < second + 1]
        latencies = [r.latency_s for r in ended if r.latency_s is not None]
        trace.seconds.append(
            Second(
                second=second,
                arrived=sum(second <= r.sent_s < second + 1 for r in trace.requests),
                in_flight=sum(r.ended_s is None for r in trace.requests),
                replicas=states.get("RUNNING", 0),
                starting=states.get("STARTING", 0),
                stopping=states.get("STOPPING", 0),
                p50_s=statistics.median(latencies) if latencies else None,
                failed=sum(r.error is not None for r in ended),
            )
        )


async def drive(base_url: str, model: str, scale: Scale) -> Trace:
    """Send the whole profile and wait for its end and for the last answer."""
    rows = map(json.loads, shipped("gsm8k_test").read_text().splitlines())
    prompts = [row["messages"][0]["content"][: scale.prompt_chars] for row in rows]
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=ANSWER_DEADLINE_S, max_retries=0)
    trace, started, sending = Trace(), time.monotonic(), []

    def now() -> float:
        return time.monotonic() - started

    watching = asyncio.create_task(watch(trace, now))
    for number, (phase, at) in enumerate(profile(scale)):
        await asyncio.sleep(max(0.0, at - now()))
        request = Request(phase, now())
        trace.requests.append(request)
        options = {"model": model, "max_tokens": scale.tokens, "temperature": 0}
        options["messages"] = [{"role": "user", "content": prompts[number % len(prompts)]}]
        sending.append(asyncio.create_task(send(client, options, request, now)))
    await asyncio.gather(*sending)
    await asyncio.sleep(max(0.0, scale.seconds - now()))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return trace


def plot(trace: Trace) -> str:
    """Requests, and beside them replicas and latency, as SVG text."""
    figure, (left, right) = two_panels(4)
    seconds = [line.second for line in trace.seconds]
    left.plot(seconds, [line.in_flight for line in trace.seconds], linewidth=1.2, label="in flight")
    left.plot(seconds, [line.arrived for line in trace.seconds], linewidth=1.0, label="arriving per second")
    left.set_ylabel("requests")
    right.step(seconds, [line.replicas for line in trace.seconds], where="post", label="replicas that take requests")
    up = [line.replicas + line.starting for line in trace.seconds]
    right.step(seconds, up, ":", where="post", label="and those that start")
    right.set_yticks(range(max(up) + 2))
    right.set_ylabel("replicas")
    latency = right.twinx()
    known = [(line.second, line.p50_s) for line in trace.seconds if line.p50_s is not None]
    latency.plot(*zip(*known, strict=True), ".", color="grey", markersize=3, label="p50 latency, s")
    latency.set_ylim(bottom=0)
    latency.set_ylabel("p50 latency, s")
    for panel in (left, right):
        panel.set_xlabel("second")
        panel.grid(alpha=0.3)
    left.legend(fontsize=8)
    right.legend(fontsize=8, loc="upper left")
    return svg_text(figure)


def table(trace: Trace) -> str:
    """One line per phase."""
    lines = [
        "| phase | requests | failed | p50 latency, s | p95 | most in flight | replicas |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase, _ in PHASES:
        sent = [r for r in trace.requests if r.phase == phase]
        latencies = sorted(r.latency_s for r in sent if r.latency_s is not None)
        first, last = sent[0].sent_s, sent[-1].sent_s
        during = [line for line in trace.seconds if first <= line.second <= last] or trace.seconds[:1]
        replicas = [line.replicas for line in during]
        cells = (
            phase, len(sent), sum(r.error is not None for r in sent), _percentile(latencies, 0.5),
            _percentile(latencies, 0.95), max(line.in_flight for line in during), f"{replicas[0]} to {replicas[-1]}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _percentile(ordered: list[float], share: float) -> str:
    return f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.2f}" if ordered else ""


def story(trace: Trace) -> str:
    """When the number of replicas changed, in one line."""
    changes = [f"{trace.seconds[0].replicas} at the start"]
    for before, after in itertools.pairwise(trace.seconds):
        if before.replicas != after.replicas:
            changes.append(f"{after.replicas} from second {after.second}")
    errors = sorted({r.error for r in trace.requests if r.error})
    failed = f" Errors: {'; '.join(errors)}." if errors else ""
    return f"Replicas: {', '.join(changes)}. {len(trace.requests)} requests.{failed}"


def serve_config(args: argparse.Namespace, scale: Scale) -> ServeConfig:
    """The app. Delays are shares of the profile, so that a short one shows the same."""
    autoscale = AutoscaleConfig(
        max_replicas=args.max_replicas,
        upscale_delay_s=scale.seconds / 80,
        downscale_delay_s=scale.seconds / 8,
        look_back_s=max(2.0, scale.seconds / 40),
        metrics_interval_s=0.5,
        drain_timeout_s=ANSWER_DEADLINE_S,
    )
    return ServeConfig(
        target=args.target, drafter=args.drafter, port=args.port, num_slots=scale.num_slots, max_len=args.max_len,
        threads=1, autoscale=autoscale,
    )  # fmt: skip


def write_results(args: argparse.Namespace, scale: Scale, config: ServeConfig, trace: Trace) -> None:
    """The three files; they name the target by its name, not its place."""
    assert config.autoscale is not None
    date = datetime.date.today().isoformat()
    file = args.results / f"autoscaling-{date}"
    found = {
        "versions": versions(),
        "load": {"target": config.served_name, "drafter": bool(args.drafter)} | asdict(scale),
        "autoscale": config.autoscale.model_dump(),
        "seconds": [asdict(second) for second in trace.seconds],
        "requests": [asdict(request) for request in trace.requests],
    }
    write_json(file.with_suffix(".json"), found)
    write_text(file.with_suffix(".svg"), plot(trace))
    told = (
        f"{config.served_name}, {config.dtype}, {'with a drafter' if args.drafter else 'plain'}, answers of "
        f"{scale.tokens} tokens at most, {scale.quiet_rps:g} to {scale.peak_rps:g} requests per second; up to "
        f"{args.max_replicas} replicas of {scale.num_slots} slots and one thread."
    )
    picture = f"![requests and replicas]({file.name}.svg)"
    text = f"# Autoscaling, {date}\n\n{told} {story(trace)}\n\n{picture}\n\n{table(trace)}\n"
    write_text(file.with_suffix(".md"), text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", help="folder; without: plain decoding")
    parser.add_argument("--max-replicas", type=int, default=usable_cores())
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--port", type=int, default=8123)
    for name, default in asdict(SCALES["smollm2"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), help=f"for smollm2: {default}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    defaults = asdict(SCALES.get(args.target, SCALES["other"]))
    scale = Scale(**{name: getattr(args, name) or default for name, default in defaults.items()})
    config = serve_config(args, scale)

    start_ray(num_cpus=args.max_replicas + 2)
    base_url = run_app(config)
    try:
        trace = asyncio.run(drive(base_url, config.served_name, scale))
    finally:
        shutdown()

    write_results(args, scale, config, trace)


if __name__ == "__main__":
    main()
