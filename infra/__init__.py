"""The outside world: one vendor per file."""
