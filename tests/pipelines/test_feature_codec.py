"""Features as bytes: the bits where they are kept, half a scale where they are quantised."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipelines.feature_codec import FEATURE_DTYPES, EncodedFeatures, bytes_per_token, decode_features, encode_features


def decoded(encoded: EncodedFeatures) -> Tensor:
    return decode_features(encoded.data, encoded.dtype, encoded.shape, encoded.scale)


def test_int8_by_hand():
    """Two tokens, two taps of two: each of the four gets a scale of its own."""
    features = torch.tensor([[1.0, -127.0, 0.25, 0.1], [0.0, 0.0, -254.0, 3.0]])
    encoded = encode_features(features, "int8", taps=2)
    assert (encoded.dtype, encoded.shape) == ("int8", (2, 4))
    # 0.1 / (0.25 / 127) = 50.8; 3 / 2 = 1.5, to the even neighbour
    assert np.frombuffer(encoded.data, "i1").tolist() == [1, -127, 127, 51, 0, 0, -127, 2]
    assert np.frombuffer(encoded.scale, "<f4").tolist() == [1.0, np.float32(0.25 / 127), 0.0, 2.0]
    expected = torch.tensor([[1.0, -127.0, 0.25, 51 * 0.25 / 127], [0.0, 0.0, -254.0, 4.0]])
    back = decoded(encoded)
    assert back.dtype == torch.float32
    torch.testing.assert_close(back, expected, rtol=1e-6, atol=0)


def test_scales_lie_row_by_row_as_little_endian_floats():
    features = torch.tensor([[127.0, 254.0], [508.0, 1016.0]])
    assert encode_features(features, "int8", taps=2).scale == np.array([1, 2, 4, 8], "<f4").tobytes()
    assert encode_features(features, "int8", taps=2).data == bytes([127] * 4)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    shape=st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 6)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_no_element_is_off_by_more_than_half_its_scale(seed, shape, dtype):
    """Taps of any magnitude, side by side; the last 1e-5 is float32's own rounding."""
    tokens, taps, width = shape
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10.0 ** torch.randint(-20, 30, (tokens, taps, 1), generator=generator)
    features = (torch.randn(shape, generator=generator) * magnitude).flatten(1).to(dtype)
    encoded = encode_features(features, "int8", taps=taps)
    scale = torch.from_numpy(np.frombuffer(encoded.scale, "<f4").copy()).reshape(tokens, taps, 1)
    error = (decoded(encoded) - features.float()).unflatten(1, (taps, width)).abs()
    assert bool((error <= scale / 2 * (1 + 1e-5) + scale * 127 * 1e-6).all())
    assert encode_features(features.clone(), "int8", taps=taps) == encoded


def test_one_scale_for_all_taps_would_lose_the_small_ones():
    features = torch.tensor([[1000.0, 500.0, 0.001, 0.0005]])
    assert decoded(encode_features(features, "int8", taps=1))[0, 2:].tolist() == [0.0, 0.0]
    kept = decoded(encode_features(features, "int8", taps=2))[0, 2:]
    torch.testing.assert_close(kept, features[0, 2:], rtol=0.01, atol=0)


def test_what_float32_has_no_digits_for_counts_as_zero():
    features = torch.tensor([[1e-39, -1e-38, 0.0], [1e-30, -2e-30, 0.0]])
    back = decoded(encode_features(features, "int8"))
    assert back[0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(back[1], features[1], rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_no_tokens_are_no_bytes(dtype):
    encoded = encode_features(torch.zeros(0, 6), dtype, taps=3)
    assert (encoded.data, encoded.shape) == (b"", (0, 6))
    assert decoded(encoded).shape == (0, 6)


def test_the_other_dtypes_keep_what_they_hold():
    features = torch.tensor([[1.0, 1.00390625, -0.0, 3e38]])  # the second has one digit more than bfloat16
    assert torch.equal(decoded(encode_features(features)), features)
    rounded = decoded(encode_features(features, "bfloat16"))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, features.bfloat16())
    widened = decoded(encode_features(features.bfloat16(), "float32"))
    assert torch.equal(widened, features.bfloat16().float())


def test_decoded_features_own_their_memory():
    for dtype in FEATURE_DTYPES:
        encoded = encode_features(torch.ones(2, 2), dtype)
        data = bytearray(encoded.data)
        back = decode_features(data, dtype, encoded.shape, encoded.scale)
        data[:] = bytes(len(data))
        assert back.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_quantised(bad):
    with pytest.raises(ValueError, match="not finite"):
        encode_features(torch.tensor([[1.0, bad]]), "int8")


@pytest.mark.parametrize(
    ("features", "dtype", "taps", "message"),
    [
        (torch.zeros(2, 4), "int4", 1, "cannot be stored as int4"),
        (torch.zeros(2, 4, dtype=torch.float16), None, 1, "cannot be stored as float16"),
        (torch.zeros(2, 4, dtype=torch.int8), None, 1, "cannot be stored as int8"),
        (torch.zeros(4), "int8", 1, "cannot be stored"),
        (torch.zeros(2, 4), "int8", 3, "not those of 3 layers"),
        (torch.zeros(2, 4), "int8", 0, "not those of 0 layers"),
    ],
)
def test_what_cannot_be_encoded_is_refused(features, dtype, taps, message):
    with pytest.raises(ValueError, match=message):
        encode_features(features, dtype, taps=taps)


def test_what_cannot_be_decoded_is_refused():
    with pytest.raises(ValueError, match="int4"):
        decode_features(b"", "int4", [0, 1])
    with pytest.raises(ValueError, match="without their scales"):
        decode_features(b"\0", "int8", [1, 1])
    with pytest.raises(ValueError, match="reshape"):
        decode_features(b"\0\0", "int8", [1, 1], b"\0\0\0\0")


def test_bytes_per_token_by_hand():
    assert bytes_per_token("bfloat16", 5, 576) == 5760
    assert bytes_per_token("float32", 5, 576) == 11520
    assert bytes_per_token("int8", 5, 576) == 2880 + 20
    for dtype in FEATURE_DTYPES:
        encoded = encode_features(torch.ones(3, 8), dtype, taps=2)
        assert 3 * bytes_per_token(dtype, 2, 4) == len(encoded.data) + len(encoded.scale or b"")
