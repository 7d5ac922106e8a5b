"""Final weights as a safetensors file. The only file that imports safetensors; knows arrays and paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

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
