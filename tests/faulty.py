"""A real store that fails on purpose: killed, full, lying, stale or half, at the n-th operation.

Not a test itself. `Passing` hands every operation through one place; the others override that place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infra.disk import Data
from infra.store import Store
from islands.types import StoreUnavailable

# What an operation does to the store below; returns what the verb returns.
Deed = Callable[[], Any]


class Killed(BaseException):
    """The process is gone, as after SIGKILL: nothing may catch it."""


class Passing:
    """The verbs of `Store`, each passed through `act`. Views (`within`) belong to the store below."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        """Do an operation on the store below."""
        return deed()

    @property
    def url(self) -> str:
        return self.inner.url

    def create(self, name: str, data: Data, *, sync: bool = True) -> None:
        self.act("create", name, lambda: self.inner.create(name, data, sync=sync))

    def read(self, name: str) -> bytes | None:
        found: bytes | None = self.act("read", name, lambda: self.inner.read(name))
        return found

    def list_names(self, prefix: str) -> list[str]:
        found: list[str] = self.act("list", prefix, lambda: self.inner.list_names(prefix))
        return found

    def delete(self, name: str) -> None:
        self.act("delete", name, lambda: self.inner.delete(name))

    def sync(self, prefix: str) -> None:
        self.act("sync", prefix, lambda: self.inner.sync(prefix))

    def within(self, prefix: str) -> Store:
        return self.inner.within(prefix)


class Counting(Passing):
    """Counts operations: `num_operations` of every kind, `counts` by verb; and the names it has listed."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.num_operations = 0
        self.counts: dict[str, int] = {}
        self.num_listed = 0

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        self.num_operations += 1
        self.counts[verb] = self.counts.get(verb, 0) + 1
        done = deed()
        self.num_listed += len(done) if verb == "list" else 0
        return done


class Dying(Passing):
    """Once armed lets `left` operations through and dies at the next; reads count too. Below zero: it lives."""

    def __init__(self, inner: Store, left: int = -1) -> None:
        super().__init__(inner)
        self.left = left

    def arm(self, left: int) -> None:
        self.left = left

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        if self.left == 0:
            raise Killed
        self.left -= 1
        return deed()


class Striking(Passing):
    """Once armed strikes operations of one verb, those numbered `first` to `first + length - 1`, from 0 on.

    `num_struck` says how many it has struck since: none, and the work was over before.
    """

    verb = "create"

    def __init__(self, inner: Store, first: int = 0, length: int = 0) -> None:
        super().__init__(inner)
        self.arm(first, length)

    def arm(self, first: int, length: int = 1) -> None:
        self.struck = range(first, first + length)
        self.num_seen = self.num_struck = 0

    def rest(self) -> None:
        """Strike no more."""
        self.struck = range(0)

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        if verb != self.verb:
            return deed()
        number, self.num_seen = self.num_seen, self.num_seen + 1
        if number not in self.struck:
            return deed()
        self.num_struck += 1
        return self.strike(name, deed)

    def strike(self, name: str, deed: Deed) -> Any:
        """Do one operation wrong."""
        raise NotImplementedError


class Full(Striking):
    """Some creates find no space left."""

    def strike(self, name: str, deed: Deed) -> Any:
        raise StoreUnavailable(f"cannot create {name}: [Errno 28] No space left on device")


class LostAnswer(Striking):
    """Some creates are done, and answered by an error."""

    def strike(self, name: str, deed: Deed) -> Any:
        deed()
        raise StoreUnavailable(f"cannot create {name}: the answer was lost")


class Mute(Striking):
    """Some reads get no answer."""

    verb = "read"

    def strike(self, name: str, deed: Deed) -> Any:
        raise StoreUnavailable(f"cannot read {name}: no answer")


class Halving(Striking):
    """Some reads return the first half of the bytes, as if that were all."""

    verb = "read"

    def strike(self, name: str, deed: Deed) -> Any:
        data = deed()
        return data if data is None else data[: len(data) // 2]


class Undeletable(Striking):
    """Some deletes are refused."""

    verb = "delete"

    def strike(self, name: str, deed: Deed) -> Any:
        raise StoreUnavailable(f"cannot delete {name}: no answer")


class Stale(Passing):
    """Listings lack what was created after the `num_creates`-th create from the last: they are that far behind."""

    def __init__(self, inner: Store, num_creates: int) -> None:
        super().__init__(inner)
        self.num_creates = num_creates
        self.created: list[str] = []

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        done = deed()
        if verb == "create":
            self.created.append(name)
        if verb == "list" and self.num_creates:
            unseen = set(self.created[-self.num_creates :])
            return [found for found in done if found not in unseen]
        return done
