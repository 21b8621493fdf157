"""The Serve app with target and drafter in one replica: `build` for YAML files, `run_app` for `draftloop serve`.

In: a ServeConfig, and a Ray that runs already. Out: an OpenAI-compatible endpoint on this machine.
"""
# no `from __future__ import annotations`: Serve reads the class from `build`'s annotation to turn YAML into it

import contextlib
import logging
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Literal

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import HTTPOptions

from drafters.checkpoint import CheckpointError, load_module, read_provenance
from drafters.draft_tree import MAX_TREE_NODES
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import TargetError, load_target
from drafters.target_source import SMOLLM2_NAMES
from serving.chat_options import ChatOptions, ChatOptionsError, ChatTemplate, Thinking, training_mismatch
from serving.engine.drafting import MOST_TREE_NODES, TREE_DEPTH
from serving.replica import Replica
from serving.traffic_log import TrafficLogConfig, TrafficLogError, check_folder

log = logging.getLogger(__name__)

APP_NAME = "draftloop"
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # Serve's own name for it
_SHUTDOWN_DEADLINE_S = 60.0
_SPARE_REQUESTS = 16  # beyond slots and queue, so that the app itself refuses (503) and still answers /health

Positive = Annotated[int, Field(ge=1)]


class ServeError(RuntimeError):
    """The app cannot be started; one line with cause and mend."""


class ServeConfig(BaseModel):
    """How a target is served. The keys of a Serve YAML's `args` too."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    target: str  # Hugging Face id, local folder or GGUF file
    drafter: str | None = None  # folder of the drafter; None: decode plainly
    model_name: str | None = None  # what clients ask for; None: the target's last path component
    chat_template: str | None = None  # Jinja file in place of the target's own chat template
    system: str | None = None  # a system turn for chats that have none
    thinking: Thinking = "default"  # handed to the chat template as enable_thinking
    host: str = "127.0.0.1"  # give 0.0.0.0 to be reached from other machines
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    dtype: Literal["float32", "bfloat16"] = "float32"
    backend: str = "auto"  # forward passes: auto, torch or native
    device: str = "cpu"  # cpu, or cuda: one GPU per replica
    cuda_graphs: bool = False  # with cuda: capture decoding passes and replay them
    num_slots: Positive = 8  # sequences decoded at once, per replica
    max_len: Positive = 2048  # tokens of a sequence, prompt included; cut to the target's own context
    max_waiting: Annotated[int, Field(ge=0)] = (
        64  # requests that may wait for a slot, per replica; further ones get 503
    )
    num_draft_tokens: Annotated[int, Field(ge=0)] = TREE_DEPTH  # most drafts per round, or a tree's depth; 0: none
    tree_nodes: Annotated[int, Field(ge=0, le=MAX_TREE_NODES)] = MOST_TREE_NODES  # most nodes of a tree; 0: chains
    adapt_draft_length: bool = True  # choose each sequence's number by cost, so that drafting switches itself off
    target_layer_ids: list[int] | None = None  # layers to tap beside the drafter's, for drafters swapped in later
    num_replicas: Positive = 1
    num_cpus: Annotated[float, Field(gt=0)] = 1.0  # logical CPUs that Ray sets aside per replica
    threads: Positive | None = None  # torch threads per replica; None: torch's choice
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # until the first replica must answer
    stall_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # longest wait of a request for its next token
    drain_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # running requests may finish when a replica stops
    traffic_log: TrafficLogConfig = TrafficLogConfig()  # where answered requests are kept; off without a `uri`

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.model_name or Path(self.target).expanduser().resolve().name

    def chat_options(self) -> ChatOptions:
        """The options of the prompts, with the template's text. Raises ChatOptionsError."""
        return ChatOptions.read(self.chat_template, self.system, self.thinking)

    @property
    def base_url(self) -> str:
        """Where an OpenAI client finds the endpoint on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"


def build(config: ServeConfig) -> serve.Application:
    """The app, not yet running. In a YAML: `import_path: serving.colocated:build`, `args:` as in ServeConfig."""
    resources = {"num_cpus": config.num_cpus, "num_gpus": 1 if config.device.startswith("cuda") else 0}
    deployment = serve.deployment(
        name="Replica",
        num_replicas=config.num_replicas,
        ray_actor_options=resources,
        max_ongoing_requests=config.num_slots + config.max_waiting + _SPARE_REQUESTS,
        user_config={"drafter": config.drafter},
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        health_check_timeout_s=60,
    )
    return deployment(Replica).bind(config)


def run_app(config: ServeConfig) -> str:
    """Start the app in the Ray that runs and return its base URL (`.../v1`) once it answers. Raises ServeError."""
    config = _with_absolute_paths(config)
    _check(config)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(http_options=HTTPOptions(host=config.host, port=config.port), proxy_location="HeadOnly")
        target = serve.RunTarget(target=build(config), name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait_until_running(config)
    except BaseException:  # Ctrl-C too: nothing half-started stays behind
        shutdown()
        raise
    return config.base_url


def shutdown() -> None:
    """Stop the app and Serve; Ray goes on."""
    try:
        controller = ray.get_actor(_CONTROLLER, namespace="serve")
    except ValueError:
        return
    # what serve.shutdown() does first. Without the retries that a dying controller cannot make, Ray does not print them
    with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        ray.get(controller.graceful_shutdown.options(max_task_retries=0).remote(), timeout=_SHUTDOWN_DEADLINE_S)
    serve.shutdown()


def _with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Replicas run in folders of their own."""
    found = {
        key: str(path.resolve())
        for key in ("target", "drafter", "chat_template")
        if (value := getattr(config, key)) is not None
        and value.lower() not in SMOLLM2_NAMES  # names come before folders, as in resolve_target
        and (path := Path(value).expanduser()).exists()
    }
    traffic = config.traffic_log
    if traffic.uri is not None and "://" not in traffic.uri:
        traffic = traffic.model_copy(update={"uri": str(Path(traffic.uri).expanduser().resolve())})
    return config.model_copy(update=found | {"traffic_log": traffic})


def _check(config: ServeConfig) -> None:
    """What can be known before anything starts."""
    if not ray.is_initialized():
        raise ServeError("Ray does not run in this process; call ray.init() first")
    if config.cuda_graphs and not config.device.startswith("cuda"):
        raise ServeError(f"cuda_graphs needs a CUDA device, not {config.device}; give device cuda or leave it off")
    try:
        target = load_target(config.target)
        template = ChatTemplate(target, config.chat_options())
        template.check()
        if config.drafter is not None:
            drafter = local_checkpoint(config.drafter)
            load_module(drafter, target.path)
            if differs := training_mismatch(read_provenance(drafter), template):
                log.warning("drafter %s was %s: fewer drafts may be accepted", config.drafter, differs)
        if config.traffic_log.uri is not None:
            check_folder(config.traffic_log)
    except (TargetError, CheckpointError, ChatOptionsError, TrafficLogError) as error:
        raise ServeError(str(error)) from error
    try:
        ray.get_actor(_CONTROLLER, namespace="serve")
    except ValueError:
        pass
    else:
        raise ServeError("Ray Serve runs in this cluster already; stop it (serve shutdown) or use serve deploy")
    _check_port(config.host, config.port)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            probe.bind((host, port))
    except OSError as error:
        raise ServeError(f"cannot listen on {host}:{port} ({error.strerror or error}); choose another port") from error


def _wait_until_running(config: ServeConfig) -> None:
    deadline = time.monotonic() + config.start_timeout_s
    while time.monotonic() < deadline:
        app = serve.status().applications.get(APP_NAME)
        for name, deployment in app.deployments.items() if app else ():
            if "failed to start" in deployment.message or deployment.status == "DEPLOY_FAILED":
                raise ServeError(f"{name} does not start: {_cause(deployment.message)}")
        if app and app.status == "DEPLOY_FAILED":
            raise ServeError(f"the app does not start: {_cause(app.message)}")
        if app and app.status == "RUNNING" and _answers(config):
            return
        time.sleep(0.2)
    raise ServeError(
        f"the app did not answer within {config.start_timeout_s:g} s; see Ray's serve logs, or raise start_timeout_s"
    )


def _cause(message: str) -> str:
    """The exception's own line out of Serve's report, which is a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (named or lines or ["no reason given"])[-1]


def _answers(config: ServeConfig) -> bool:
    try:
        with urllib.request.urlopen(config.base_url.removesuffix("/v1") + "/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
