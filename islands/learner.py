"""The learner: inner steps on one model, private copies of fragments to push, adoption of published ones.

Updates the model and the optimizer in place. Knows torch, layouts and the ledger; must not know a store, a network or
a clock: whoever drives it moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from islands import ledger
from islands.fragments import first_push_steps
from islands.landing import Flat, Late, Vector, kept, landed, room, sent
from islands.ledger import FragmentClock, LearnerRecord
from islands.schedule import Schedule, learning_rate_at
from islands.types import FragmentLayout, FragmentMismatch, Position


@dataclass(frozen=True, slots=True)
class Copy:
    """A private copy of one fragment at a step boundary, and what it covers: the raw material of a contribution.

    `anchor` and `local`: (elements,) float32; both are never written to again. On a GPU `local` is yet to be landed.
    """

    fragment: int
    anchor: Vector
    local: Flat
    base_version: int
    base_digest: str
    start: Position
    stop: Position
    num_tokens: int
    num_steps: int
    offered_before: int


@dataclass(frozen=True, slots=True)
class Base:
    """A published version as a learner adopts it: the exact decoded public values, (elements,) float32."""

    version: int
    digest: str
    values: Vector


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Everything a checkpoint must hold. Arrays are private copies; a GPU's are yet to be landed.

    `values`, `first`, `second`: per fragment, parameters and AdamW moments, (elements,) float32. `tensor_steps`: the
    optimizer's step count per fragment and tensor, 0 where it has no state yet. `buffers`: the model's persistent
    buffers by name, in their own shape and dtype.
    """

    record: LearnerRecord
    values: tuple[Flat, ...]
    first: tuple[Flat, ...]
    second: tuple[Flat, ...]
    tensor_steps: tuple[tuple[int, ...], ...]
    buffers: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are exchanged, name -> parameter; a tied weight once, under its first name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def embedding_names(model: nn.Module) -> frozenset[str]:
    """Return the names of embeddings, which are merged by weighted mean: `nn.Embedding` weights and `*_embedding`."""
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return frozenset(
        name
        for name, parameter in trainable(model).items()
        if id(parameter) in weights or name.endswith("_embedding")
    )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers a state dict would hold, by name: running statistics, counters."""
    names = {name for name, _ in model.named_buffers()}
    return {name: value for name, value in model.state_dict().items() if name in names}


def gather(layout: FragmentLayout, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the fragment's values as a new flat float32 tensor in layout order, where the parameters are."""
    flat = room(layout.size, parameters[layout.tensors[0].name].device)
    for spec in layout.tensors:
        values = parameters[spec.name].detach()
        if tuple(values.shape) != spec.shape:
            raise FragmentMismatch(
                f"{spec.name} has shape {tuple(values.shape)}, the layout says {spec.shape}"
            )
        flat[spec.offset : spec.stop].view(spec.shape).copy_(values)
    return flat


def scatter(layout: FragmentLayout, values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Write a fragment's flat tensor into the parameters, in place."""
    if tuple(values.shape) != (layout.size,):
        raise FragmentMismatch(
            f"fragment {layout.index} has {layout.size} elements, got shape {tuple(values.shape)}"
        )
    with torch.no_grad():
        for spec in layout.tensors:
            parameters[spec.name].copy_(values[spec.offset : spec.stop].view(spec.shape))


def flatten(layout: FragmentLayout, parameters: Mapping[str, Tensor]) -> Vector:
    """Return the fragment's values as a new float32 vector in layout order."""
    vector: Vector = gather(layout, parameters).to("cpu").numpy()
    return vector


def unflatten(layout: FragmentLayout, vector: Vector, parameters: Mapping[str, Tensor]) -> None:
    """Write a fragment's vector into the parameters, in place: one transfer to their device, whatever their number."""
    device = parameters[layout.tensors[0].name].device
    scatter(layout, sent(vector, device), parameters)


class Learner:
    """One training replica: model, optimizer, anchors and ledger; one thread at a time.

    Args:
        name: the learner's name.
        model: trained in place.
        optimizer: over `trainable(model)`; its learning rate is set before each step.
        loss: batch -> scalar loss; a batch is whatever `step` is given.
        layouts: the fragments.
        schedule: learning rate over own tokens.
        clip_norm: gradient norm limit; infinity for none.
        period_steps: H.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
        *,
        layouts: Sequence[FragmentLayout],
        schedule: Schedule,
        clip_norm: float,
        period_steps: int,
    ) -> None:
        self.name = name
        self.model = model
        self.optimizer = optimizer
        self.layouts = tuple(layouts)
        self.period_steps = period_steps
        self.position = Position(0, 0)
        self.trained = 0
        self.cursor = 0
        self._loss = loss
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._losses = Late()
        self._parameters = trainable(model)
        self._anchors: list[Vector] = [np.empty(0, dtype=np.float32)] * len(self.layouts)
        self._clocks: list[FragmentClock] = []

    # --- beginning ---

    def begin(self, bases: Sequence[Base], *, incarnation: int) -> None:
        """Start from published versions alone: nothing trained, and no moments but those it has."""
        self.position = Position(incarnation, 0)
        self._clocks = [
            FragmentClock(base.version, base.digest, self.position, self._first_push(p))
            for p, base in enumerate(bases)
        ]
        for p, base in enumerate(bases):
            self._anchors[p] = base.values
            unflatten(self.layouts[p], base.values, self._parameters)

    def restore(self, state: LearnerState, anchors: Sequence[Vector]) -> None:
        """Go on exactly where `state` was taken; `anchors` are the bases its clocks name."""
        self.load(state)
        record = state.record
        self.position, self.trained, self.cursor = record.position, record.trained, record.cursor
        self._clocks = list(state.record.clocks)
        self._anchors = list(anchors)

    def come_back(
        self,
        state: LearnerState | None,
        last: LearnerRecord,
        heads: Sequence[Base],
        *,
        incarnation: int,
    ) -> None:
        """Start the next incarnation from a checkpoint, the predecessors' last link and the heads.

        Parameters and moments come from the checkpoint (without one, from the heads, and moments start at zero); the
        account comes from `last`. A fragment keeps the checkpoint's progress where nothing has happened to it since;
        otherwise its head is adopted. Cursor and learning-rate clock go on from `last`, so no sample that may have
        been merged is seen again.
        """
        if state is not None:
            self.load(state)
        self.position = Position(incarnation, last.position.step)
        self.trained, self.cursor = last.trained, last.cursor
        self._clocks = []
        for p, (newest, head) in enumerate(zip(last.clocks, heads, strict=True)):
            saved = newest if state is None else state.record.clocks[p]
            keeps = state is not None and ledger.can_keep_progress(saved, newest, head.version)
            self._clocks.append(ledger.after_return(saved, newest, self.position, keeps=keeps))
            self._anchors[p] = head.values
            if not keeps:
                self.adopt(p, head, alpha=0.0, next_push_steps=self._first_push(p))

    # --- training ---

    def step(self, batch: Any, *, num_tokens: int, num_samples: int) -> float:
        """Take one inner step and return its loss, on a GPU that of the step before (see `Late`).

        Counts the tokens only once the step is done, or given to the GPU: no copy can be made before it there.
        """
        rate = learning_rate_at(self.trained, self._schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clip_norm != float("inf"):
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
        self.optimizer.step()
        self.position = Position(self.position.incarnation, self.position.step + 1)
        self.trained += num_tokens
        self.cursor += num_samples
        self._clocks = [ledger.after_step(clock, num_tokens) for clock in self._clocks]
        return self._losses.read(loss)

    # --- exchange ---

    def clock(self, fragment: int) -> FragmentClock:
        """Return the account of one fragment."""
        return self._clocks[fragment]

    @property
    def clocks(self) -> tuple[FragmentClock, ...]:
        """The accounts of all fragments."""
        return tuple(self._clocks)

    def time_push(self, fragment: int, num_steps: int) -> None:
        """Set the steps until a fragment is copied next."""
        self._clocks[fragment] = replace(self._clocks[fragment], steps_to_push=num_steps)

    def copy(self, fragment: int, *, next_push_steps: int) -> Copy:
        """Return a private copy of a fragment for pushing, and enter it into the ledger."""
        clock = self._clocks[fragment]
        self._clocks[fragment] = ledger.after_copy(
            clock, self.position, next_push_steps=next_push_steps
        )
        return Copy(
            fragment=fragment,
            anchor=self._anchors[fragment],
            local=kept(gather(self.layouts[fragment], self._parameters)),
            base_version=clock.base_version,
            base_digest=clock.base_digest,
            start=clock.start,
            stop=self.position,
            num_tokens=clock.open_tokens,
            num_steps=clock.open_steps,
            offered_before=clock.offered,
        )

    def adopt(self, fragment: int, base: Base, *, alpha: float, next_push_steps: int) -> None:
        """Take over a published version: (1 - alpha) published + alpha local. Moments and learning rate stay."""
        layout = self.layouts[fragment]
        if alpha > 0:
            local = gather(layout, self._parameters)
            mixed = (1 - alpha) * sent(base.values, local.device) + alpha * local
            scatter(layout, mixed, self._parameters)
        else:
            unflatten(layout, base.values, self._parameters)
        self._anchors[fragment] = base.values
        self._clocks[fragment] = ledger.after_adoption(
            self._clocks[fragment],
            self.position,
            version=base.version,
            digest=base.digest,
            keeps_local=alpha > 0,
            next_push_steps=next_push_steps,
        )

    def retune(self, *, schedule: Schedule, clip_norm: float, period_steps: int) -> None:
        """Go on under other settings from the next step on."""
        self._clocks = [
            ledger.after_new_period(clock, old_steps=self.period_steps, new_steps=period_steps)
            for clock in self._clocks
        ]
        self._schedule, self._clip_norm, self.period_steps = schedule, clip_norm, period_steps

    def count_replaced(self, fragment: int, num_tokens: int) -> None:
        """Enter that a copy of an earlier interval was dropped unsent."""
        self._clocks[fragment] = ledger.after_replacement(self._clocks[fragment], num_tokens)

    # --- what is written down ---

    def anchor(self, fragment: int) -> Vector:
        """Return the published values it anchors on; they are never written to."""
        return self._anchors[fragment]

    def record(self, previous: str) -> LearnerRecord:
        """Return the account as it stands, as the link after `previous`."""
        return LearnerRecord(
            self.name, self.position, self.trained, self.cursor, tuple(self._clocks), previous
        )

    def state(self, previous: str) -> LearnerState:
        """Return private copies of everything needed to go on from here."""
        moments = [self._moments(layout) for layout in self.layouts]
        first, second, steps = zip(*moments, strict=True)
        values = tuple(kept(gather(layout, self._parameters)) for layout in self.layouts)
        buffers = {
            name: value.to("cpu").numpy().copy()
            for name, value in persistent_buffers(self.model).items()
        }
        return LearnerState(
            record=self.record(previous),
            values=values,
            first=first,
            second=second,
            tensor_steps=steps,
            buffers=buffers,
        )

    def local_values(self, fragment: int) -> Vector:
        """Return a copy of the fragment's present local values."""
        return flatten(self.layouts[fragment], self._parameters)

    def _first_push(self, fragment: int) -> int:
        return first_push_steps(
            fragment, period_steps=self.period_steps, num_fragments=len(self.layouts)
        )

    def _moments(self, layout: FragmentLayout) -> tuple[Flat, Flat, tuple[int, ...]]:
        first, second, steps = {}, {}, []
        for spec in layout.tensors:
            parameter = self._parameters[spec.name]
            # A parameter that no loss has reached yet has no state: that is remembered as step 0.
            state = self.optimizer.state.get(parameter, {})
            is_cold = "exp_avg" not in state
            first[spec.name] = torch.zeros_like(parameter) if is_cold else state["exp_avg"]
            second[spec.name] = torch.zeros_like(parameter) if is_cold else state["exp_avg_sq"]
            steps.append(int(state["step"]) if "step" in state else 0)
        return kept(gather(layout, first)), kept(gather(layout, second)), tuple(steps)

    def load(self, state: LearnerState) -> None:
        """Fill parameters, buffers and moments. State is made, not filled in: a fresh optimizer has no slots yet."""
        for name, buffer in persistent_buffers(self.model).items():
            buffer.copy_(torch.from_numpy(state.buffers[name].copy()))
        for p, layout in enumerate(self.layouts):
            unflatten(layout, landed(state.values[p]), self._parameters)
            moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
            for spec, num_steps in zip(layout.tensors, state.tensor_steps[p], strict=True):
                parameter = self._parameters[spec.name]
                # The fused kernels run over raw memory: moments must lie in it as the parameter does, and the step
                # count on its device.
                for kind in moments.values():
                    kind[spec.name] = torch.empty_like(parameter.detach())
                self.optimizer.state.pop(parameter, None)
                if num_steps:
                    device = parameter.device if self.optimizer.defaults.get("fused") else "cpu"
                    step = torch.tensor(float(num_steps), dtype=torch.float32, device=device)
                    mine = {key: kind[spec.name] for key, kind in moments.items()}
                    self.optimizer.state[parameter] = {"step": step, **mine}
            unflatten(layout, landed(state.first[p]), moments["exp_avg"])
            unflatten(layout, landed(state.second[p]), moments["exp_avg_sq"])


def adamw(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; vectors and scalars (norm gains, biases) are not decayed."""
    parameters = list(trainable(model).values())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Over a weight that is a slice of a larger tensor the fused kernel silently computes nonsense (torch 2.13, CPU).
    is_plain = all(parameter.is_contiguous() for parameter in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=betas,
        fused=is_plain,
    )
