"""Records out of plain JSON values, each field's type checked.

Knows dataclasses, named tuples and their annotations; must not know what a record means. What a seal vouches for is who
wrote it, not that it makes sense: a value of another type must not go on to fail in the middle of a merge.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import lru_cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

# A larger whole number is no count, position or size, and from 10**308 on no float either.
LARGEST_WHOLE = 2**63 - 1


def parse(kind: Any, value: Any) -> Any:
    """Return `value`, as JSON holds it, as an instance of the annotation `kind`.

    Kinds: str, int, float, Literal[…], X | None, tuples, mappings with text keys, and records (dataclasses and named
    tuples) of these, which JSON holds as an object with exactly the record's fields, or as a list in their order. NaN
    is a float.

    Raises:
        ValueError: the value is of another type, or a whole number is out of range.
    """
    return _reader(kind)(value)


@lru_cache(maxsize=256)
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that reads one kind: what the annotation says is looked at once, not for every value."""
    origin = get_origin(kind)
    if origin is Literal:
        return partial(_read_choice, get_args(kind))
    if origin is types.UnionType:
        read = _reader(get_args(kind)[0])
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(get_args(kind))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(_reader(get_args(kind)[1]))
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _record_reader(kind)
    return _read_float if kind is float else partial(_read_plain, kind)


def _read_plain(kind: Any, value: Any) -> Any:
    _demand(type(value) is kind, f"of type {kind.__name__}", value)
    _demand(kind is not int or abs(value) <= LARGEST_WHOLE, "a number of 63 bits", value)
    return value


def _read_choice(choices: tuple[Any, ...], value: Any) -> Any:
    _demand(value in choices, f"one of {', '.join(map(str, choices))}", value)
    return value


def _read_float(value: Any) -> float:
    if type(value) is float:
        return value
    _demand(type(value) is int, "a number", value)
    return float(_read_plain(int, value))


def _mapping_reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_mapping(value: Any) -> dict[str, Any]:
        _demand(isinstance(value, Mapping), "an object", value)
        return {_read_plain(str, key): read(item) for key, item in value.items()}

    return read_mapping


def _tuple_reader(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]
    is_open = kinds[-1] is Ellipsis

    def read_tuple(value: Any) -> tuple[Any, ...]:
        _demand(isinstance(value, list | tuple), "a list", value)
        if is_open:
            return tuple(map(readers[0], value))
        _demand(len(value) == len(readers), f"a list of {len(readers)}", value)
        return tuple(read(item) for read, item in zip(readers, value, strict=True))

    return read_tuple


def _record_reader(kind: Any) -> Callable[[Any], Any]:
    fields = get_type_hints(kind)
    readers = {name: _reader(each) for name, each in fields.items()}
    read_row = _tuple_reader(tuple(fields.values()))

    def read_record(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return kind(*read_row(value))
        _demand(isinstance(value, Mapping), "an object", value)
        _demand(value.keys() == readers.keys(), f"an object of {', '.join(readers)}", value)
        return kind(**{name: read(value[name]) for name, read in readers.items()})

    return read_record


def _demand(is_met: bool, what: str, value: Any) -> None:
    if not is_met:
        raise ValueError(f"must be {what}, got {type(value).__name__} {str(value)[:60]}")
