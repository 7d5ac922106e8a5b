"""Claims about the byte GPT, its loss and its sampling."""

from __future__ import annotations

import math

import pytest
import torch

from islands.model import ModelShape, build_model, generate, loss
from islands.types import ConfigError

torch.set_num_threads(1)
TINY = ModelShape(width=16, num_layers=2, num_heads=2, context=8)


def random_batch(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(1))


def test_a_tied_head_is_the_same_parameter_as_the_embedding() -> None:
    names = [name for name, _ in build_model(TINY, 0).named_parameters()]
    assert len(names) == len(set(names)) == 3 + 2 * 6
    assert "head" not in names
    untied = build_model(ModelShape(width=16, num_heads=2, context=8, tied=False), 0)
    assert [name for name, _ in untied.named_parameters() if name not in names] == ["head"]


def test_the_number_of_parameters_is_the_hand_computed_one() -> None:
    # Embeddings (256 + 64) * 64, final gain 64; per layer 2 gains of 64, 12 matrices 64 * 64.
    expected = (256 + 64) * 64 + 64 + 2 * (2 * 64 + 12 * 64 * 64)
    assert sum(p.numel() for p in build_model(ModelShape(), 0).parameters()) == expected == 119_104


@pytest.mark.parametrize("tied", [True, False])
def test_an_untrained_model_is_about_as_good_as_guessing(tied: bool) -> None:
    model = build_model(ModelShape(tied=tied), 0)
    value = loss(model, random_batch(8, 65)).item()
    # A normalised stream against rows of unit length gives logits of variance 1; half of it is the excess over ln 256.
    # Tied, a byte's own row stands out by width**0.5 = 8 where the stream still is that row.
    assert math.log(256) < value < math.log(256) + (2.5 if tied else 0.7)


def test_the_loss_is_the_mean_over_every_byte_but_the_first() -> None:
    model = build_model(TINY, 0)
    batch = random_batch(3, 9)
    chances = model(batch[:, :-1]).softmax(-1)
    slow = [
        -math.log(chances[row, column, batch[row, column + 1]].item())
        for row in range(3)
        for column in range(8)
    ]
    assert loss(model, batch).item() == pytest.approx(sum(slow) / 24, rel=1e-5)


def test_no_byte_sees_a_later_one() -> None:
    model = build_model(TINY, 0)
    tokens = random_batch(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-4)


def test_weights_follow_from_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (build_model(TINY, seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding"], other["token_embedding"])


def test_weights_start_at_the_scale_that_keeps_activations() -> None:
    weights = build_model(ModelShape(width=128, num_layers=2), 0).state_dict()
    # 1 / sqrt(inputs); what is added to the stream, a further 1 / sqrt(2 * 2 layers) smaller.
    assert weights["token_embedding"].std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert weights["blocks.0.qkv"].std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert weights["blocks.1.attention_out"].std().item() == pytest.approx(
        0.5 * 128**-0.5, rel=0.03
    )
    assert weights["blocks.1.mlp_out"].std().item() == pytest.approx(0.5 * 512**-0.5, rel=0.03)


def test_every_parameter_gets_a_gradient() -> None:
    model = build_model(TINY, 0)
    loss(model, random_batch(2, 9)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_batch_learned_by_heart_is_continued_by_heart() -> None:
    text = b"abcdefgh"
    model = build_model(TINY, 0)
    batch = torch.tensor([list(text + b"a")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
    assert value.item() < 0.05
    assert generate(model, b"a", num_bytes=7, temperature=0, seed=0) == text[1:]


def test_generation_is_reproducible_and_follows_the_seed() -> None:
    model = build_model(TINY, 0)
    state = torch.get_rng_state()
    first, again, other = (
        generate(model, b"once", num_bytes=30, temperature=1.0, seed=seed) for seed in (5, 5, 6)
    )
    assert len(first) == 30  # well past the context of 8
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_an_empty_prompt_is_a_lines_end() -> None:
    model = build_model(TINY, 0)
    empty, line = (
        generate(model, prompt, num_bytes=9, temperature=1.0, seed=5) for prompt in (b"", b"\n")
    )
    assert empty == line


@pytest.mark.parametrize("temperature", [-1.0, math.nan])
def test_a_senseless_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature must be >= 0"):
        generate(build_model(TINY, 0), b"a", num_bytes=1, temperature=temperature, seed=0)


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiple of num_heads \(3\), got 64"):
        ModelShape(num_heads=3)
    with pytest.raises(ConfigError, match="every size of a model must be >= 1"):
        ModelShape(num_layers=0)
