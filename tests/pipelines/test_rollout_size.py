"""The size said before a run, against figures worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipelines.generate_config import GenerateConfig, GenerateError
from pipelines.prompts import PromptRow
from pipelines.rollout_size import as_size, check_size, estimate_size
from pipelines.rollout_store import RolloutStore

TARGET = SimpleNamespace(num_layers=8, width=100)
CONFIG = GenerateConfig(max_new_tokens=10, num_taps=2)


def rows(*prompt_tokens: int) -> list[PromptRow]:
    return [
        PromptRow(id=f"r{i}", category="", prompt_ids=[1] * count, row_number=i + 1)
        for i, count in enumerate(prompt_tokens)
    ]


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [("bfloat16", 6 + 2 * 100 * 2), ("float32", 6 + 2 * 100 * 4), ("int8", 6 + 2 * 100 + 2 * 4)],
)
def test_size_by_hand(dtype, per_token):
    size = estimate_size(replace(CONFIG, features_dtype=dtype), TARGET, rows(5, 15))
    assert (size.rows, size.tokens) == (2, 5 + 10 + 15 + 10)
    assert size.bytes_without_features == 40 * 6 + 2 * 400
    assert size.bytes_with_features == 40 * per_token + 2 * 400
    assert size.bytes_per_token(dtype) == per_token


def test_the_line_names_every_dtype():
    size = estimate_size(replace(CONFIG, features_dtype="int8"), TARGET, rows(5, 15))
    assert str(size) == (
        "2 rows, up to 40 tokens: 9.36 kB with features, 1.04 kB without; "
        "per token with features 214 B in int8 (406 B in bfloat16, 806 B in float32)"
    )


def test_layers_given_by_number_count():
    config = replace(CONFIG, target_layer_ids=(1, 4, 7))
    assert estimate_size(config, TARGET, rows(5)).bytes_per_token("bfloat16") == 6 + 3 * 100 * 2


def test_int8_fits_where_bfloat16_does_not(tmp_path):
    store = RolloutStore(str(tmp_path))

    def check(dtype: str) -> None:
        config = replace(CONFIG, features_dtype=dtype, max_bytes=10_000)
        size = estimate_size(config, TARGET, rows(5, 15))  # 17,040 bytes, or 9,360
        check_size(config, store, missing=size, whole=size)

    check("int8")
    with pytest.raises(GenerateError, match=r"may take 17 kB, more than max_bytes 10 kB; .* store features as int8"):
        check("bfloat16")
    with pytest.raises(GenerateError, match="may take 33 kB"):
        check("float32")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1040, "1.04 kB"), (999_700, "1 MB"), (4e12, "4.0 TB")]
)
def test_sizes_in_words(num_bytes, text):
    assert as_size(num_bytes) == text


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(GenerateError, match="features_dtype is int4; give one of bfloat16, float32, int8"):
        GenerateConfig(features_dtype="int4")
    with pytest.raises(GenerateError, match="features_dtype is int8; give it with features on"):
        GenerateConfig(features_dtype="int8", with_features=False)
