"""Joins the cluster that is there, or starts a quiet local one. Every command that uses Ray calls `start_ray` first."""

from __future__ import annotations

import logging
import os

import ray


def start_ray(num_cpus: int | None = None) -> None:
    """Connect to the cluster of RAY_ADDRESS (a job has it set), else start one on this machine; once per process.

    `num_cpus` are logical CPUs of a local cluster (None: the machine's, at least 4): an actor pool that takes every CPU
    would leave none for reading, so a machine of two cores still offers four.
    """
    if ray.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)  # type: ignore[arg-type]
        return
    cpus = num_cpus or max(4, os.cpu_count() or 1)
    ray.init(num_cpus=cpus, include_dashboard=False, **quiet)  # type: ignore[arg-type]
    silence_ray_data()


def silence_ray_data() -> None:
    """Keep Ray Data's own progress bars and logs off the terminal: commands show progress themselves."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
