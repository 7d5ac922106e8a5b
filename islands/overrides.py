"""How single values are laid into a configuration tree, and how a broken rule is worded.

This module knows dotted paths, TOML literals and JSON schemas as plain mappings. It must not know
which options exist, pydantic, a file or the process environment: the schema and the text come in
as arguments.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from islands.types import ConfigError

Schema = Mapping[str, Any]

_REMEDIES = {
    "bool_type": "write true or false",
    "finite_number": "write a finite number",
    "float_type": "write a number without quotes",
    "int_from_float": "write a whole number",
    "int_type": "write a whole number without quotes",
    "literal_error": "choose one of these",
    "model_type": "write a table",
    "string_type": "write it in quotes",
    "tuple_type": "write a list",
}


@dataclass(frozen=True, slots=True)
class Override:
    """One value from outside the file: where it came from, where it goes, its text.

    `variable_prefix` is that of an environment variable, and empty for an assignment.
    """

    origin: str
    path: tuple[str, ...]
    text: str
    variable_prefix: str = ""

    def spelled(self, dotted: str) -> str:
        """Return the dotted path the way this kind of override writes it."""
        if not self.variable_prefix:
            return dotted
        return self.variable_prefix + dotted.replace(".", "__").upper()


def from_environment(environment: Mapping[str, str], prefix: str) -> list[Override]:
    """Return the overrides among the variables, whole sections before single values inside them."""
    overrides: dict[tuple[str, ...], Override] = {}
    for name in sorted(environment):
        if not name.upper().startswith(prefix):
            continue
        path = tuple(name[len(prefix) :].lower().split("__"))
        if path in overrides:
            first = overrides[path].origin
            raise ConfigError(
                f"environment {name}: a value must be given once, "
                f"got it from {first} too; unset one of them"
            )
        overrides[path] = Override(f"environment {name}", path, environment[name], prefix)
    return sorted(overrides.values(), key=lambda override: len(override.path))


def from_assignments(assignments: Sequence[str]) -> list[Override]:
    """Return the overrides that texts of the form `a.b=c` stand for, in the order given."""
    overrides = []
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        if not equals or not dotted.strip():
            raise ConfigError(
                f"an assignment must have the form a.b=c, got {shown(assignment)}; "
                "write for example sync.period_steps=24"
            )
        dotted = dotted.strip()
        overrides.append(Override(f"assignment {dotted}", tuple(dotted.split(".")), text))
    return overrides


def assign(tree: dict[str, Any], override: Override, schema: Schema) -> str:
    """Put the override's value into `tree`, in place, and return its dotted path with indices.

    A section or list that the tree lacks is filled in from the schema's default first, so that one
    member of a default list can be changed.

    Raises:
        ConfigError: the path leads nowhere, or the text is no TOML literal.
    """
    node: Any = tree
    here: Schema = schema
    done: list[str] = []
    for depth, key in enumerate(override.path):
        is_last = depth == len(override.path) - 1
        place: str | int = key
        if "properties" in here:
            if key not in here["properties"]:
                raise ConfigError(
                    unknown_key([*done, key], override.text.strip(), schema, override)
                )
            _demand(node, dict, "a table", done)
            here = _resolved(here["properties"][key], schema)
            if not is_last:
                node.setdefault(key, copy.deepcopy(here.get("default", {})))
        elif "items" in here:
            _demand(node, list, "a list", done)
            place = _index(node, key, done)
            here = _resolved(here["items"], schema)
        else:
            raise ConfigError(unknown_key([*done, key], override.text.strip(), schema, override))
        done.append(str(place))
        if is_last:
            node[place] = _literal(override.text.strip(), here, ".".join(done))
        else:
            node = node[place]
    return ".".join(done)


def to_json(tree: Mapping[str, Any], *, source: str) -> str:
    """Return the TOML tree as JSON text; TOML's dates have no place in it and are refused."""

    def refuse(value: object) -> None:
        raise ConfigError(
            f"{source}: a value must be text, a number, true, false, a list or a table, "
            f"got the date or time {value}; put it in quotes"
        )

    return json.dumps(tree, default=refuse)


def describe(error: Mapping[str, Any], schema: Schema) -> Iterator[str]:
    """Yield the lines `path rule, got value; remedy` for one entry of pydantic's error list."""
    path = [str(part) for part in error["loc"]]
    dotted = ".".join(path) or "the configuration"
    kind, value = error["type"], error["input"]
    if kind == "value_error":
        yield from str(error["ctx"]["error"]).splitlines()
    elif kind == "extra_forbidden":
        yield unknown_key(path, value, schema)
    elif kind == "missing":
        yield f"{dotted} is required, got nothing; add it"
    elif kind == "too_short" and len(value) >= error["ctx"]["min_length"]:
        return  # long enough, but pydantic counts only the valid items, and named the others already
    elif kind == "json_invalid":
        yield f"{dotted} must be JSON, got an error: {error['ctx']['error']}; correct that place"
    else:
        rule = re.sub(r"^.*?should ", "must ", error["msg"])
        remedy = _REMEDIES.get(kind, "choose another value")
        yield f"{dotted} {rule}, got {shown(value)}; {remedy}{_hint(path, kind, schema)}"


def origin_of(line: str, origins: Mapping[str, str]) -> str | None:
    """Return the origin of the value that a line of `describe` complains about, if one is known."""
    parts = line.split(" ", 1)[0].split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((origins[prefix] for prefix in prefixes if prefix in origins), None)


def unknown_key(
    path: Sequence[str], value: object, schema: Schema, override: Override | None = None
) -> str:
    """Return the line that calls `path` unknown and names the likeliest keys meant instead."""
    *parents, leaf = path
    siblings = list((_schema_at(parents, schema) or {}).get("properties", {}))
    elsewhere = list(_dotted_keys(schema, schema))
    close = difflib.get_close_matches
    leaves = {dotted.rpartition(".")[2] for dotted in elsewhere}
    likely = (
        [dotted for dotted in elsewhere if dotted.rpartition(".")[2] == leaf]
        or [".".join([*parents, name]) for name in close(leaf, siblings, n=1)]
        or [
            dotted
            for name in close(leaf, sorted(leaves), n=1)
            for dotted in elsewhere
            if dotted.rpartition(".")[2] == name
        ]
    )
    spell = override.spelled if override else str
    if likely:
        remedy = f"did you mean {' or '.join(map(spell, likely))}?"
    elif siblings:
        remedy = f"choose one of {', '.join(spell('.'.join([*parents, key])) for key in siblings)}"
    else:
        remedy = f"{'.'.join(parents)} is a single value; remove the rest"
    return f"{'.'.join(path)} is unknown, got {shown(value)}; {remedy}"


def shown(value: object) -> str:
    """Return the value as a reader of a message wants it: quoted text, at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _hint(path: Sequence[str], kind: str, schema: Schema) -> str:
    here = _schema_at(path, schema) or {}
    if kind == "string_pattern_mismatch":
        return f" ({here['description'].rstrip('.')})"
    default = here.get("default")
    if default is None or isinstance(default, dict | list):
        return ""
    return f" (default {shown(default)})"


def _demand(node: object, kind: type, what: str, done: Sequence[str]) -> None:
    if not isinstance(node, kind):
        raise ConfigError(f"{'.'.join(done)} must be {what}, got {shown(node)}; correct it first")


def _index(items: Sequence[Any], key: str, done: Sequence[str]) -> int:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if key in names:  # a name wins over an index, should an island be called "0"
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    known = [name for name in names if isinstance(name, str)]
    listed = f"a name ({', '.join(known)}) or " if known else ""
    likely = difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {likely[0]}?" if likely else "correct it, or add the entry to the file"
    raise ConfigError(
        f"{'.'.join(done)} must be followed by {listed}an index below {len(items)}, "
        f"got {shown(key)}; {remedy}"
    )


def _literal(text: str, here: Schema, dotted: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # also an integer of more digits than Python converts
        parsed = {}
    if parsed.keys() == {"value"}:  # more keys: the text held a line break and a second statement
        return parsed["value"]
    takes_text = any(option.get("type") == "string" for option in (here, *here.get("anyOf", ())))
    if takes_text and text.isprintable() and text[:1] not in ("", '"', "'", "[", "{"):
        return text
    raise ConfigError(
        f"{dotted} must be a TOML literal, got {shown(text)}; "
        'write a number, true, false, "text" in quotes, or a list in brackets'
    )


def _resolved(node: Schema, schema: Schema) -> Schema:
    # Before 2.9, pydantic wrapped references.
    holder = node["allOf"][0] if "allOf" in node else node
    if "$ref" not in holder:
        return node
    return {**schema["$defs"][holder["$ref"].rpartition("/")[2]], **node}


def _schema_at(path: Sequence[str], schema: Schema) -> Schema | None:
    here: Schema = schema
    for key in path:
        child = here.get("properties", {}).get(key) or here.get("items")
        if child is None:
            return None
        here = _resolved(child, schema)
    return here


def _dotted_keys(here: Schema, schema: Schema, prefix: str = "") -> Iterator[str]:
    for key, child in here.get("properties", {}).items():
        yield f"{prefix}{key}"
        resolved = _resolved(child, schema)
        yield from _dotted_keys(resolved, schema, f"{prefix}{key}.")
        if "items" in resolved:
            yield from _dotted_keys(
                _resolved(resolved["items"], schema), schema, f"{prefix}{key}.N."
            )
