"""The one reader of the process environment.

This module knows that `os.environ` exists; it must not know what any variable means.
"""

from __future__ import annotations

import os

PREFIX = "DILOCO_"


def environment() -> dict[str, str]:
    """Return the `DILOCO_…` variables of this process as they are now, names unchanged."""
    return {name: value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
