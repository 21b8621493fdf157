"""`serve deploy` of target and drafter on nodes of their own, then swaps, kills, hangs and the loss of a node.

Every answer of every request is compared with plain decoding in this process: the drafter may cost time, never a token.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from drafters.target import load_target
from serving.engine.build import build_engine
from serving.engine.sampling import Sampling
from tests.e2e.test_jobs import FAST_DEATH, free_port
from tests.serving.test_replica import save_untrained_drafter
from tests.toy_folder import save_toy_target

pytestmark = pytest.mark.ray

NUM_TOKENS, DEADLINE_S = 400, 90.0
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.9},
]


class Endpoint:
    """A head, a node for targets and one for drafters; the app on them, from a YAML file."""

    def __init__(self, folder: Path):
        self.folder, port = folder, free_port()
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": True,
                "dashboard_port": port,
                "dashboard_agent_listen_port": free_port(),
            },
        )
        self.cluster.add_node(num_cpus=2, resources={"target_node": 1})
        self.drafter_node = self.add_drafter_node()
        self.cluster.wait_for_nodes(timeout=60)
        self.address, self.port = f"http://127.0.0.1:{port}", free_port()
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self.target = save_toy_target(folder / "apart", max_position_embeddings=2048, eos_token_id=None)
        self.first = save_untrained_drafter(folder / "first", self.target)
        self.expected = self._plain()

    def add_drafter_node(self) -> Any:
        return self.cluster.add_node(num_cpus=2, resources={"drafter_node": 1})

    def _plain(self) -> list[str]:
        target = load_target(str(self.target))
        engine = build_engine(target.path, num_slots=1, max_len=1024)
        prompt = target.tokenizer.encode("hello")
        tokens = [
            engine.generate([prompt], Sampling(max_new_tokens=NUM_TOKENS, **request))[0].token_ids
            for request in REQUESTS
        ]
        return [target.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd") for ids in tokens]

    def deploy(self, drafter: str) -> None:
        """As an operator does: the file's `user_config` names the drafter to serve, its `args` never change."""
        application = {
            "name": "draftloop",
            "import_path": "serving.disaggregated:build",
            "route_prefix": "/",
            "runtime_env": {"env_vars": {"PYTHONPATH": os.getcwd()}},
            "args": {
                "target": str(self.target),
                "drafter": str(self.first),
                "num_slots": 4,
                "max_len": 1024,
                "threads": 1,
                "adapt_draft_length": False,
                "disaggregated": {
                    "strategy": "STRICT_SPREAD",
                    "target_resources": {"target_node": 1},
                    "drafter_resources": {"drafter_node": 1},
                    "draft_deadline_s": 0.5,
                    "hang_timeout_s": 3.0,
                },
            },
            "deployments": [{"name": "Replica", "user_config": {"drafter": drafter}}],
        }
        file = self.folder / "serve.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "proxy_location": "HeadOnly",
                    "http_options": {"host": "127.0.0.1", "port": self.port},
                    "applications": [application],
                }
            )
        )
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file), "--address", self.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def card(self) -> dict[str, Any]:
        """What the endpoint says of its drafter; nothing before it answers."""
        try:
            with urllib.request.urlopen(self.base_url + "/models", timeout=10) as answer:
                return dict(json.load(answer)["data"][0]["metadata"]["drafter"])
        except OSError:
            return {}

    def ask(self, number: int) -> tuple[str, dict[str, Any], float]:
        """The text, how drafting went, and the longest gap between two chunks in seconds."""
        client = openai.OpenAI(base_url=self.base_url, api_key="none", timeout=DEADLINE_S, max_retries=0)
        stream = client.completions.create(
            model="apart", prompt="hello", max_tokens=NUM_TOKENS, stream=True, **REQUESTS[number]
        )
        text, metrics, gap, last = "", {}, 0.0, None
        for chunk in stream:
            now = time.monotonic()
            gap, last = max(gap, now - (last or now)), now
            text += chunk.choices[0].text
            metrics = getattr(chunk, "metrics", None) or metrics
        return text.rstrip("\ufffd"), metrics["speculative_decoding"], gap

    @contextmanager
    def traffic(self) -> Iterator[list[tuple[str, dict[str, Any], float]]]:
        """Requests one after another, several at a time, until the body has done something to the app."""
        found: list[tuple[str, dict[str, Any], float]] = []
        over = threading.Event()

        def keep_asking(number: int) -> None:
            while True:
                answer = self.ask(number)
                assert answer[0] == self.expected[number]
                found.append(answer)
                if over.is_set():
                    return

        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            asking = [pool.submit(keep_asking, number) for number in range(len(REQUESTS))]
            time.sleep(0.3)
            try:
                yield found
            finally:
                over.set()
            for future in asking:
                future.result(DEADLINE_S)

    def drafts(self) -> bool:
        return self.ask(0)[1]["rounds"] > 0

    def drafter_pid(self) -> int:
        actors = list_actors(self.address, filters=[("class_name", "=", "DrafterActor"), ("state", "=", "ALIVE")])
        assert len(actors) == 1, actors
        return int(actors[0].pid)


def wait(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FAST_DEATH.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        endpoint = Endpoint(tmp_path_factory.mktemp("endpoint"))
        endpoint.deploy(str(endpoint.first))
        wait(endpoint.card, "the endpoint does not answer")
        yield endpoint
        endpoint.cluster.shutdown()


def test_on_two_nodes_they_give_the_tokens_of_one_process(endpoint: Endpoint):
    with endpoint.traffic() as results:
        pass
    assert all(spec["rounds"] > 0 for _, spec, _ in results)
    actors = list_actors(endpoint.address, filters=[("state", "=", "ALIVE")])
    nodes = {kind: {a.node_id for a in actors if kind in a.class_name} for kind in ("Replica", "DrafterActor")}
    assert nodes["DrafterActor"] == {endpoint.drafter_node.node_id}
    assert len(nodes["Replica"]) == 1
    assert nodes["Replica"].isdisjoint(nodes["DrafterActor"])


def test_a_swap_leaves_streams_as_they_are_and_a_bad_one_is_refused(endpoint: Endpoint, tmp_path: Path):
    other = save_untrained_drafter(tmp_path / "other", endpoint.target)
    foreign = save_untrained_drafter(tmp_path / "foreign", endpoint.target, fingerprint="of another target")
    for drafter, served, refused in (
        (other, "other", None),
        (foreign, "other", "another target"),
        (tmp_path / "none", "other", "no drafter at"),
        (endpoint.first, "first", None),
    ):
        with endpoint.traffic():
            endpoint.deploy(str(drafter))
        wait(lambda refused=refused: (endpoint.card()["last_swap_refused"] is None) == (refused is None), str(drafter))
        assert Path(endpoint.card()["path"]).name == served
        assert (refused or "") in (endpoint.card()["last_swap_refused"] or "")
        assert endpoint.drafts()


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGSTOP], [signal.SIGSTOP, signal.SIGCONT]])
def test_a_drafter_that_dies_or_hangs_costs_drafts_and_no_token(endpoint: Endpoint, signals: list[signal.Signals]):
    pid, replaced = endpoint.drafter_pid(), sum(endpoint.card()["restarts"].values())
    with endpoint.traffic():
        os.kill(pid, signals[0])
        for further in signals[1:]:
            time.sleep(1.0)
            os.kill(pid, further)
    if len(signals) == 1:
        wait(lambda: sum(endpoint.card()["restarts"].values()) > replaced, "the drafter was not replaced")
    wait(lambda: endpoint.card()["away"] is None and endpoint.drafts(), "it does not draft again")
    assert (endpoint.drafter_pid() == pid) == (len(signals) == 2)


def test_the_drafters_node_goes_and_another_one_comes(endpoint: Endpoint):
    with endpoint.traffic():
        endpoint.cluster.remove_node(endpoint.drafter_node, allow_graceful=False)
    wait(lambda: endpoint.card()["away"] is not None, "nobody noticed")
    with endpoint.traffic() as results:
        pass
    assert all(spec["rounds"] == 0 for _, spec, _ in results)
    endpoint.drafter_node = endpoint.add_drafter_node()
    wait(lambda: endpoint.card()["away"] is None and endpoint.drafts(), "it does not draft again")
