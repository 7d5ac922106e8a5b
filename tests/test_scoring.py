"""Claims about bits per byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from islands.model import ByteGPT, ModelShape, build_model
from islands.scoring import bits_per_byte
from islands.types import ConfigError

torch.set_num_threads(1)
CONTEXT = 8


def tiny_model() -> ByteGPT:
    return build_model(ModelShape(width=16, num_heads=2, context=CONTEXT), 0)


def random_text(num_bytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)


def slow_bits(model: ByteGPT, tokens: np.ndarray) -> list[float]:
    """Return each byte's bits but the first one's, one forward pass per byte."""
    bits = []
    for place in range(1, len(tokens)):
        window = tokens[(place - 1) // CONTEXT * CONTEXT : place].astype(np.int64)
        with torch.no_grad():
            chances = model(torch.from_numpy(window)[None])[0, -1].softmax(-1)
        bits.append(-math.log2(chances[int(tokens[place])].item()))
    return bits


def test_a_uniform_predictor_needs_eight_bits() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.final_norm.zero_()  # every logit is zero
    score = bits_per_byte(model, random_text(100), context=CONTEXT, max_bytes=100)
    assert score == pytest.approx(8.0, abs=1e-6)


@pytest.mark.parametrize("num_bytes", [2, 8, 9, 10, 41, 47])
def test_each_byte_but_the_first_is_scored_once(num_bytes: int) -> None:
    model, text = tiny_model(), random_text(num_bytes)
    expected = sum(slow_bits(model, text)) / (num_bytes - 1)
    score = bits_per_byte(model, text, context=CONTEXT, max_bytes=1000, batch_size=2)
    assert score == pytest.approx(expected, rel=1e-5)


def test_max_bytes_scores_the_first_ones_alone() -> None:
    model, text = tiny_model(), random_text(100)
    expected = sum(slow_bits(model, text[:31])) / 30
    score = bits_per_byte(model, text, context=CONTEXT, max_bytes=30)
    assert score == pytest.approx(expected, rel=1e-5)


def test_the_score_repeats_exactly_and_does_not_depend_on_the_batch_size() -> None:
    model, text = tiny_model(), random_text(500)
    first, again = (bits_per_byte(model, text, context=CONTEXT, max_bytes=400) for _ in range(2))
    assert first == again
    other = bits_per_byte(model, text, context=CONTEXT, max_bytes=400, batch_size=7)
    assert other == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored_and_no_gradient_kept(training: bool) -> None:
    model = tiny_model().train(training)
    bits_per_byte(model, random_text(50), context=CONTEXT, max_bytes=50)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_text_with_nothing_to_score_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must have >= 2 bytes .* got 1 and 10"):
        bits_per_byte(tiny_model(), random_text(1), context=CONTEXT, max_bytes=10)
    with pytest.raises(ConfigError, match="max_bytes must be >= 1, got 9 and 0"):
        bits_per_byte(tiny_model(), random_text(9), context=CONTEXT, max_bytes=0)
