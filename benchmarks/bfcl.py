"""The multi-turn simulators of bfcl-eval, really run under speculation: how many reads hit, and whether any was stale.

Not part of the dependencies: `pip install --no-deps bfcl-eval mpmath`. The episodes of even ids are played, with the
calls of the ground truth.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import copy
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spectool_core import HistorySpeculator, Prompt, RunContext, Speculation, ToolCall, ToolPolicy
from spectool_core.canonical import CallKey, canonicalize
from spectool_core.runs import NotPrepared, PreparedCall, Scope
from spectool_core.testing import run_virtual

__all__ = ["Outcome", "main", "play"]

_READS = ("get_", "view_", "list_", "display_", "check_", "find", "search_", "estimate_", "calculate_", "compute_")
_READS_OF_FILES = frozenset({"cat", "diff", "du", "grep", "ls", "pwd", "sort", "tail", "wc"})
_READ = ToolPolicy(ttl_s=3600, reuse="ttl")  # kept from turn to turn, so that writes in between matter
_GENERATION_S, _TOOL_S = 1.0, 0.5


@dataclass
class Outcome:
    """Counts of all episodes; `num_stale` are hits whose result the simulator would not have given at that moment."""

    num_turns: int = 0
    num_reads: int = 0
    num_hits: int = 0
    num_runs: int = 0
    num_stale: int = 0


class Simulators:
    """The simulators of one episode as a toolbox. A method is marked if its name says that it reads."""

    def __init__(self, entry: Mapping[str, Any], outcome: Outcome) -> None:
        paths = importlib.import_module("bfcl_eval.constants.executable_backend_config").CLASS_FILE_PATH_MAPPING
        self._outcome = outcome
        self._objects: list[Any] = []
        for name in entry["involved_classes"]:
            simulator = getattr(importlib.import_module(paths[name]), name)()
            if hasattr(simulator, "_load_scenario"):
                simulator._load_scenario(copy.deepcopy(entry["initial_config"].get(name, {})))
            self._objects.append(simulator)
        self._tools = {
            name: object() for simulator in self._objects for name in dir(simulator) if not name.startswith("_")
        }

    def schemas(self) -> list[Mapping[str, Any]]:
        """The tools in OpenAI format, by name alone."""
        return [{"type": "function", "function": {"name": name}} for name in self._tools]

    def policy(self, name: str) -> ToolPolicy | None:
        """See `Toolbox`."""
        return _READ if name in self._tools and _is_read(name) else None

    def prepare(self, call: ToolCall, scope: Scope) -> PreparedCall:
        """See `Toolbox`."""
        if call.name not in self._tools:
            raise NotPrepared("unknown")
        key = CallKey(self._tools[call.name], scope, canonicalize(call.arguments))
        return PreparedCall(call, key, scope, _READ, functools.partial(self._run_early, call), blocking=False)

    async def _run_early(self, call: ToolCall) -> Any:
        self._outcome.num_runs += 1
        result = self.run(call)
        await asyncio.sleep(_TOOL_S)
        return result

    def run(self, call: ToolCall) -> Any:
        """What the simulator returns now."""
        return self._method(self._objects, call.name)(**call.arguments)

    def run_apart(self, call: ToolCall) -> Any:
        """The same, of a copy."""
        return self._method(copy.deepcopy(self._objects), call.name)(**call.arguments)

    def call_of(self, source: str) -> ToolCall:
        """The call that a line of the ground truth is."""
        node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError(source)
        method = self._method(self._objects, node.func.id)
        names = method.__code__.co_varnames[1:]
        arguments = dict(zip(names, map(ast.literal_eval, node.args), strict=False))
        arguments |= {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        return ToolCall(node.func.id, arguments)

    @staticmethod
    def _method(objects: Sequence[Any], name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = next(getattr(each, name) for each in objects if hasattr(each, name))
        return method


def _is_read(name: str) -> bool:
    return name in _READS_OF_FILES or name.startswith(_READS)


def play(**settings: Any) -> Outcome:
    """Play all episodes on the virtual clock, twice over, with one speculator that learns as it goes.

    Args:
        settings: of the `Speculation`.
    """
    outcome = Outcome()

    async def main() -> None:
        speculation = Speculation([HistorySpeculator(max_predictions=8, min_probability=0.0)], **settings)
        for entry, truth in _episodes() * 2:
            await _play_episode(speculation, entry, truth, outcome)
        speculation.close()

    run_virtual(main)
    return outcome


async def _play_episode(
    speculation: Speculation, entry: Mapping[str, Any], truth: Sequence[Sequence[str]], outcome: Outcome
) -> None:
    simulators = Simulators(entry, outcome)
    schemas = simulators.schemas()
    context = RunContext(run=object())
    messages: list[Mapping[str, Any]] = []
    for said, sources in zip(entry["question"], truth, strict=False):
        messages += said
        for source in [*sources, None]:
            call = None if source is None else simulators.call_of(source)
            outcome.num_turns += 1
            loop = asyncio.get_running_loop()
            turn = speculation.start_turn(Prompt(list(messages)), schemas, simulators, context, loop=loop)
            await asyncio.sleep(_GENERATION_S)
            turn.answer([] if call is None else [call])
            if call is None:
                messages.append({"role": "assistant", "content": "Done."})
                continue
            result = await _served(speculation, turn, context, simulators, call, outcome)
            id_ = f"call_{entry['id']}_{outcome.num_turns}"
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            asked = {"id": id_, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [asked]})
            messages.append({"role": "tool", "tool_call_id": id_, "content": json.dumps(result, default=str)})


async def _served(
    speculation: Speculation, turn: Any, context: RunContext, simulators: Simulators, call: ToolCall, outcome: Outcome
) -> Any:
    if simulators.policy(call.name) is None:
        write = speculation.begin_write(context, None)
        try:
            return simulators.run(call)
        finally:
            write.end()
    outcome.num_reads += 1
    claimed = await turn.claim(call)
    if claimed.outcome == "miss":
        return simulators.run(call)
    outcome.num_hits += 1
    outcome.num_stale += claimed.result != simulators.run_apart(call)
    return claimed.result


def _episodes() -> list[tuple[Mapping[str, Any], Sequence[Sequence[str]]]]:
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("bfcl-eval is not installed: pip install --no-deps bfcl-eval mpmath")
    data = Path(spec.origin).parent / "data"
    (questions,) = data.glob("BFCL_v*_multi_turn_base.json")
    truths = {each["id"]: each["ground_truth"] for each in _lines(data / "possible_answer" / questions.name)}
    return [(each, truths[each["id"]]) for each in _lines(questions) if int(each["id"].rpartition("_")[2]) % 2 == 0]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures; exit with an error if any result was stale."""
    argparse.ArgumentParser(description=__doc__).parse_known_args(arguments)
    everything = {"min_probability": 0.0, "adaptive": False}
    for title, settings in (("default settings", {}), ("all that is predicted is run", everything)):
        outcome = play(**settings)
        print(f"{title}: {outcome.num_turns} turns, {outcome.num_reads} reads, {outcome.num_hits} of them hit,")
        print(f"{outcome.num_runs} early runs, {outcome.num_stale} stale results served")
        if outcome.num_stale:
            raise SystemExit("stale results were served")


if __name__ == "__main__":
    main()
