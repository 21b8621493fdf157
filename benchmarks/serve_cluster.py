"""A local cluster of a head, a node for targets and one for drafters, and an app on it by `serve deploy`.

Used by the test of the disaggregated endpoint and by the benchmarks that disturb one.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

FAST_DEATH = {  # a node's death is noticed within seconds
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}
DEADLINE_S = 120.0
PORT_RANGE = range(22_760, 30_000)  # systems hand out ports from 32,768 on, Ray its workers' below 20,000
_PLACES = itertools.count(97 * os.getpid())  # processes that begin together look in different places


def free_port() -> int:
    """A port that nobody listens on: another one at each call, none that others are handed before it is used."""
    for place in itertools.islice(_PLACES, len(PORT_RANGE)):
        port = PORT_RANGE[place % len(PORT_RANGE)]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def wait(condition: Callable[[], Any], what: str, every_s: float = 0.2) -> None:
    """Until the condition holds; raises TimeoutError that says what did not happen."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(every_s)


@contextmanager
def quick_to_notice_deaths() -> Iterator[None]:
    """The environment of clusters that are started within."""
    changed = {**FAST_DEATH, "RAY_ADDRESS": None}
    before = {name: os.environ.get(name) for name in changed}

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    put(changed)
    try:
        yield
    finally:
        put(before)


class ServeCluster:
    """The cluster, and how an operator and a client see its app. `args` are ServeConfig's of a disaggregated app."""

    def __init__(self, folder: Path, args: dict[str, Any]):
        port = free_port()
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": True,
                "dashboard_port": port,
                "dashboard_agent_listen_port": free_port(),
            },
        )
        try:
            self.cluster.add_node(num_cpus=2, resources={"target_node": 1})
            self.drafter_node = self.add_drafter_node()
            self.cluster.wait_for_nodes(timeout=60)
        except BaseException:
            self.close()
            raise
        self.address, self.port = f"http://127.0.0.1:{port}", free_port()
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self._file = folder / "serve.yaml"
        self._args = args | {
            "disaggregated": {
                "strategy": "STRICT_SPREAD",
                "target_resources": {"target_node": 1},
                "drafter_resources": {"drafter_node": 1},
                **args.get("disaggregated", {}),
            }
        }

    def add_drafter_node(self) -> Any:
        """Another node that may hold a drafter."""
        return self.cluster.add_node(num_cpus=2, resources={"drafter_node": 1})

    def close(self) -> None:
        """End every node."""
        self.cluster.shutdown()

    def deploy(self, drafter: str) -> None:
        """`serve deploy` with this drafter in `user_config`; nothing else of the file ever changes."""
        application = {
            "name": "draftloop",
            "import_path": "serving.disaggregated:build",
            "route_prefix": "/",
            "runtime_env": {"env_vars": {"PYTHONPATH": os.getcwd()}},
            "args": self._args,
            "deployments": [{"name": "Replica", "user_config": {"drafter": drafter}}],
        }
        http = {"host": "127.0.0.1", "port": self.port}
        whole = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        self._file.write_text(yaml.safe_dump(whole))
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(self._file), "--address", self.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    def get(self, path: str) -> str:
        """The body of a GET; empty while nobody answers."""
        try:
            with urllib.request.urlopen(self.base_url.removesuffix("/v1") + path, timeout=10) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    def card(self) -> dict[str, Any]:
        """What the endpoint says of its drafter; nothing before it answers."""
        said = self.get("/v1/models")
        return dict(json.loads(said)["data"][0]["metadata"]["drafter"]) if said else {}

    def metric(self, name: str) -> float | None:
        """The sum of a counter's or gauge's series; None while the page or that part of it is not to be had."""
        page = self.get("/metrics")
        if f"# HELP {name} " not in page:
            return None
        return sum(float(x.rsplit(" ", 1)[1]) for x in page.splitlines() if x.startswith((name + "{", name + " ")))

    def pids(self, kind: str) -> list[int]:
        """Process ids of the living actors whose class name has `kind` in it."""
        alive = list_actors(self.address, filters=[("state", "=", "ALIVE")])
        return [int(actor.pid) for actor in alive if kind in actor.class_name]
