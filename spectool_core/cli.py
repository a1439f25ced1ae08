"""The command line: `spectool explain TRACE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from spectool_core.errors import ConfigurationError
from spectool_core.explain import explain, replayed
from spectool_core.trace import read_trace

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    parser = argparse.ArgumentParser(prog="spectool", description="Speculative tool calls for LLM agents.")
    parser.add_argument("--version", action="version", version=version("spectool"))
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="say why each tool and speculator is on or off")
    command.add_argument("trace", help="a file written by spectool_core.trace.EventTrace")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(explain(replayed(read_trace(options.trace))) + "\n")
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"spectool: {error}\n")
        return 1
    return 0
