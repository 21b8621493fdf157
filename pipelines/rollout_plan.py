"""What a rollout set is tied to, whichever stage makes it: the target it is of, and what decides its bytes."""

from __future__ import annotations

from typing import Any

from drafters.target import Target, target_fingerprint, tokenizer_hash
from pipelines.generate_config import GenerateConfig
from pipelines.rollout_schema import RolloutMetadata, schema_version_of
from pipelines.rollout_size import tapped_layers
from serving.chat_options import ChatTemplate
from serving.engine.native_rows import NativeRows


def rollout_metadata(config: GenerateConfig, target: Target) -> RolloutMetadata:
    """What the files of a set say about their origin. Raises GenerateError for layers that do not exist."""
    layers = tapped_layers(config, target)
    return RolloutMetadata(
        target=config.target,
        target_fingerprint=target_fingerprint(target.path, layers),
        tokenizer_hash=tokenizer_hash(target.path),
        chat_template_hash=ChatTemplate(target, config.chat_options).hash,
        target_layer_ids=layers,
        schema_version=schema_version_of(config.features_dtype),
        chat_options=config.chat_options,
    )


def origin_plan(metadata: RolloutMetadata) -> dict[str, Any]:
    """What a set's plan says of its origin."""
    origin = metadata.as_json()
    del origin["code_version"]
    # named one by one where they are given (the template by its hash), so that a refusal can say in a line what differs
    options = origin.pop("chat_options", {})
    return origin | {
        name: options[name] for name in ("system", "thinking") if options.get(name) not in (None, "default")
    }


def threads_plan(config: GenerateConfig, target: Target) -> dict[str, int]:
    """The threads, where others may give other bytes: torch's do on CPUs, the native kernels' do not.

    Told from the command and the target alone, so that another machine comes to the same answer. Where "auto" falls
    back to torch for want of a compiler, it stays unsaid.
    """
    never_native = config.backend == "auto" and NativeRows.unsupported_reason(target.config) is not None
    decide = not config.gpus_per_actor and (config.backend == "torch" or never_native)
    return {"threads": config.threads} if decide else {}
