"""How tokens are chosen where a request says nothing: the target's generation config in, sampling parameters out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What the target's generation config asks for, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, generation_config: Any, *, obey_do_sample: bool = False) -> SamplingDefaults:
        """Whatever the config leaves open keeps our default. A repetition penalty is named, since it is not applied.

        `obey_do_sample`: a config that does not ask for sampling means greedy, as transformers reads it; OpenAI's
        clients expect temperature 1 instead.
        """
        penalty = getattr(generation_config, "repetition_penalty", None)
        if penalty not in (None, 1.0):
            log.warning("the target's generation config asks for repetition_penalty %s, which is not applied", penalty)
        if obey_do_sample and not getattr(generation_config, "do_sample", None):
            return cls(temperature=0.0)
        found = {name: getattr(generation_config, name, None) for name in ("temperature", "top_p", "top_k")}
        return cls(**{name: value for name, value in found.items() if value is not None})

    def chosen(self, **given: float | None) -> dict[str, Any]:
        """temperature, top_p and top_k of a request that gave some of them; None means not given."""
        chosen: dict[str, Any] = vars(self) | {name: value for name, value in given.items() if value is not None}
        return chosen | {"top_k": max(0, chosen["top_k"])}
