"""Where the bytes of a run lie: six verbs over a folder, a bucket or this process's memory.

Knows URLs, object names, atomic creation and durability. It must not know what the objects mean: no header, payload,
version or learner. It is the only file that imports obstore.

Local disk is `infra/disk.py`, since obstore's own local store is not durable.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import GCSStore, MemoryStore, S3Store

from infra.disk import Data, check_name, check_prefix, has_control, open_disk
from islands.types import ConfigError, StoreUnavailable, StoreUnreachable, VersionTaken

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

_Handle = S3Store | GCSStore | MemoryStore
_VENDOR_ERRORS = (BaseError, OSError, ValueError)
# 16 MiB in 120 s: an object of the usual size passes over a link of 1.2 Mbit/s.
_CLIENT: ClientConfig = {"connect_timeout": "5s", "timeout": "120s"}
# So long may a connection be silent. Not while a large object is sent: no answer comes before all of it has passed.
_STALL: ClientConfig = {"read_timeout": "8s"}
_MOST_QUICK_BYTES = 2**18
# With back-off and jitter (obstore's: 0.1 s, doubled each time) two to three seconds in all. Not longer: whoever asks
# has a pause of its own, and looks after other things in between.
_RETRIES: RetryConfig = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3)},
}
_PROBE_CLIENT: ClientConfig = {"connect_timeout": "3s", "timeout": "5s"}
_PROBE_RETRIES: RetryConfig = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}


class Store(Protocol):
    """A flat space of immutable objects. Every verb may be called from several threads at once.

    Names are relative, with "/" between parts; see `check_name`. A prefix is a folder: "inbox/f1" and "inbox/f1/"
    mean the same and do not cover "inbox/f10/a"; "" is everything. A bad name raises ValueError, it is our bug.
    """

    @property
    def url(self) -> str:
        """Where this store lies; `open_store` of it opens the same place (except for nameless memory)."""
        ...

    def create(self, name: str, data: Data, *, sync: bool = True) -> None:
        """Create an object whole, or not at all; never replace one.

        With `sync` the object is durable on return; without, after a `sync` of a folder above it.

        Raises:
            VersionTaken: the name exists. A cloud client repeats a request whose answer was lost, and may then meet
                its own object: read the object to learn who was first.
            StoreUnavailable: disk full, no permission, no answer. The object may exist all the same.
        """
        ...

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an object, or None if there is none.

        Raises:
            StoreUnavailable: the store did not answer.
        """
        ...

    def list_names(self, prefix: str) -> list[str]:
        """Return the full name of every object below a prefix, sorted; always asked anew.

        Raises:
            StoreUnavailable: the store did not answer.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object; one that is absent is fine. Not made durable: a power cut may bring it back.

        Raises:
            StoreUnavailable: the store did not answer.
        """
        ...

    def sync(self, prefix: str) -> None:
        """Make every object below a prefix durable. Does nothing where `create` is durable by itself.

        Raises:
            StoreUnavailable: the disk refused.
        """
        ...

    def within(self, prefix: str) -> Store:
        """Return a view of a folder: the same objects under shorter names. Reads and writes nothing."""
        ...


def open_store(url: str, *, durable: bool = True) -> Store:
    """Return the store at a URL, after checking that it answers. Creates nothing.

    Args:
        url: `file:///absolute`, `file://./relative`, `memory://` (new and empty each time), `memory://name` (one per
            name and process), `s3://bucket/prefix` or `gs://bucket/prefix`. A file path is taken literally, without
            percent-decoding. Cloud endpoint and credentials come from the environment, as obstore reads them.
        durable: False leaves out every fsync on local disk: for tests and throw-away runs.

    Raises:
        ConfigError: the URL cannot be opened; the message holds rule, value and remedy.
        StoreUnreachable: a cloud did not answer within about 10 s; that is a ConfigError too.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("file", "memory", "s3", "gs"):
        raise ConfigError(
            f"a store URL must begin with file://, memory://, s3:// or gs://, got {scheme!r}; "
            "for a local folder write file://./runs"
        )
    if has_control(rest):
        raise ConfigError(f"a store URL must not hold control characters, got {url!r}; remove them")
    if scheme == "file":
        return open_disk(rest, durable)
    if scheme == "memory":
        return _open_memory(rest)
    return _open_cloud(scheme, rest)


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A place that obstore serves: a cloud bucket, or memory. `folder` is "" or ends in "/".

    `patient` sends large objects, `handle` does all else, and notices a connection that has gone silent.
    """

    handle: _Handle
    patient: _Handle
    base_url: str
    folder: str

    @property
    def url(self) -> str:
        return f"{self.base_url}/{self.folder}".rstrip("/") if self.folder else self.base_url

    def create(self, name: str, data: Data, *, sync: bool = True) -> None:
        key = self.folder + check_name(name)
        try:
            # A copy: the memory store keeps the buffer that it is handed, and the caller's may change later.
            whole = b"".join(data) if isinstance(data, tuple) else bytes(data)
            handle = self.handle if len(whole) <= _MOST_QUICK_BYTES else self.patient
            obstore.put(handle, key, whole, mode="create")
        except AlreadyExistsError as exc:
            raise VersionTaken(f"{self.url}/{name} exists already") from exc
        except _VENDOR_ERRORS as exc:
            raise StoreUnavailable(f"cannot create {self.url}/{name}: {_first_line(exc)}") from exc

    def read(self, name: str) -> bytes | None:
        key = self.folder + check_name(name)
        try:
            return obstore.get(self.handle, key).bytes().to_bytes()
        except FileNotFoundError:
            return None
        except _VENDOR_ERRORS as exc:
            raise StoreUnavailable(f"cannot read {self.url}/{name}: {_first_line(exc)}") from exc

    def list_names(self, prefix: str) -> list[str]:
        start = self.folder + check_prefix(prefix)
        try:
            pages = obstore.list(self.handle, start or None, chunk_size=1000)
            return sorted(item["path"][len(self.folder) :] for page in pages for item in page)
        except _VENDOR_ERRORS as exc:
            raise StoreUnavailable(f"cannot list {self.url}/{prefix}: {_first_line(exc)}") from exc

    def delete(self, name: str) -> None:
        key = self.folder + check_name(name)
        try:
            obstore.delete(self.handle, key)
        except FileNotFoundError:
            return
        except _VENDOR_ERRORS as exc:
            raise StoreUnavailable(f"cannot delete {self.url}/{name}: {_first_line(exc)}") from exc

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def within(self, prefix: str) -> ObjectStore:
        return replace(self, folder=self.folder + check_prefix(prefix))


# `memory://name` is this process's own: an entry lives as long as the process.
_shared_memory: dict[str, MemoryStore] = {}
_shared_memory_lock = threading.Lock()


def _open_memory(rest: str) -> ObjectStore:
    name, _, folder = rest.partition("/")
    with _shared_memory_lock:
        handle = _shared_memory.setdefault(name, MemoryStore()) if name else MemoryStore()
    return ObjectStore(
        handle, handle, f"memory://{name}", _check_url_folder(f"memory://{rest}", folder)
    )


def _open_cloud(scheme: str, rest: str) -> ObjectStore:
    bucket, _, folder = rest.partition("/")
    if "@" in rest or "?" in rest or not bucket:
        raise ConfigError(
            f"a store URL must be {scheme}://bucket/prefix, without credentials or options (not shown); "
            "set them in the environment"
        )
    url = f"{scheme}://{bucket}"
    folder = _check_url_folder(f"{url}/{folder}", folder)
    try:
        probe = _connect(scheme, bucket, _PROBE_CLIENT, _PROBE_RETRIES)
        next(iter(obstore.list(probe, folder or None, chunk_size=1)), None)
        quick = _connect(scheme, bucket, {**_CLIENT, **_STALL}, _RETRIES)
        patient = _connect(scheme, bucket, _CLIENT, _RETRIES)
    except _VENDOR_ERRORS as exc:
        raise StoreUnreachable(
            f"a store must answer when it is opened, got {url}: {_first_line(exc)}; check the bucket's name, the "
            "credentials, and for S3 AWS_ENDPOINT_URL and AWS_REGION (AWS_ALLOW_HTTP=true for an http endpoint)"
        ) from exc
    return ObjectStore(quick, patient, url, folder)


def _connect(
    scheme: str, bucket: str, client: ClientConfig, retries: RetryConfig
) -> S3Store | GCSStore:
    if scheme == "gs":
        return GCSStore(bucket, client_options=client, retry_config=retries)
    # As `config` these keys join the client options of the environment (AWS_ALLOW_HTTP, a proxy, a certificate);
    # as `client_options` they would replace them.
    return S3Store(bucket, config=cast("S3Config", client), retry_config=retries)


def _check_url_folder(url: str, folder: str) -> str:
    try:
        return check_prefix(folder)
    except ValueError as exc:
        raise ConfigError(
            f"a store URL must end in a plain folder, got {url!r}: {exc}; choose another"
        ) from exc


def _first_line(exc: BaseException) -> str:
    """Return an error's message without the many lines of debug output that obstore appends."""
    return str(exc).partition("\n")[0]
