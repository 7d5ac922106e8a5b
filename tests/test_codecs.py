"""Claims about coding a float32 vector and back."""

from __future__ import annotations

import numpy as np
import pytest

from islands.codecs import STORED_DTYPE, Encoded, decode, encode
from islands.types import ConfigError

CODECS = tuple(STORED_DTYPE)
SPECIAL = np.float32(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1e-45, -1e-45, 1.1e-38, 3.4e38, 70_000.0]
)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def float_of(pattern: int) -> np.float32:
    return np.uint32([pattern]).view(np.float32)[0]


def round_trip(values: np.ndarray, codec: str) -> np.ndarray:
    return decode(encode(values, codec))


def random_values(num_values: int) -> np.ndarray:
    """Return values of either sign over many orders of magnitude, none of them denormal."""
    generator = np.random.default_rng(0)
    signs = generator.choice([-1.0, 1.0], num_values)
    return (signs * 10.0 ** generator.uniform(-35, 35, num_values)).astype(np.float32)


def test_float32_is_exact() -> None:
    values = np.concatenate([SPECIAL, random_values(1000), [float_of(0x7FC12345)]])
    assert np.array_equal(bits(round_trip(values, "float32")), bits(values.astype(np.float32)))


def test_bfloat16_keeps_the_upper_half_rounded_to_nearest_with_ties_to_even() -> None:
    cases = {
        0x3F800000: 0x3F80,  # 1
        0x3F807FFF: 0x3F80,  # just below a tie
        0x3F808000: 0x3F80,  # a tie goes to the even neighbour, down
        0x3F808001: 0x3F81,  # just above it
        0x3F818000: 0x3F82,  # a tie goes to the even neighbour, up
        0x3FFFFFFF: 0x4000,  # the carry runs into the exponent
        0x7F7FFFFF: 0x7F80,  # the largest float32 is nearer to infinity
        0x00000001: 0x0000,  # denormal
        0x00008001: 0x0001,
        0x80000000: 0x8000,  # minus zero
    }
    coded = encode(np.uint32(list(cases)).view(np.float32), "bfloat16").values
    assert coded.dtype == np.uint16
    assert coded.tolist() == list(cases.values())


def test_bfloat16_has_a_relative_error_of_at_most_two_to_the_minus_eight() -> None:
    values = random_values(20_000)
    error = np.abs(round_trip(values, "bfloat16").astype(np.float64) - values) / np.abs(values)
    assert error.max() <= 2**-8
    assert error.max() > 2**-9  # the bound is the codec's, not a lax one


def test_bfloat16_equals_torch_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    patterns = np.random.default_rng(1).integers(0, 2**32, 50_000, dtype=np.uint32)
    ties = (np.arange(0, 2**16, 7, dtype=np.uint32) << 16) | np.uint32(0x8000)
    denormals = np.arange(0, 2**23, 4099, dtype=np.uint32)
    values = np.concatenate([patterns, ties, ties - 1, ties + 1, denormals]).view(np.float32)
    values = np.concatenate([values, SPECIAL])
    ours = encode(values, "bfloat16").values
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(values)
    assert np.array_equal(ours[numbers], theirs[numbers])
    # Which NaN is no part of the format: torch's vector and scalar paths differ among themselves.
    assert np.isnan(decode(Encoded("bfloat16", theirs))[~numbers]).all()
    assert np.isnan(decode(Encoded("bfloat16", ours))[~numbers]).all()


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000])
@pytest.mark.parametrize("codec", CODECS)
def test_not_a_number_stays_one_even_where_its_bits_would_carry_over(
    codec: str, pattern: int
) -> None:
    for values in (np.float32([float_of(pattern)]), np.array(float_of(pattern))):
        assert np.isnan(round_trip(values, codec)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_infinities_and_both_zeros_stay_what_they_are(codec: str) -> None:
    values = np.float32([np.inf, -np.inf, 0.0, -0.0])
    assert np.array_equal(bits(round_trip(values, codec)), bits(values))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 5), (3, 0), (2, 3, 4)])
def test_the_shape_stays(codec: str, shape: tuple[int, ...]) -> None:
    values = np.full(shape, 1.5, dtype=np.float32)
    encoded = encode(values, codec)
    assert encoded.values.shape == shape
    assert encoded.values.dtype == STORED_DTYPE[codec]
    assert decode(encoded).dtype == np.float32
    assert np.array_equal(decode(encoded), values)
    assert encoded.num_bytes == values.size * {"float32": 4, "bfloat16": 2}[codec]


@pytest.mark.parametrize("codec", CODECS)
def test_views_are_coded_by_their_values_not_by_their_memory(codec: str) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (whole.T, whole[::2, 1::3], whole[::-1], np.broadcast_to(whole[0], (3, 6))):
        assert np.array_equal(round_trip(view, codec), view)


@pytest.mark.parametrize("codec", CODECS)
def test_coding_in_pieces_is_coding_the_whole(codec: str) -> None:
    values = random_values(1000)
    pieces = [encode(values[i : i + 33], codec).values for i in range(0, 1000, 33)]
    assert np.array_equal(np.concatenate(pieces), encode(values, codec).values)


@pytest.mark.parametrize("codec", CODECS)
def test_the_coded_array_never_shares_memory_with_its_input(codec: str) -> None:
    values = np.ones(4, dtype=np.float32)
    encoded = encode(values, codec)
    values[:] = 9.0
    assert decode(encoded).tolist() == [1.0] * 4


@pytest.mark.parametrize("codec", CODECS)
def test_coding_twice_changes_nothing_more(codec: str) -> None:
    once = round_trip(random_values(500), codec)
    assert np.array_equal(round_trip(once, codec), once)


def test_an_unknown_codec_is_refused_at_both_ends() -> None:
    with pytest.raises(ConfigError, match="codec must be one of float32, bfloat16, got 'float8'"):
        encode(np.zeros(1, np.float32), "float8")
    with pytest.raises(ConfigError, match="got 'float8'"):
        decode(Encoded("float8", np.zeros(1, np.float32)))
