"""Private copies that stay on a GPU until another thread brings them to the host; and the way there.

Knows tensors and CUDA's streams; must not know what the numbers mean. On the CPU a copy is a numpy array and nothing
waits. On a GPU the learner's thread must never wait for bytes, which is a matter of order:

    1. the thread gives the GPU a step, then asks for a copy, which is made behind that step;
    2. were it to fetch the copy, it would wait for both, and the GPU would run out of steps meanwhile;
    3. so it records an event behind the copy, and goes on;
    4. the exchange thread lets a stream of its own wait for the event, and fetches on that: on the learner's stream the
       fetch would queue behind whatever steps were given since, and hold up those that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A copy on a GPU: `values`, written by nobody any more, are there once `is_made` has happened."""

    values: Tensor
    is_made: torch.cuda.Event


Flat = Vector | OnDevice


def room(size: int, device: torch.device) -> Tensor:
    """Return a flat float32 tensor to be filled. On the CPU numpy's, which asks for large pages: half the time."""
    if device.type != "cuda":
        return torch.from_numpy(np.empty(size, dtype=np.float32))
    return torch.empty(size, dtype=torch.float32, device=device)


def kept(values: Tensor) -> Flat:
    """Return values that nobody will write to any more as a copy to `landed` later; never waits."""
    if not values.is_cuda:
        host: Vector = values.numpy()
        return host
    is_made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_made.record(torch.cuda.current_stream(values.device))
    return OnDevice(values, is_made)


def landed(copy: Flat) -> Vector:
    """Return a copy's values on the host, waiting for them if they are still on a GPU. From any thread."""
    if not isinstance(copy, OnDevice):
        return copy
    stream = torch.cuda.Stream(copy.values.device)  # type: ignore[no-untyped-call]
    stream.wait_event(copy.is_made)
    with torch.cuda.stream(stream):
        # Returns when the bytes are here, so the memory may go back to the learner's stream at any time after.
        host: Vector = copy.values.to("cpu").numpy()
    return host


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return values of the host as a tensor to read from: on the CPU the same memory, on a GPU a copy.

    The GPU takes it in turn, and nobody waits for that.
    """
    host = torch.from_numpy(np.require(values, requirements=("C", "W")))
    if device.type != "cuda":
        return host
    # Pinned, since from pageable memory the transfer would first wait for every step given before.
    return host.pin_memory().to(device, non_blocking=True)


class Late:
    """Reads a number that every step makes: at once on the CPU, one step late on a GPU.

    So the thread is at most one step ahead of the GPU, and the GPU always has that one to go on with.
    """

    def __init__(self) -> None:
        self._before: OnDevice | None = None

    def read(self, number: Tensor) -> float:
        """Return this step's number, or on a GPU the one of the step before, which this waits for."""
        newest = kept(number.detach().double())
        if isinstance(newest, OnDevice):
            newest, self._before = self._before or newest, newest
        return float(landed(newest))
