"""A store on local disk, and the names that it and every other store can hold.

Knows paths, system calls and their order. It must not know URLs' schemes, clouds, or what the objects mean.

It does not go through obstore: that one's local store never calls fsync, so a power cut could leave a committed
header whose payload is gone. The order that makes an object appear whole, once, and for good:

    1. write the bytes to `<root>/.partial/<random>` and fsync them;
    2. link that file to its final name, which fails if the name exists: one winner, and never half an object;
    3. fsync the folder of the name and every folder above it, so that the name itself survives.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

from islands.types import ConfigError, StoreUnavailable, VersionTaken

# An object's bytes, whole or in parts to be joined: so a large array need not be copied to get four bytes more.
Data = bytes | tuple[bytes | memoryview, ...]

PARTIAL = ".partial"
_MAX_PART_BYTES = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PARTIAL_LIFE_SECONDS = 3600.0
# A create competes with deletes that remove emptied folders; each try loses only if one of them wins again.
_MAX_LINK_TRIES = 100
# Fsyncs under way at once: each ends with the disk's own flush, and flushes that meet are done as one.
_SYNC_THREADS = 4


def check_name(name: str) -> str:
    """Return `name` if every store can hold it.

    Raises:
        ValueError: it is absolute, has an empty part, ".", ".." or the reserved ".partial", a backslash, a control
            character, or a part over 200 bytes.
    """
    for part in name.split("/"):
        if part in ("", ".", "..", PARTIAL):
            raise ValueError(f"an object name must not hold the part {part!r}, got {name!r}")
        if len(part.encode()) > _MAX_PART_BYTES:
            raise ValueError(
                f"a part of an object name must be <= {_MAX_PART_BYTES} bytes, got {name!r}"
            )
    if "\\" in name or has_control(name):
        raise ValueError(
            f"an object name must not hold a backslash or a control character, got {name!r}"
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return a folder's name with one "/" at its end, or "" for everything."""
    return check_name(prefix.removesuffix("/")) + "/" if prefix else ""


def has_control(text: str) -> bool:
    return _CONTROL.search(text) is not None


def open_disk(rest: str, durable: bool) -> LocalDisk:
    """Return the store in a folder, which need not exist yet. Creates nothing, and sweeps old partial files.

    Args:
        rest: what follows `file://`: a path that begins with "/", "./" or "../"; taken literally.
        durable: whether to fsync.

    Raises:
        ConfigError: the folder, or the lowest existing one above it, is not a writable folder.
    """
    if not rest.startswith(("/", "./", "../")) and rest != ".":
        raise ConfigError(
            f"a file URL must hold an absolute path or one that begins with ./, got 'file://{rest}'; "
            f"write file://./{rest or 'runs'}"
        )
    root = "/" + os.path.abspath(rest).lstrip("/")
    anchor = root
    while not os.path.lexists(anchor):
        anchor = os.path.dirname(anchor)
    if not os.path.isdir(anchor):
        raise ConfigError(
            f"a file URL must name a folder, got 'file://{root}' but {anchor} is none; choose another"
        )
    if not os.access(anchor, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"a store must be writable, got 'file://{root}' but {anchor} is not; change its mode or choose another"
        )
    _sweep_partial(root)
    return LocalDisk(root, root, anchor, durable)


@dataclass(frozen=True, slots=True)
class LocalDisk:
    """A folder on a disk. `folder` is `root` or a view below it.

    `anchor` is the lowest folder that existed at opening: what lies above it need not be made durable.
    """

    root: str
    folder: str
    anchor: str
    durable: bool

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def create(self, name: str, data: Data, *, sync: bool = True) -> None:
        target = self._path(name)
        partial = os.path.join(self.root, PARTIAL, secrets.token_hex(16))
        durable = self.durable and sync
        try:
            self._write_partial(partial, data, durable)
            self._link(partial, target)
            if durable:
                self._sync_folders(os.path.dirname(target))
        except OSError as exc:
            raise StoreUnavailable(f"cannot create {self.url}/{name}: {exc}") from exc
        finally:
            with contextlib.suppress(OSError):
                os.unlink(partial)

    def read(self, name: str) -> bytes | None:
        try:
            with open(self._path(name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as exc:
            raise StoreUnavailable(f"cannot read {self.url}/{name}: {exc}") from exc

    def list_names(self, prefix: str) -> list[str]:
        start = self._folder(prefix)
        try:
            paths = [
                entry.path for entry in _walk(start) if not entry.is_dir(follow_symlinks=False)
            ]
        except OSError as exc:
            raise StoreUnavailable(f"cannot list {self.url}/{prefix}: {exc}") from exc
        return sorted(path[len(self.folder) :].lstrip("/") for path in paths)

    def delete(self, name: str) -> None:
        target = self._path(name)
        try:
            os.unlink(target)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as exc:
            raise StoreUnavailable(f"cannot delete {self.url}/{name}: {exc}") from exc
        folder = os.path.dirname(target)
        with contextlib.suppress(OSError):  # rmdir refuses a folder in use: the walk up ends there
            while folder != self.root:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def sync(self, prefix: str) -> None:
        start = self._folder(prefix)
        if not self.durable:
            return
        try:
            paths = [entry.path for entry in _walk(start)]
            shares = [paths[first::_SYNC_THREADS] for first in range(_SYNC_THREADS)]
            for _ in _sync_pool().map(_fsync_all, shares):
                pass  # an error of any of them is raised here
            self._sync_folders(start)
        except OSError as exc:
            raise StoreUnavailable(f"cannot sync {self.url}/{prefix}: {exc}") from exc

    def within(self, prefix: str) -> LocalDisk:
        return replace(self, folder=self._folder(prefix))

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, check_name(name))

    def _folder(self, prefix: str) -> str:
        return os.path.join(self.folder, check_prefix(prefix)).rstrip("/") or "/"

    def _write_partial(self, partial: str, data: Data, durable: bool) -> None:
        os.makedirs(os.path.dirname(partial), exist_ok=True)
        with open(partial, "xb") as file:
            file.writelines(data if isinstance(data, tuple) else (data,))
            if durable:
                file.flush()
                os.fsync(file.fileno())

    def _link(self, partial: str, target: str) -> None:
        """Give a complete file its final name, its folder made anew each time that a delete has removed it."""
        folder = os.path.dirname(target)
        for _ in range(_MAX_LINK_TRIES):
            try:
                os.makedirs(folder, exist_ok=True)
                self._link_once(partial, target)
            except FileNotFoundError:
                continue
            except FileExistsError:  # from makedirs: there it was, and is gone again, or is a file
                if os.path.isfile(folder):
                    raise
                continue
            return
        raise FileNotFoundError(f"its folder vanished {_MAX_LINK_TRIES} times")

    def _link_once(self, partial: str, target: str) -> None:
        try:
            os.link(partial, target)
        except FileExistsError as exc:
            if os.path.isdir(target):
                raise IsADirectoryError(f"{target} is a folder") from exc
            raise VersionTaken(f"file://{target} exists already") from exc

    def _sync_folders(self, folder: str) -> None:
        """Make the names from `folder` up to the anchor durable.

        Always the whole chain: a folder that exists may be one that another writer made a moment ago and has not
        synced yet.
        """
        _fsync(folder)
        while folder != self.anchor and folder != "/":
            folder = os.path.dirname(folder)
            _fsync(folder)


def _walk(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield every file and folder below `folder`, except what is partial; what vanishes meanwhile is left out."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name != PARTIAL:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)


@lru_cache(maxsize=1)
def _sync_pool() -> ThreadPoolExecutor:
    """Return the threads that fsync, kept: starting some for every payload takes longer than their work.

    A process that forks without exec after their first use has none of them: nothing here does.
    """
    return ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="disk-sync")


def _fsync_all(paths: Sequence[str]) -> None:
    for path in paths:
        _fsync(path)


def _fsync(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # deleted meanwhile by somebody else: nothing is left to keep
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep_partial(root: str) -> None:
    """Remove what writers killed over an hour ago left behind; best effort, a slip costs a later writer one retry."""
    oldest = time.time() - _PARTIAL_LIFE_SECONDS
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(os.path.join(root, PARTIAL))):
            if entry.stat().st_mtime < oldest:
                os.unlink(entry.path)
