"""Features that are computed from tokens are those of a plain forward pass, in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.target import load_model, target_fingerprint
from pipelines.features import FeatureReader, FeatureTarget
from tests.toy_mtp import TAPS, features_of
from tests.toy_target import toy_prompts


def target_of(folder: Path, **changes) -> FeatureTarget:
    fields = {
        "target": str(folder),
        "path": str(folder),
        "target_layer_ids": TAPS,
        "fingerprint": target_fingerprint(folder, TAPS),
        "backend": "torch",
        "batch": 3,
        "max_len": 64,
        "num_threads": 1,
    }
    return FeatureTarget(**(fields | changes))


def test_features_are_those_of_a_plain_pass_in_order(toy_target_dir: Path):
    model = load_model(toy_target_dir, torch.float32)
    sequences = toy_prompts(8, low=2, high=40)
    reader = FeatureReader(target_of(toy_target_dir))
    for _ in range(2):  # the engine is used again
        found = list(reader.read(sequences))
        assert len(found) == 8
        for ids, features_TF in zip(sequences, found, strict=True):
            expected = features_of(model, ids)[:-1]
            assert features_TF.dtype == torch.bfloat16
            torch.testing.assert_close(features_TF, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    assert list(reader.read([])) == []


def test_another_target_on_a_node_is_refused(toy_target_dir: Path):
    with pytest.raises(ValueError, match="differs between the driver and this node"):
        list(FeatureReader(target_of(toy_target_dir, fingerprint="f" * 32)).read([[1, 2, 3]]))
