"""The wiring: open, read, call one islands function, write, report."""
