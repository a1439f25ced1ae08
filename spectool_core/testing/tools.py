"""Tools of chosen latency that count what is done to them; plain functions, for any framework to wrap."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectool_core.errors import ConfigurationError
from spectool_core.testing.latch import Latch
from spectool_core.testing.tally import Tally

__all__ = ["FakeTool", "FakeToolStatistics"]


@dataclass(frozen=True, slots=True)
class FakeToolStatistics:
    """The runs of a fake tool so far: each started one is running, finished, failed or cancelled."""

    num_started: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    max_concurrent: int = 0

    @property
    def num_running(self) -> int:
        """How many run now."""
        return self.num_started - self.num_finished - self.num_failed - self.num_cancelled


class FakeTool:
    """A tool that takes its time, then returns or raises what the test chose.

    Args:
        name: the tool's name.
        latency_s: seconds of one run, or a function of its arguments; `asyncio.sleep` in `coroutine`, `time.sleep` in
            `function`.
        result: what a run returns; a function is called with the arguments and gives it.
        error: what a run raises instead, or a function of the arguments that gives it or None.
        parameters: the parameters by name, each a type, or a type and a default.
        doc: the docstring.
        latch: every run waits here first, so that tests with threads need no wall time.
    """

    def __init__(
        self,
        name: str,
        *,
        latency_s: float | Callable[[Mapping[str, Any]], float] = 0.0,
        result: Any = "ok",
        error: BaseException | Callable[[Mapping[str, Any]], BaseException | None] | None = None,
        parameters: Mapping[str, Any] | None = None,
        doc: str = "A fake tool.",
        latch: Latch | None = None,
    ) -> None:
        if isinstance(latency_s, int | float) and latency_s < 0:
            raise ConfigurationError("latency_s", latency_s, "a number of at least 0, or a function")
        self.name = name
        self._latency_s = latency_s
        self._result = result
        self._error = error
        self._latch = latch
        self._tally = Tally(FakeToolStatistics())
        self._arguments: list[Mapping[str, Any]] = []
        self._signature = _signature({"query": str} if parameters is None else parameters)
        self.coroutine = self._dressed(self._make_coroutine(), doc)
        self.function = self._dressed(self._make_function(), doc)

    coroutine: Callable[..., Coroutine[Any, Any, Any]]
    """The tool as an async function."""

    function: Callable[..., Any]
    """The tool as a function that blocks its thread."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The arguments of every run in order of start, defaults filled in."""
        return tuple(self._arguments)

    def statistics(self) -> FakeToolStatistics:
        """The counts so far."""
        return self._tally.value

    def wait_until(
        self, predicate: Callable[[FakeToolStatistics], bool], *, timeout_s: float = 10.0
    ) -> FakeToolStatistics:
        """Block until `predicate(statistics)` holds and return them; raise TimeoutError after `timeout_s`."""
        return self._tally.wait_until(predicate, timeout_s)

    async def until(
        self, predicate: Callable[[FakeToolStatistics], bool], *, timeout_s: float = 10.0
    ) -> FakeToolStatistics:
        """Await what `wait_until` blocks for."""
        return await self._tally.until(predicate, timeout_s)

    def _make_coroutine(self) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            arguments = self._start(args, kwargs)
            try:
                if self._latch is not None:
                    await self._latch.pass_through()
                await asyncio.sleep(self._latency_of(arguments))
                result = self._end(arguments)
            except asyncio.CancelledError:
                self._count(num_cancelled=1)
                raise
            except BaseException:
                self._count(num_failed=1)
                raise
            self._count(num_finished=1)
            return result

        return coroutine

    def _make_function(self) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            arguments = self._start(args, kwargs)
            try:
                if self._latch is not None:
                    self._latch.wait()
                latency_s = self._latency_of(arguments)
                if latency_s:
                    time.sleep(latency_s)
                result = self._end(arguments)
            except BaseException:
                self._count(num_failed=1)
                raise
            self._count(num_finished=1)
            return result

        return function

    def _start(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # Within the update, so that `calls` and the counts never disagree.
        self._tally.update(lambda counts: self._started(counts, bound.arguments))
        return bound.arguments

    def _started(self, counts: FakeToolStatistics, arguments: Mapping[str, Any]) -> FakeToolStatistics:
        self._arguments.append(arguments)
        max_concurrent = max(counts.max_concurrent, counts.num_running + 1)
        return replace(counts, num_started=counts.num_started + 1, max_concurrent=max_concurrent)

    def _end(self, arguments: Mapping[str, Any]) -> Any:
        error = self._error(arguments) if callable(self._error) else self._error
        if error is not None:
            raise error
        return self._result(arguments) if callable(self._result) else self._result

    def _latency_of(self, arguments: Mapping[str, Any]) -> float:
        return self._latency_s(arguments) if callable(self._latency_s) else self._latency_s

    def _count(self, **changes: int) -> None:
        self._tally.update(
            lambda counts: replace(counts, **{name: getattr(counts, name) + change for name, change in changes.items()})
        )

    def _dressed(self, function: Any, doc: str) -> Any:
        """Give `function` the name, docstring and signature by which frameworks know a tool."""
        function.__name__ = function.__qualname__ = self.name
        function.__doc__ = doc
        function.__signature__ = self._signature
        function.__annotations__ = {
            **{name: parameter.annotation for name, parameter in self._signature.parameters.items()},
            "return": Any,
        }
        return function


def _signature(parameters: Mapping[str, Any]) -> inspect.Signature:
    def parameter(name: str, declared: Any) -> inspect.Parameter:
        kind, default = declared if isinstance(declared, tuple) else (declared, inspect.Parameter.empty)
        return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=default)

    return inspect.Signature([parameter(*item) for item in parameters.items()], return_annotation=Any)
