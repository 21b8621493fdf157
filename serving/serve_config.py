"""How a target is served: the keys of a Serve YAML's `args`, and what `draftloop serve` fills from its options."""
# no `from __future__ import annotations`: Serve reads the class from `build`'s annotation to turn YAML into it

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from drafters.draft_tree import MAX_TREE_NODES
from drafters.target_source import SMOLLM2_NAMES
from serving.autoscaling import AutoscaleConfig
from serving.chat_options import ChatOptions, Thinking
from serving.engine.drafting import MOST_TREE_NODES, TREE_DEPTH
from serving.engine.memory_plan import MOST_SLOTS
from serving.engine.overlap import Overlap
from serving.traffic_log import TrafficLogConfig

Positive = Annotated[int, Field(ge=1)]


class Disaggregation(BaseModel):
    """Target and drafter in bundles of their own: one placement group and one drafter actor for each replica."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"  # of the two bundles over nodes
    target_resources: dict[str, float] = {}  # custom resources that the target's bundle takes
    drafter_resources: dict[str, float] = {}  # and the drafter's
    drafter_cpus: Annotated[float, Field(gt=0)] = 1.0  # logical CPUs that Ray sets aside for the drafter
    drafter_threads: Positive | None = None  # threads of the drafter's kernels; None: torch's choice
    drafter_device: str | None = None  # cpu, or cuda: one GPU for the drafter; None: like the target's
    draft_deadline_s: Annotated[float, Field(gt=0)] = 0.25  # a round waits so long for its drafts, then goes on plainly
    hang_timeout_s: Annotated[float, Field(gt=0)] = 10.0  # a drafter that is silent for so long is replaced
    load_timeout_s: Annotated[float, Field(gt=0)] = 300.0  # until a drafter must be loaded
    overlap: Overlap = "auto"  # draft for one half of the batch while the target verifies the other


FOLLOW = "registry"  # in place of a drafter in `user_config`: the registry's champion


class RegistryFollowing(BaseModel):
    """Which registry's champion is served, and how a new one comes into service: see `serving/rollout.py`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: str  # of one target's registry: a folder, local or s3://
    poll_s: Annotated[float, Field(gt=0)] = 15.0  # between two looks at the champion, a fifth more or less
    observe_s: Annotated[float, Field(ge=0)] = 120.0  # the first replica is observed alone for so long, then all
    min_rounds: Positive = 500  # verify rounds under either version before they are compared
    max_observe_s: Annotated[float, Field(gt=0)] = 1800.0  # with little traffic it goes on after so long
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.1  # share of live tau that a new version may lose
    report_s: Annotated[float, Field(gt=0, le=600)] = 300.0  # between two reports of what a replica serves

    @model_validator(mode="after")
    def _observes_for_a_while(self) -> "RegistryFollowing":
        if self.observe_s > self.max_observe_s:
            raise ValueError(f"observe_s {self.observe_s:g} exceeds max_observe_s {self.max_observe_s:g}; lower it")
        return self


class ServeConfig(BaseModel):
    """How a target is served. The keys of a Serve YAML's `args` too."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    target: str  # Hugging Face id, local folder or GGUF file
    drafter: str | None = None  # folder of the drafter; None: decode plainly
    registry: RegistryFollowing | None = None  # follow this registry's champion, in place of `drafter`; its uri will do
    model_name: str | None = None  # what clients ask for; None: the target's last path component
    chat_template: str | None = None  # Jinja file in place of the target's own chat template
    chat_template_text: str | None = None  # the same as text; `build` reads the file, so that replicas need none
    system: str | None = None  # a system turn for chats that have none
    thinking: Thinking = "default"  # handed to the chat template as enable_thinking
    host: str = "127.0.0.1"  # give 0.0.0.0 to be reached from other machines
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    dtype: Literal["float32", "bfloat16"] = "float32"
    backend: str = "auto"  # forward passes: auto, torch or native
    device: str = "cpu"  # cpu, or cuda: one GPU per replica
    cuda_graphs: bool = False  # with cuda: capture decoding passes and replay them
    num_slots: Positive | None = 8  # sequences decoded at once, per replica; None: as many as memory_bytes hold
    memory_bytes: Positive | None = None  # a replica's weights, slots and drafter; None: a share of what is free
    max_len: Positive = 2048  # tokens of a sequence, prompt included; cut to the target's own context
    max_waiting: Annotated[int, Field(ge=0)] = (
        64  # requests that may wait for a slot, per replica; further ones get 503
    )
    num_draft_tokens: Annotated[int, Field(ge=0)] = TREE_DEPTH  # most drafts per round, or a tree's depth; 0: none
    tree_nodes: Annotated[int, Field(ge=0, le=MAX_TREE_NODES)] = MOST_TREE_NODES  # most nodes of a tree; 0: chains
    max_prefill_stall_s: Annotated[float, Field(gt=0)] | None = 0.1  # that prompts hold up streams by, per round
    adapt_draft_length: bool = True  # choose each sequence's number by cost, so that drafting switches itself off
    target_layer_ids: list[int] | None = None  # layers to tap beside the drafter's, for drafters swapped in later
    disaggregated: Disaggregation | None = None  # None: target and drafter in one process
    sampled_drafts: bool = False  # let drafters that can sample do it: a seed's tokens then depend on the drafter
    num_replicas: Positive = 1
    autoscale: AutoscaleConfig | None = None  # as many replicas as the load wants, in place of num_replicas
    num_cpus: Annotated[float, Field(gt=0)] = 1.0  # logical CPUs that Ray sets aside per replica
    threads: Positive | None = None  # torch threads per replica; None: torch's choice
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # until the first replica must answer
    stall_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # longest wait of a request for its next token
    request_timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # of a whole answer, its wait for a replica included
    drain_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # running requests may finish when a replica stops
    page: bool = True  # a page for people at /
    api_key_file: str | None = None  # keys, one a line, of which a client must show one; on every node. None: no keys
    traffic_log: TrafficLogConfig = TrafficLogConfig()  # where answered requests are kept; off without a `uri`

    @field_validator("registry", mode="before")
    @classmethod
    def _registry_by_its_uri(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_drafter(self) -> "ServeConfig":
        if self.registry is not None and self.drafter is not None:
            raise ValueError("drafter and registry exclude each other; to pin a drafter give it in user_config")
        return self

    @model_validator(mode="after")
    def _autoscale_works(self) -> "ServeConfig":
        if self.autoscale is not None:
            if "num_replicas" in self.model_fields_set:
                raise ValueError("num_replicas and autoscale exclude each other; give autoscale.min_replicas")
            self.autoscale.check(
                num_slots=self.most_slots,
                max_waiting=self.max_waiting,
                max_len=self.max_len,
                stall_timeout_s=self.stall_timeout_s,
            )
        return self

    @property
    def most_slots(self) -> int:
        """Slots of a replica, or the most that a memory budget may give it."""
        return self.num_slots or MOST_SLOTS

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.model_name or Path(self.target).expanduser().resolve().name

    @property
    def placement(self) -> str:
        """What metrics call it: colocated, or disaggregated."""
        return "colocated" if self.disaggregated is None else "disaggregated"

    def chat_options(self) -> ChatOptions:
        """The options of the prompts, with the template's text. Raises ChatOptionsError."""
        if self.chat_template_text is not None:
            return ChatOptions(template=self.chat_template_text, system=self.system, thinking=self.thinking)
        return ChatOptions.read(self.chat_template, self.system, self.thinking)

    def for_replicas(self) -> "ServeConfig":
        """As replicas get it, in folders and on nodes of their own: absolute paths, the chat template's text."""
        changes: dict[str, Any] = {
            key: str(path.resolve())
            for key in ("target", "drafter", "api_key_file")
            if (value := getattr(self, key)) is not None
            and value.lower() not in SMOLLM2_NAMES  # names come before folders, as in resolve_target
            and (path := Path(value).expanduser()).exists()
        }
        for key, model in (("traffic_log", self.traffic_log), ("registry", self.registry)):
            if model is not None and model.uri is not None and "://" not in model.uri:
                absolute = str(Path(model.uri).expanduser().resolve())
                changes[key] = model.model_copy(update={"uri": absolute})
        if self.chat_template is not None and self.chat_template_text is None:
            changes["chat_template_text"] = self.chat_options().template or ""
        return self.model_copy(update=changes)

    @property
    def base_url(self) -> str:
        """Where an OpenAI client finds the endpoint on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"
