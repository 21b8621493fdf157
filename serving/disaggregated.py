"""The Serve app with target and drafter apart. In a YAML: `import_path: serving.disaggregated:build`.

One replica is one placement group: a bundle for the target and one for the drafter, whose actor the replica makes. On
GPUs that is one each. Rounds travel over the replica's own socket pair, never through Ray.
"""
# no `from __future__ import annotations`: Serve reads the class from `build`'s annotation to turn YAML into it

from ray import serve

from serving.colocated import deployment_of
from serving.serve_config import Disaggregation, ServeConfig


def build(config: ServeConfig) -> serve.Application:
    """The app, not yet running; in a YAML `args:` are ServeConfig's. Raises ChatOptionsError."""
    apart = config.disaggregated or Disaggregation()
    config = config.for_replicas().model_copy(update={"disaggregated": apart})
    drafter_device = apart.drafter_device or config.device
    deployment = deployment_of(
        config,
        ray_actor_options={"resources": apart.target_resources},
        placement_group_bundles=[
            _bundle(config.num_cpus, config.device, apart.target_resources),
            _bundle(apart.drafter_cpus, drafter_device, apart.drafter_resources),
        ],
        placement_group_strategy=apart.strategy,
    )
    return deployment.bind(config)


def _bundle(cpus: float, device: str, resources: dict[str, float]) -> dict[str, float]:
    gpus = {"GPU": 1.0} if device.startswith("cuda") else {}
    return {"CPU": cpus, **gpus, **resources}
