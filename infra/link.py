"""A store as one island reaches it: the bytes of its payloads are counted, and paced where a cap is set.

Knows names by their folder and the monotonic clock; must not know what an object holds.

Control before data: only objects below the folders named as data pay. Headers, listings, stops and all else pass at
once, also while a payload is being paced in another thread.

An object is the least that can be paced, since a store writes and reads it whole: a payload goes chunk by chunk. One
that is sent pays before it is created, one that is fetched pays before it is handed over, so neither is anywhere sooner
than a link of that bandwidth would bring it.

A link can also be out of order for a while, on purpose: `cut` and `fill`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from infra.disk import Data
from infra.store import Store
from islands.types import StoreUnavailable

_LOOK_SECONDS = 1.0


class Bucket:
    """Lets bytes of one direction through at a pace: whoever takes some waits for those before, and for its own.

    Nothing is saved up while nobody sends, so that no burst exceeds the cap. Safe for several threads.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._looked_at = -math.inf
        self._is_lifted = threading.Event()

    def take(
        self,
        num_bytes: int,
        bytes_per_second: Callable[[], float | None],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """Wait until so many bytes have passed, or the cap is lifted; `meanwhile` is called about once a second.

        The pace is asked for again and again: what is on its way follows a new one.
        """
        with self._turn:
            left, now = float(num_bytes), time.monotonic()
            while left > 0 and (pace := bytes_per_second()) is not None:
                if self._is_lifted.wait(min(left / pace, _LOOK_SECONDS)):
                    return
                if meanwhile is not None and time.monotonic() - self._looked_at >= _LOOK_SECONDS:
                    meanwhile()
                    self._looked_at = time.monotonic()
                before, now = now, time.monotonic()
                left -= pace * (now - before)

    def lift(self) -> None:
        """Let everything through at once from now on, what waits too."""
        self._is_lifted.set()


class Link:
    """The verbs of `Store`, with the payloads below some folders counted and paced. Safe for several threads.

    Args:
        store: the store itself.
        counted: folders whose bytes count.
        paced: folders whose bytes pay, once `bytes_per_second` is set.
        bytes_up, bytes_down: bytes that count already.

    Attributes:
        meanwhile: called about once a second while a fetched object is paced, by the thread that fetches it: what else
            it looks after must not wait for data.
        bytes_up, bytes_down: bytes created, and read, below the counted folders. What a failed attempt moved counts
            too, if the store said that it was done.
        bytes_per_second: the cap in each direction; None: no cap.
    """

    def __init__(
        self,
        store: Store,
        *,
        counted: tuple[str, ...],
        paced: tuple[str, ...] = (),
        bytes_up: int = 0,
        bytes_down: int = 0,
    ) -> None:
        self._store = store
        self._counted, self._paced = counted, paced
        self._up, self._down = Bucket(), Bucket()
        self.bytes_up, self.bytes_down = bytes_up, bytes_down
        self.bytes_per_second: float | None = None
        self.meanwhile: Callable[[], None] | None = None
        self._is_closed = False
        self._cut_until = self._full_until = -math.inf

    @property
    def url(self) -> str:
        """Where the store lies."""
        return self._store.url

    def create(self, name: str, data: Data, *, sync: bool = True) -> None:
        """As `Store.create`, after its bytes have passed.

        Raises:
            StoreUnavailable: the link was closed while they did, or is out of order; nothing was created.
        """
        parts = data if isinstance(data, tuple) else (data,)
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        self._demand_order(f"create {name}", creates=True)
        self._pass(self._up, name, num_bytes, None)
        self._demand_order(f"create {name}", creates=True)
        self._store.create(name, data, sync=sync)
        if name.startswith(self._counted):
            self.bytes_up += num_bytes

    def read(self, name: str) -> bytes | None:
        """As `Store.read`, handed over once its bytes have passed.

        Raises:
            StoreUnavailable: the link was closed while they did, or is out of order.
        """
        self._demand_order(f"read {name}")
        data = self._store.read(name)
        if data is not None:
            self._pass(self._down, name, len(data), self.meanwhile)
            self._demand_order(f"read {name}")
            if name.startswith(self._counted):
                self.bytes_down += len(data)
        return data

    def list_names(self, prefix: str) -> list[str]:
        """As `Store.list_names`, at once."""
        self._demand_order(f"list {prefix}")
        return self._store.list_names(prefix)

    def delete(self, name: str) -> None:
        """As `Store.delete`, at once."""
        self._demand_order(f"delete {name}")
        self._store.delete(name)

    def sync(self, prefix: str) -> None:
        """As `Store.sync`, at once."""
        self._demand_order(f"sync {prefix}")
        self._store.sync(prefix)

    def within(self, prefix: str) -> Store:
        """Return a view of a folder of the store itself: nothing there is counted or paced."""
        return self._store.within(prefix)

    def cut(self, seconds: float) -> None:
        """Refuse every verb for so long from now."""
        self._cut_until = max(self._cut_until, time.monotonic() + seconds)

    def fill(self, seconds: float) -> None:
        """Refuse to create anything for so long from now, as a full disk does."""
        self._full_until = max(self._full_until, time.monotonic() + seconds)

    def lift(self) -> None:
        """Take the cap away for good: whoever waits for its turn goes on at once."""
        self._up.lift()
        self._down.lift()

    def close(self) -> None:
        """Let nothing that pays through any more: whoever waits for its turn is refused at once."""
        self._is_closed = True
        self.lift()

    def _demand_order(self, what: str, *, creates: bool = False) -> None:
        """Raise `StoreUnavailable` while the link is out of order."""
        now = time.monotonic()
        if now < self._cut_until:
            raise StoreUnavailable(
                f"cannot {what}: the link is cut on purpose for another {self._cut_until - now:.1f} s"
            )
        if creates and now < self._full_until:
            raise StoreUnavailable(
                f"cannot {what}: no space left, on purpose for another {self._full_until - now:.1f} s"
            )

    def _pass(
        self, bucket: Bucket, name: str, num_bytes: int, meanwhile: Callable[[], None] | None
    ) -> None:
        if self.bytes_per_second is None or not name.startswith(self._paced):
            return
        bucket.take(num_bytes, lambda: self.bytes_per_second, meanwhile)
        if self._is_closed:
            raise StoreUnavailable(f"{name}: the link was closed before its bytes had passed")
