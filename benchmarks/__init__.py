"""Figures for docs/evaluation.md; they print and assert nothing about time."""

BENCHMARKS = ("latency", "cpu", "micro", "history")
"""Modules of this package, each with a `main(arguments)`."""
