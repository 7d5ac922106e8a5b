"""Weights as a safetensors file, out and in. The only file that imports safetensors; knows arrays and paths."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from islands.types import ConfigError


def write_safetensors(
    target: Path, tensors: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str]
) -> None:
    """Write the tensors and text notes to `target`, whole or not at all; an existing file is replaced.

    Raises:
        ConfigError: the place cannot be written to.
    """
    data = save(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()},
        metadata=dict(notes),
    )
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, target)
    except OSError as exc:
        raise ConfigError(
            f"the export's folder must exist and be writable, got {target} ({exc}); choose another"
        ) from exc


def read_safetensors(
    source: Path,
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, str], str]:
    """Return a file's tensors as float32, its text notes, and the SHA-256 of its bytes.

    Raises:
        ConfigError: it cannot be read, or holds something else than floating point numbers that numpy knows.
    """
    try:
        data = source.read_bytes()
        tensors = load(data)
    except (OSError, SafetensorError, KeyError, TypeError) as exc:  # numpy has no bfloat16
        raise ConfigError(
            f"weights must be a readable safetensors file of float32, float64 or float16, got {source} ({exc}); "
            "correct the path, or convert the file"
        ) from exc
    if strange := [name for name, values in tensors.items() if values.dtype.kind != "f"]:
        raise ConfigError(
            f"weights must be floating point numbers, got {tensors[strange[0]].dtype} for {strange[0]} in {source}; "
            "remove that tensor"
        )
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    notes = header.get("__metadata__") or {}
    floats = {name: np.asarray(values, np.float32) for name, values in tensors.items()}
    return floats, notes, hashlib.sha256(data).hexdigest()
