"""The algorithm: pure functions over arrays, records and an explicit `now`."""
