"""A store some of whose folders lie elsewhere: an island's checkpoints need not cross the wide-area link.

Knows names and other stores; must not know what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.disk import Data
from infra.store import Store


class RoutedStore:
    """The verbs of `Store` over several stores; which one is decided by the name's folder alone.

    Args:
        store: holds all names but those below.
        elsewhere: folder -> the store that holds every name below it, under the same name.
    """

    def __init__(self, store: Store, elsewhere: Mapping[str, Store]) -> None:
        self._store = store
        self._elsewhere = {f"{folder.strip('/')}/": other for folder, other in elsewhere.items()}

    @property
    def url(self) -> str:
        """Where the main part lies."""
        return self._store.url

    def create(self, name: str, data: Data, *, sync: bool = True) -> None:
        """As `Store.create`, at the name's place."""
        self._place(name).create(name, data, sync=sync)

    def read(self, name: str) -> bytes | None:
        """As `Store.read`, at the name's place."""
        return self._place(name).read(name)

    def list_names(self, prefix: str) -> list[str]:
        """As `Store.list_names`, over every place that may hold such names."""
        folder = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        found = {
            name for name in self._store.list_names(prefix) if self._place(name) is self._store
        }
        for there, other in self._elsewhere.items():
            if there.startswith(folder) or folder.startswith(there):
                longer = max(there, folder, key=len)
                found |= set(other.list_names(longer))
        return sorted(found)

    def delete(self, name: str) -> None:
        """As `Store.delete`, at the name's place."""
        self._place(name).delete(name)

    def sync(self, prefix: str) -> None:
        """As `Store.sync`, at every place."""
        for store in {
            id(store): store for store in (self._store, *self._elsewhere.values())
        }.values():
            store.sync(prefix)

    def within(self, prefix: str) -> RoutedStore:
        """Return a view of a sub-folder; folders elsewhere that are not below it play no part there."""
        folder = f"{prefix.strip('/')}/"
        below = {
            f.removeprefix(folder): s.within(prefix)
            for f, s in self._elsewhere.items()
            if f.startswith(folder)
        }
        return RoutedStore(self._store.within(prefix), below)

    def _place(self, name: str) -> Store:
        for folder, other in self._elsewhere.items():
            if name.startswith(folder):
                return other
        return self._store
