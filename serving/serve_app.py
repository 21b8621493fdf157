"""The app in a Ray that runs already: check what can be known before, start it, wait until it answers, stop it.

In: a ServeConfig. Out: an OpenAI-compatible endpoint on this machine. `draftloop serve` calls it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import urllib.error
import urllib.request

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from drafters.checkpoint import CheckpointError, load_module, read_provenance
from drafters.registry import Registry, RegistryError
from drafters.remote import first_line
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import TargetError, load_target
from serving import colocated, disaggregated
from serving.chat_options import ChatOptionsError, ChatTemplate, training_mismatch
from serving.request_guards import ApiKeyError, ApiKeys
from serving.rollout_guard import REGISTRY_PATIENCE_S
from serving.serve_config import RegistryFollowing, ServeConfig
from serving.traffic_log import TrafficLogError, check_folder

log = logging.getLogger(__name__)

APP_NAME = "draftloop"
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # Serve's own name for it
_SHUTDOWN_DEADLINE_S = 60.0
_ANSWER_DEADLINE_S = 10.0  # of a replica that runs


class ServeError(RuntimeError):
    """The app cannot be started; one line with cause and mend."""


def build(config: ServeConfig) -> serve.Application:
    """The app of the config's placement, not yet running."""
    return (disaggregated if config.placement == "disaggregated" else colocated).build(config)


def run_app(config: ServeConfig) -> str:
    """Start the app in the Ray that runs and return its base URL (`.../v1`) once it answers. Raises ServeError."""
    _check(config)
    config = config.for_replicas()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        http = HTTPOptions(host=config.host, port=config.port, request_timeout_s=config.request_timeout_s)
        serve.start(http_options=http, proxy_location="HeadOnly")
        target = serve.RunTarget(target=build(config), name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait_until_running(config)
    except BaseException:  # Ctrl-C too: nothing half-started stays behind
        shutdown()
        raise
    return config.base_url


def memory_line() -> str:
    """What a replica of the running app takes."""
    return str(serve.get_app_handle(APP_NAME).memory.remote().result(timeout_s=_ANSWER_DEADLINE_S))


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
        if config.registry is not None:
            _check_registry(config.registry)
        if config.api_key_file is not None:
            ApiKeys.read(config.api_key_file)
        if config.traffic_log.uri is not None:
            check_folder(config.traffic_log)
    except (TargetError, CheckpointError, ChatOptionsError, ApiKeyError, RegistryError, TrafficLogError) as error:
        raise ServeError(str(error)) from error
    try:
        ray.get_actor(_CONTROLLER, namespace="serve")
    except ValueError:
        pass
    else:
        raise ServeError("Ray Serve runs in this cluster already; stop it (serve shutdown) or use serve deploy")
    _check_port(config.host, config.port)


def _check_registry(followed: RegistryFollowing) -> None:
    """Raises RegistryError for an address that nothing can open; one that is away may come back."""
    registry = Registry(followed.uri, patience_s=REGISTRY_PATIENCE_S)
    try:
        champion = registry.champion()
    except Exception as error:  # every file system has its own kinds
        log.warning("registry %s is away: %s", followed.uri, first_line(error))
        return
    if champion is None:
        log.warning("registry %s has no champion yet: plain decoding until one is promoted", followed.uri)


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
