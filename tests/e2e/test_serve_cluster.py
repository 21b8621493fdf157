"""`serve deploy` of target and drafter on nodes of their own, then swaps, kills, hangs and the loss of a node.

Every answer of every request is compared with plain decoding in this process: the drafter may cost time, never a token.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from ray.util.state import list_actors

from benchmarks.serve_cluster import ServeCluster, quick_to_notice_deaths, wait
from drafters.target import load_target
from serving.engine.build import build_engine
from serving.engine.sampling import Sampling
from tests.serving.test_replica import save_untrained_drafter
from tests.toy_folder import save_toy_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

NUM_TOKENS, DEADLINE_S = 400, 90.0
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.9},
]


def answered(look: Callable[[], Any]) -> Any:
    """What a look at the endpoint finds, once it finds something."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := look()) in (None, {}):
        assert time.monotonic() < deadline, "the endpoint does not answer"
        time.sleep(0.2)
    return found


class Endpoint(ServeCluster):
    """With a toy target, and clients that know what it should say."""

    def __init__(self, folder: Path):
        self.target = save_toy_target(folder / "apart", max_position_embeddings=2048, eos_token_id=None)
        self.first = save_untrained_drafter(folder / "first", self.target)
        args = {"num_slots": 4, "max_len": 1024, "threads": 1, "adapt_draft_length": False}
        limits = {"draft_deadline_s": 0.5, "hang_timeout_s": 8.0}
        paths = {"target": str(self.target), "drafter": str(self.first)}
        self.expected = self._plain()
        super().__init__(folder, paths | args | {"disaggregated": limits})

    def _plain(self) -> list[str]:
        target = load_target(str(self.target))
        engine = build_engine(target.path, num_slots=1, max_len=1024)
        prompt = target.tokenizer.encode("hello")
        tokens = [
            engine.generate([prompt], Sampling(max_new_tokens=NUM_TOKENS, **request))[0].token_ids
            for request in REQUESTS
        ]
        return [target.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd") for ids in tokens]

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

    def card(self) -> dict[str, Any]:
        """Of an endpoint that is there: a slow answer is waited for."""
        return answered(super().card)

    def swaps(self) -> float:
        return float(answered(lambda: self.metric("drafter_swaps_total")))

    def drafts(self) -> bool:
        return self.ask(0)[1]["rounds"] > 0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with quick_to_notice_deaths():
        endpoint = Endpoint(tmp_path_factory.mktemp("endpoint"))
        try:
            endpoint.deploy(str(endpoint.first))
            wait(lambda: endpoint.get("/v1/models"), "the endpoint does not answer")
            yield endpoint
        finally:
            endpoint.close()


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
    others = [save_untrained_drafter(tmp_path / f"taps{i}", endpoint.target, taps=(0, 1)) for i in range(2)]
    for drafter, served, refused in (
        (other, "other", None),
        (foreign, "other", "another target"),
        (tmp_path / "none", "other", "no drafter at"),
        *((each, "other", "taps layers") for each in others),  # loaded beside the one at work, then of no use
        (endpoint.first, "first", None),
    ):
        swaps = endpoint.swaps()
        with endpoint.traffic():
            endpoint.deploy(str(drafter))
        wait(lambda swaps=swaps: endpoint.swaps() > swaps, str(drafter))
        assert (endpoint.card()["last_swap_refused"] is None) == (refused is None)
        assert Path(endpoint.card()["path"]).name == served
        assert (refused or "") in (endpoint.card()["last_swap_refused"] or "")
        assert endpoint.drafts()


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGSTOP], [signal.SIGSTOP, signal.SIGCONT]])
def test_a_drafter_that_dies_or_hangs_costs_drafts_and_no_token(endpoint: Endpoint, signals: list[signal.Signals]):
    (pid,), replaced = endpoint.pids("DrafterActor"), sum(endpoint.card()["restarts"].values())
    with endpoint.traffic():
        os.kill(pid, signals[0])
        for further in signals[1:]:
            time.sleep(1.0)
            os.kill(pid, further)
    if len(signals) == 1:
        wait(lambda: sum(endpoint.card()["restarts"].values()) > replaced, "the drafter was not replaced")
    wait(lambda: endpoint.card()["away"] is None and endpoint.drafts(), "it does not draft again")
    assert (endpoint.pids("DrafterActor") == [pid]) == (len(signals) == 2)


def test_the_drafters_node_goes_and_another_one_comes(endpoint: Endpoint):
    with endpoint.traffic():
        endpoint.cluster.remove_node(endpoint.drafter_node, allow_graceful=False)
    wait(lambda: endpoint.card()["away"] is not None, "nobody noticed")
    with endpoint.traffic() as results:
        pass
    assert all(spec["rounds"] == 0 for _, spec, _ in results)
    endpoint.drafter_node = endpoint.add_drafter_node()
    wait(lambda: endpoint.card()["away"] is None and endpoint.drafts(), "it does not draft again")
