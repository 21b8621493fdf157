"""The Serve app with target and drafter in one process per replica. In a YAML: `import_path: serving.colocated:build`.

`serving/disaggregated.py` is the other assembly.
"""
# no `from __future__ import annotations`: Serve reads the class from `build`'s annotation to turn YAML into it

from typing import Any

from ray import serve

from serving.replica import Replica
from serving.serve_config import FOLLOW, ServeConfig

_DRAIN_LOOK_S = 0.5  # between two looks at whether a replica that leaves has finished; what comes late goes elsewhere
_SPARE_REQUESTS = 16  # beyond slots and queue, so that the app itself refuses (503) and still answers /health


def build(config: ServeConfig) -> serve.Application:
    """The app, not yet running; in a YAML `args:` are ServeConfig's. Raises ChatOptionsError."""
    if config.disaggregated is not None:
        raise ValueError("disaggregated is set; build the app with serving.disaggregated:build, or leave it out")
    config = config.for_replicas()
    return deployment_of(config).bind(config)


def deployment_of(config: ServeConfig, **placement: Any) -> serve.Deployment:
    """The replica's deployment; `placement` are further options of it."""
    resources = {"num_cpus": config.num_cpus, "num_gpus": 1 if config.device.startswith("cuda") else 0}
    deployment = serve.deployment(
        name="Replica",
        **_scaling(config),
        ray_actor_options=resources | placement.pop("ray_actor_options", {}),
        max_ongoing_requests=config.most_slots + config.max_waiting + _SPARE_REQUESTS,
        user_config={"drafter": FOLLOW if config.registry else config.drafter},
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
        health_check_timeout_s=60,
        **placement,
    )
    return deployment(Replica)


def _scaling(config: ServeConfig) -> dict[str, Any]:
    """How many replicas, and how long one that leaves may take for the requests that it has."""
    if config.autoscale is None:
        return {"num_replicas": config.num_replicas, "graceful_shutdown_timeout_s": config.drain_timeout_s}
    return {
        "autoscaling_config": config.autoscale.for_serve(config.most_slots),
        "graceful_shutdown_timeout_s": config.autoscale.drain_timeout_s,
    }
