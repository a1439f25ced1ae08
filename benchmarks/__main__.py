"""The benchmarks by name, `python -m benchmarks cpu --framework llamaindex`; without one all, one after the other."""

from __future__ import annotations

import importlib
import sys

from benchmarks import BENCHMARKS

if __name__ == "__main__":
    arguments = sys.argv[1:]
    names = [arguments.pop(0)] if arguments and arguments[0] in BENCHMARKS else BENCHMARKS
    for name in names:
        importlib.import_module(f"benchmarks.{name}").main(arguments)
