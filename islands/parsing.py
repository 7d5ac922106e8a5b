"""Records out of plain JSON values, each field's type checked.

Knows dataclasses, named tuples and their annotations; must not know what a record means. What a seal vouches for is who
wrote it, not that it makes sense: a value of another type must not go on to fail in the middle of a merge.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

# A larger whole number is no count, position or size, and from 10**308 on no float either.
LARGEST_WHOLE = 2**63 - 1


def parse(kind: Any, value: Any) -> Any:
    """Return `value`, as JSON holds it, as an instance of the annotation `kind`.

    Kinds: str, int, float, X | None, tuples, mappings with text keys, and records (dataclasses and named tuples) of
    these, which JSON holds as an object with exactly the record's fields, or as a list in their order. NaN is a float.

    Raises:
        ValueError: the value is of another type, or a whole number is out of range.
    """
    origin = get_origin(kind)
    if origin is types.UnionType:
        return None if value is None else parse(get_args(kind)[0], value)
    if origin is tuple:
        return _parse_tuple(get_args(kind), value)
    if origin is not None and issubclass(origin, Mapping):
        _demand(isinstance(value, Mapping), "an object", value)
        return {parse(str, key): parse(get_args(kind)[1], item) for key, item in value.items()}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _parse_record(kind, value)
    if kind is float:
        _demand(type(value) in (int, float), "a number", value)
        return value if type(value) is float else float(parse(int, value))
    _demand(type(value) is kind, f"of type {kind.__name__}", value)
    _demand(kind is not int or abs(value) <= LARGEST_WHOLE, "a number of 63 bits", value)
    return value


def _parse_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    _demand(isinstance(value, list | tuple), "a list", value)
    each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
    _demand(len(value) == len(each), f"a list of {len(each)}", value)
    return tuple(parse(kind, item) for kind, item in zip(each, value, strict=True))


def _parse_record(kind: Any, value: Any) -> Any:
    fields = _fields(kind)
    if isinstance(value, list | tuple):
        return kind(*_parse_tuple(tuple(fields.values()), value))
    _demand(isinstance(value, Mapping), "an object", value)
    _demand(value.keys() == fields.keys(), f"an object of {', '.join(fields)}", value)
    return kind(**{name: parse(fields[name], value[name]) for name in fields})


@lru_cache(maxsize=64)
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _demand(is_met: bool, what: str, value: Any) -> None:
    if not is_met:
        raise ValueError(f"must be {what}, got {type(value).__name__} {str(value)[:60]}")
