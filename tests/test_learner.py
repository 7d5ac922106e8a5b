"""Claims about a learner: what it hands out, what it takes over, and how it goes on after a stop or a death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from islands import turns
from islands.fragments import lay_out, pseudo_gradient
from islands.landing import landed
from islands.learner import (
    Base,
    Learner,
    adamw,
    embedding_names,
    flatten,
    trainable,
    unflatten,
)
from islands.merging import nesterov_step
from islands.schedule import Schedule, learning_rate_at
from islands.types import FragmentLayout, FragmentMismatch, Position

SCHEDULE = Schedule(peak=0.05, total_tokens=1000, warmup_fraction=0.1, final_fraction=0.1)
TOKENS, SAMPLES = 8, 2


class Tied(nn.Module):
    """An embedding that is also the head, a norm with statistics, a frozen and an unused layer, odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.mixer = nn.Parameter(torch.randn(4, 4).t())
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.middle(self.table(tokens)) @ self.mixer * self.gain + self.cache)
        return self.head(self.frozen(hidden))


class Sliced(nn.Module):
    """A weight that is every second column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8)[:, ::2])


class Line(nn.Module):
    """Two scalars' worth of model: its loss pulls `w` to a target."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0]))


def layouts_for(model: nn.Module, num_fragments: int) -> tuple[FragmentLayout, ...]:
    shapes = {name: tuple(parameter.shape) for name, parameter in trainable(model).items()}
    return lay_out(shapes, embeddings=embedding_names(model), num_fragments=num_fragments)


def a_learner(
    model: nn.Module | None = None,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    num_fragments: int = 2,
    seed: int = 0,
) -> Learner:
    if model is None:
        torch.manual_seed(seed)
        model = Tied()

    def prediction_loss(tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 5)

    return Learner(
        "east",
        model,
        adamw(model, learning_rate=0.05, betas=(0.9, 0.95), weight_decay=0.1),
        loss or prediction_loss,
        layouts=layouts_for(model, num_fragments),
        schedule=SCHEDULE,
        clip_norm=1.0,
        period_steps=6,
    )


def batch_at(cursor: int) -> Tensor:
    return torch.randint(0, 5, (TOKENS,), generator=torch.Generator().manual_seed(cursor))


def train(learner: Learner, num_steps: int) -> list[float]:
    return [
        learner.step(batch_at(learner.cursor), num_tokens=TOKENS, num_samples=SAMPLES)
        for _ in range(num_steps)
    ]


def bases_of(learner: Learner, version: int = 0) -> list[Base]:
    """Return the learner's present values as published versions."""
    return [
        Base(version, f"digest-{version}", learner.local_values(p))
        for p in range(len(learner.layouts))
    ]


def started(learner: Learner | None = None) -> Learner:
    learner = learner or a_learner()
    learner.begin(bases_of(learner), incarnation=0)
    return learner


def all_values(learner: Learner) -> bytes:
    return b"".join(learner.local_values(p).tobytes() for p in range(len(learner.layouts)))


def all_moments(learner: Learner) -> bytes:
    state = learner.state("")
    return (
        b"".join(vector.tobytes() for vector in (*state.first, *state.second))
        + repr(state.tensor_steps).encode()
    )


def model_of(learner: Learner) -> Tied:
    assert isinstance(learner.model, Tied)
    return learner.model


# --- what belongs to a fragment


def test_a_tied_weight_is_exchanged_once_and_frozen_ones_and_buffers_never() -> None:
    model = Tied()
    placed = [spec.name for layout in layouts_for(model, 3) for spec in layout.tensors]
    assert sorted(placed) == sorted(
        [
            *("table.weight", "middle.weight", "middle.bias", "norm.weight", "norm.bias"),
            *("unused.weight", "unused.bias", "gain", "nothing", "mixer"),
        ]
    )
    assert embedding_names(model) == {"table.weight"}


def test_an_embedding_is_known_by_its_kind_or_by_its_name_also_where_a_tie_renames_it() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 5, bias=False)
            self.table = nn.Embedding(5, 4)
            self.table.weight = self.head.weight
            self.position_embedding = nn.Parameter(torch.zeros(3, 4))
            self.other = nn.Parameter(torch.zeros(3, 4))

    assert embedding_names(Renamed()) == {"head.weight", "position_embedding"}


def test_flattening_reads_values_in_layout_order_whatever_their_memory() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    parameters = {"a": matrix.t(), "b": torch.tensor(9.0), "c": torch.zeros(0)}
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    (layout,) = lay_out(shapes, embeddings=(), num_fragments=1)
    assert flatten(layout, parameters).tolist() == [0, 3, 1, 4, 2, 5, 9]
    unflatten(layout, np.arange(7, dtype=np.float32) * 2, parameters)
    assert matrix.tolist() == [[0, 4, 8], [2, 6, 10]]
    assert parameters["b"].item() == 12


def test_values_that_do_not_fit_the_layout_are_refused() -> None:
    (layout,) = lay_out({"a": (2, 3)}, embeddings=(), num_fragments=1)
    with pytest.raises(FragmentMismatch, match=r"a has shape \(3, 2\), the layout says \(2, 3\)"):
        flatten(layout, {"a": torch.zeros(3, 2)})
    with pytest.raises(FragmentMismatch, match="has 6 elements"):
        unflatten(layout, np.zeros(5, np.float32), {"a": torch.zeros(2, 3)})


# --- pushing


def test_one_island_with_outer_rate_one_and_no_momentum_lands_on_its_own_weights() -> None:
    learner = started()
    train(learner, 4)
    for p in range(2):
        copy = learner.copy(p, next_push_steps=6)
        delta = pseudo_gradient(copy.anchor, copy.local)
        merged, _ = nesterov_step(
            copy.anchor, np.zeros_like(delta), delta, learning_rate=1.0, momentum_factor=0.0
        )
        np.testing.assert_allclose(merged, learner.local_values(p), rtol=1e-6, atol=1e-7)
        assert not np.array_equal(copy.anchor, copy.local)


def test_a_copy_says_what_it_covers() -> None:
    learner = started()
    train(learner, 3)
    learner.copy(0, next_push_steps=6)
    learner.adopt(0, Base(1, "one", learner.local_values(0)), alpha=0.0, next_push_steps=6)
    train(learner, 2)
    copy = learner.copy(0, next_push_steps=6)
    assert (copy.base_version, copy.base_digest) == (1, "one")
    assert (copy.start, copy.stop) == (Position(0, 3), Position(0, 5))
    assert (copy.num_tokens, copy.num_steps, copy.offered_before) == (2 * TOKENS, 2, 3 * TOKENS)
    other = learner.copy(1, next_push_steps=6)
    assert (other.base_version, other.num_steps, other.offered_before) == (0, 5, 0)


def test_a_copy_is_private() -> None:
    learner = started()
    train(learner, 2)
    copy = learner.copy(0, next_push_steps=6)
    anchor, local = copy.anchor.copy(), copy.local.copy()
    train(learner, 3)
    learner.adopt(0, Base(1, "", np.zeros_like(local)), alpha=0.5, next_push_steps=6)
    train(learner, 1)
    assert np.array_equal(copy.anchor, anchor)
    assert np.array_equal(copy.local, local)


def due(learner: Learner) -> list[int]:
    return turns.due(learner.clocks, blocks=False)


def test_fragments_fall_due_spread_out_at_first_and_by_the_adoption_beat_later() -> None:
    learner = started()
    assert due(learner) == []
    # Two fragments, period 6: after 3 steps and after 6.
    assert [(train(learner, 1), due(learner))[1] for _ in range(3)] == [[], [], [0]]
    learner.copy(0, next_push_steps=6)
    assert due(learner) == []
    train(learner, 3)
    assert due(learner) == [1]
    learner.adopt(1, bases_of(learner, 1)[1], alpha=0.0, next_push_steps=0)
    assert due(learner) == []  # nothing is open, so there is nothing to push
    train(learner, 1)
    assert due(learner) == [1]


# --- adopting


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.0, [5.0, 9.0]),  # the published values
        (0.25, [4.0, 6.0]),  # 0.75 * 5 + 0.25 * 1, 0.75 * 9 + 0.25 * -3
        (1.0, [1.0, -3.0]),  # the local values
    ],
)
def test_adoption_mixes_published_and_local_values(alpha: float, expected: list[float]) -> None:
    learner = a_learner(Line(), num_fragments=1)
    started(learner)
    with torch.no_grad():
        learner.model.w.copy_(torch.tensor([1.0, -3.0]))
    learner.adopt(0, Base(1, "one", np.float32([5, 9])), alpha=alpha, next_push_steps=6)
    assert learner.local_values(0).tolist() == expected
    # Whatever the mix, the next delta is measured from what was published.
    assert learner.copy(0, next_push_steps=6).anchor.tolist() == [5.0, 9.0]
    assert learner.clock(0).base_version == 1


def test_adoption_leaves_moments_learning_rate_and_other_fragments_alone() -> None:
    learner = started()
    train(learner, 3)
    moments, other = all_moments(learner), learner.local_values(1)
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    values = learner.local_values(0) + np.float32(1)
    learner.adopt(0, Base(1, "one", values), alpha=0.0, next_push_steps=6)
    assert np.array_equal(learner.local_values(0), values)
    assert all_moments(learner) == moments
    assert np.array_equal(learner.local_values(1), other)
    assert [group["lr"] for group in learner.optimizer.param_groups] == rates
    train(learner, 1)
    expected = learning_rate_at(3 * TOKENS, SCHEDULE)
    assert [group["lr"] for group in learner.optimizer.param_groups] == [expected] * 2


def test_adoption_keeps_the_tie_the_frozen_layer_and_every_buffer() -> None:
    learner = started()
    model = model_of(learner)
    frozen = [parameter.clone() for parameter in model.frozen.parameters()]
    train(learner, 3)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert buffers["norm.num_batches_tracked"].item() == 3
    for p, base in enumerate(bases_of(learner, 1)):
        learner.adopt(p, replace(base, values=base.values * 2), alpha=0.0, next_push_steps=6)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
        assert buffer.dtype == buffers[name].dtype
    assert model.head.weight is model.table.weight
    for parameter, before in zip(model.frozen.parameters(), frozen, strict=True):
        assert torch.equal(parameter, before)


def test_what_is_adopted_is_not_shared_with_the_model() -> None:
    learner = started()
    base = bases_of(learner, 1)[0]
    before = base.values.copy()
    learner.adopt(0, base, alpha=0.0, next_push_steps=6)
    train(learner, 2)
    assert np.array_equal(base.values, before)


# --- going on


def test_training_counts_tokens_samples_and_steps() -> None:
    learner = started()
    train(learner, 5)
    assert (learner.trained, learner.cursor, learner.position) == (5 * TOKENS, 10, Position(0, 5))
    record = learner.record("before")
    assert all(clock.trained == record.trained for clock in record.clocks)


def test_a_step_that_fails_counts_nothing() -> None:
    def failing(batch: Tensor) -> Tensor:
        raise RuntimeError("no batch")

    learner = started(a_learner(Line(), loss=failing, num_fragments=1))
    with pytest.raises(RuntimeError, match="no batch"):
        train(learner, 1)
    assert (learner.trained, learner.position) == (0, Position(0, 0))


def test_a_parameter_no_loss_reaches_has_no_moments_and_stays_where_it_is() -> None:
    learner = started()
    before = model_of(learner).unused.weight.clone()
    train(learner, 3)
    state = learner.state("")
    steps = {
        spec.name: count
        for layout, counts in zip(learner.layouts, state.tensor_steps, strict=True)
        for spec, count in zip(layout.tensors, counts, strict=True)
    }
    assert {name for name, count in steps.items() if count == 0} == {
        "unused.weight",
        "unused.bias",
        "nothing",
    }
    assert set(steps.values()) == {0, 3}
    assert torch.equal(model_of(learner).unused.weight, before)


def restored(state_of: Learner, model_seed: int = 99) -> Learner:
    """Return a fresh learner, of other initial weights, restored from the state of another."""
    state = state_of.state("link")
    anchors = [state_of.copy(p, next_push_steps=6).anchor for p in range(len(state_of.layouts))]
    fresh = a_learner(seed=model_seed)
    # Frozen weights are what the model's builder makes; here the seeds differ on purpose.
    outside = {
        name: value
        for name, value in state_of.model.state_dict().items()
        if name.startswith("frozen")
    }
    fresh.model.load_state_dict(outside, strict=False)
    fresh.restore(state, anchors)
    return fresh


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_a_restored_learner_goes_on_bit_for_bit(num_before: int) -> None:
    straight = started()
    train(straight, num_before)
    other = restored(straight)
    assert train(other, 5) == train(straight, 5)
    assert all_values(other) == all_values(straight)
    assert all_moments(other) == all_moments(straight)
    assert (other.trained, other.cursor, other.position) == (
        straight.trained,
        straight.cursor,
        straight.position,
    )
    assert model_of(other).head.weight is model_of(other).table.weight
    for (name, ours), (_, theirs) in zip(
        other.model.named_buffers(), straight.model.named_buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_restoring_takes_away_moments_the_state_does_not_have() -> None:
    cold, warm = started(), started()
    state = cold.state("")
    train(warm, 3)
    warm.restore(state, [base.values for base in bases_of(cold)])
    assert all(set(counts) == {0} for counts in warm.state("").tensor_steps)
    assert all_values(warm) == all_values(cold)


def test_a_state_is_private() -> None:
    learner = started()
    train(learner, 2)
    state = learner.state("")
    vectors = (*state.values, *state.first, *state.second)
    before = [vector.copy() for vector in vectors]
    train(learner, 2)
    fresh = a_learner(seed=1)
    fresh.restore(state, [base.values for base in bases_of(learner)])
    train(fresh, 2)
    for vector, kept in zip(vectors, before, strict=True):
        assert np.array_equal(vector, kept)


def test_moments_lie_in_memory_as_their_weights_do() -> None:
    learner = started()
    train(learner, 2)
    fresh = restored(learner)
    for parameter, state in fresh.optimizer.state.items():
        assert state["exp_avg"].stride() == parameter.stride()
        assert state["exp_avg_sq"].stride() == parameter.stride()
        assert state["step"].device == parameter.device


def test_on_the_cpu_a_loss_is_read_in_its_own_step_and_a_copy_is_at_hand() -> None:
    seen: list[Tensor] = []
    torch.manual_seed(0)
    model = Tied()

    def loss(tokens: Tensor) -> Tensor:
        seen.append(nn.functional.cross_entropy(model(tokens), (tokens + 1) % 5))
        return seen[-1]

    learner = started(a_learner(model, loss=loss))
    assert train(learner, 3) == [one.item() for one in seen]
    copy = learner.copy(0, next_push_steps=6)
    assert isinstance(copy.local, np.ndarray)
    assert landed(copy.local) is copy.local


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5])
def test_adoption_computes_as_numpy_does_in_float32(alpha: float) -> None:
    learner = started()
    train(learner, 2)
    local, public = learner.local_values(0), learner.local_values(0)[::-1].copy()
    learner.adopt(0, Base(1, "one", public), alpha=alpha, next_push_steps=6)
    mixed = np.float32(1 - alpha) * public + np.float32(alpha) * local
    assert np.array_equal(learner.local_values(0), mixed)


@pytest.mark.parametrize("make", [Sliced, Tied])
def test_a_weight_that_is_a_view_is_trained_like_a_plain_one(make: type[nn.Module]) -> None:
    """The twin is AdamW's plainest form over contiguous clones."""
    torch.manual_seed(0)
    model = make()
    learned = trainable(model)
    plain = {
        name: nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
        for name, parameter in learned.items()
    }
    ours = adamw(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    twin = torch.optim.AdamW(
        plain.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, foreach=False, fused=False
    )
    for _ in range(3):
        for parameters, optimizer in ((learned, ours), (plain, twin)):
            optimizer.zero_grad()
            total = sum(
                (torch.sin(p) * torch.arange(1.0, p.numel() + 1).reshape(p.shape)).sum()
                for p in parameters.values()
            )
            total.backward()
            optimizer.step()
    for name, parameter in learned.items():
        torch.testing.assert_close(parameter, plain[name], rtol=1e-5, atol=1e-6)


def test_vectors_and_scalars_are_not_decayed() -> None:
    optimizer = adamw(Tied(), learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    decay = {
        parameter.ndim >= 2: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decay == {True: 0.1, False: 0.0}


def test_a_gradient_is_clipped_to_its_norm_and_no_clip_is_infinity() -> None:
    for clip, expected in ((1.0, 1.0), (float("inf"), 500.0)):
        model = Line()
        learner = Learner(
            "east",
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            lambda batch, model=model: (model.w * torch.tensor([300.0, 400.0])).sum(),
            layouts=layouts_for(model, 1),
            schedule=SCHEDULE,
            clip_norm=clip,
            period_steps=6,
        )
        started(learner)
        train(learner, 1)
        assert model.w.grad is not None
        assert model.w.grad.norm().item() == pytest.approx(expected, rel=1e-5)


# --- coming back


def test_without_a_checkpoint_a_learner_comes_back_on_the_heads_with_its_account() -> None:
    first = started()
    train(first, 4)
    heads = bases_of(a_learner(seed=3), version=2)
    second = a_learner(seed=7)
    second.come_back(None, first.record(""), heads, incarnation=1)
    assert all_values(second) == b"".join(head.values.tobytes() for head in heads)
    assert all(set(counts) == {0} for counts in second.state("").tensor_steps)
    assert (second.trained, second.cursor, second.position) == (4 * TOKENS, 8, Position(1, 4))
    for p in range(2):
        clock = second.clock(p)
        assert (clock.base_version, clock.rolled_back, clock.open_tokens) == (2, 4 * TOKENS, 0)
        assert clock.start == Position(1, 4)


def test_with_a_checkpoint_and_unmoved_heads_it_keeps_the_progress_of_the_checkpoint() -> None:
    first = started()
    heads = bases_of(first)
    train(first, 2)
    saved = first.state("")
    values, moments = all_values(first), all_moments(first)
    train(first, 3)
    second = a_learner(seed=7)
    second.come_back(saved, first.record(""), heads, incarnation=1)
    assert all_values(second) == values
    assert all_moments(second) == moments
    assert (second.trained, second.cursor, second.position) == (5 * TOKENS, 10, Position(1, 5))
    for p in range(2):
        clock = second.clock(p)
        assert (clock.open_tokens, clock.open_steps) == (2 * TOKENS, 2)
        assert clock.rolled_back == 3 * TOKENS
        assert clock.trained == second.trained
        copy = second.copy(p, next_push_steps=6)
        assert np.array_equal(copy.anchor, heads[p].values)
        assert (copy.start, copy.stop) == (Position(0, 0), Position(1, 5))


def test_a_fragment_whose_head_has_moved_is_adopted_and_the_moments_stay() -> None:
    first = started()
    heads = bases_of(first)
    train(first, 2)
    saved, moments = first.state(""), all_moments(first)
    kept = first.local_values(1)
    train(first, 1)
    heads[0] = Base(1, "digest-1", heads[0].values * 3)
    second = a_learner(seed=7)
    second.come_back(saved, first.record(""), heads, incarnation=1)
    assert np.array_equal(second.local_values(0), heads[0].values)
    assert np.array_equal(second.local_values(1), kept)
    assert all_moments(second) == moments
    assert second.clock(0).rolled_back == 3 * TOKENS
    assert second.clock(1).rolled_back == 1 * TOKENS
    assert all(second.clock(p).trained == second.trained for p in range(2))


def test_work_that_may_still_be_merged_is_not_done_twice() -> None:
    first = started()
    heads = bases_of(first)
    train(first, 2)
    saved = first.state("")
    train(first, 1)
    first.copy(0, next_push_steps=6)  # pushed after the checkpoint: it may yet be merged
    second = a_learner(seed=7)
    second.come_back(saved, first.record(""), heads, incarnation=1)
    assert np.array_equal(second.local_values(0), heads[0].values)
    clock = second.clock(0)
    assert (clock.offered, clock.rolled_back, clock.open_tokens) == (3 * TOKENS, 0, 0)
    train(second, 2)
    copy = second.copy(0, next_push_steps=6)
    assert (copy.start, copy.offered_before) == (Position(1, 3), 3 * TOKENS)


def test_the_learning_rate_goes_on_at_the_tokens_of_the_last_link() -> None:
    first = started()
    train(first, 2)
    saved = first.state("")
    train(first, 5)
    second = a_learner(seed=7)
    second.come_back(saved, first.record(""), bases_of(first), incarnation=1)
    train(second, 1)
    rates = {group["lr"] for group in second.optimizer.param_groups}
    assert rates == {learning_rate_at(7 * TOKENS, SCHEDULE)}


def test_beginning_takes_the_published_values_and_spreads_the_first_pushes() -> None:
    learner = a_learner()
    heads = bases_of(a_learner(seed=3), version=4)
    learner.begin(heads, incarnation=2)
    assert all_values(learner) == b"".join(head.values.tobytes() for head in heads)
    assert learner.position == Position(2, 0)
    assert [learner.clock(p).base_version for p in range(2)] == [4, 4]
    assert [learner.clock(p).steps_to_push for p in range(2)] == [3, 6]


def test_a_dropped_copy_is_counted_as_replaced() -> None:
    learner = started()
    train(learner, 1)
    learner.count_replaced(1, 24)
    assert [learner.clock(p).replaced for p in range(2)] == [0, 24]
