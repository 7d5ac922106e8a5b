"""Records as bytes that know their own digest.

Knows JSON and SHA-256; must not know what a record means. One record has exactly one form as bytes, so any change of
any byte shows, without a second object to compare with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from islands.types import FORMAT_VERSION, DamagedObject, OtherFormat


def seal(body: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return (bytes, digest): canonical JSON with the format version and its own SHA-256 (hex) added, and that.

    Keys are sorted; floats are written shortest-exact; NaN and infinities are allowed (as JavaScript writes them),
    because a contribution that holds them must still be readable to be refused.
    """
    # Put together from the one text of the body: written out anew for each use it would be most of a record's cost.
    text = _canonical(body)
    end = b',"format":%d}' % FORMAT_VERSION
    digest = hashlib.sha256(b'{"body":' + text + end).hexdigest()
    return b'{"body":' + text + b',"digest":"' + digest.encode() + b'"' + end, digest


def unseal(name: str, data: bytes) -> tuple[dict[str, Any], str]:
    """Return (body, digest) of a sealed record.

    Raises:
        DamagedObject: not what `seal` wrote; `name` is named.
        OtherFormat: what another version's `seal` wrote.
    """
    try:
        record = json.loads(data)
        body, digest, version = record["body"], record["digest"], record["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise DamagedObject(name, f"is no sealed record ({exc})") from exc
    if version != FORMAT_VERSION:
        raise OtherFormat(name, f"has format {version}, this program reads {FORMAT_VERSION}")
    if not isinstance(body, dict) or seal(body)[0] != data:
        raise DamagedObject(name, "its bytes do not match their digest")
    return body, digest


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
