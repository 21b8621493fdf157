"""A target's own MTP layers, read out of its files into a drafter that borrows the rest from it."""

from __future__ import annotations

from pathlib import Path

from drafters.formats import OWN
from drafters.own_mtp_layers import cache_widths, check_own_mtp, read_layers
from drafters.own_mtp_module import OwnMtpConfig, OwnMtpModule
from drafters.target import Target, shared_weights
from drafters.target_source import TargetError

LONE_LAYER_DRAFTS = 3  # that a lone layer is trained for: what is usually asked of it


def read(source: Path, target: Target) -> OwnMtpModule:
    """The target's MTP layers in the dtype of its files, bound to it.

    `source` is the target's own folder, or the word own. Raises TargetError, naming what is missing.
    """
    if str(source) != OWN and source.resolve() != target.path.resolve():
        raise TargetError(f"{source} is not the target's folder {target.path}; give {OWN} to read its own MTP layers")
    check_own_mtp(target.path, target.config)
    text = target.config.get_text_config()
    count = text.num_mtp_layers
    config = OwnMtpConfig(
        hidden_size=target.width,
        vocab_size=text.vocab_size,
        target_layer_ids=(target.num_layers - 1,),
        num_draft_tokens=LONE_LAYER_DRAFTS if count == 1 else count,
        draft_vocab_size=text.vocab_size,
        num_mtp_layers=count,
        cache_widths=cache_widths(target.config),
    )
    module = OwnMtpModule(config, target.config)
    weights = read_layers(target.path, target.config).state_dict()
    own = {name: weights[name] for name in module.state_dict() if name in weights}
    module.load_state_dict(own | {"draft_vocab_ids": module.draft_vocab_ids})
    dtype = own["layers.0.eh_proj.weight"].dtype
    module.bind(shared_weights(target.path, dtype))
    return module.to(dtype).eval().requires_grad_(False)
