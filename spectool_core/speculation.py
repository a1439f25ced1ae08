"""`Speculation`: what an application sets up once and gives to its tool nodes, middleware or agents."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

from spectool_core.accounts import Accounts
from spectool_core.cache import Slots, ToolCache
from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.config import Mode, SpeculationConfig, validated_config
from spectool_core.engine import EngineClient, engine_client
from spectool_core.errors import ConfigurationError
from spectool_core.events import Event, Hook, ToolObserved, announce
from spectool_core.explain import explain
from spectool_core.fences import Fences, Write
from spectool_core.gate import Gate
from spectool_core.launching import TurnRules
from spectool_core.load import LoopLoad
from spectool_core.loops import run_on, running_loop, wait_in_thread
from spectool_core.runs import NotPrepared, RunContext, Toolbox
from spectool_core.speculators.adopt import adopt
from spectool_core.speculators.protocol import Speculator
from spectool_core.speculators.stream import AnswerStream
from spectool_core.statistics import Counters, SpeculationStatistics
from spectool_core.threads import EventLoopThread, WorkerThreads
from spectool_core.turn import Turn

__all__ = ["Speculation"]

_logger = logging.getLogger("spectool")


class Speculation:
    """Speculators, limits and the results of early runs, for any number of agents, runs, threads and event loops.

    Args:
        speculators: each "openai:MODEL", an object with the `Speculator` protocol, or a chat model of a framework
            whose adapter is installed. The main model's prompts are sent to them.
        mode: "client" speculates; "shadow" predicts and counts but runs no tool; "off" does nothing at all.
        scope: `scope(call, context)` names who may share a result; by default one run of one thread.
        may_speculate: `may_speculate(call, context)` is asked before each early run and can deny it.
        hooks: called with each event (`spectool_core.events`), on whatever thread it happens.
        ttl_s: see `SpeculationConfig`, as for all that follows.

    Raises:
        ConfigurationError: naming the field, the value and what is allowed.
    """

    def __init__(
        self,
        speculators: Iterable[Any] = (),
        *,
        mode: Mode = "client",
        scope: Callable[[ToolCall, RunContext], Hashable] | None = None,
        may_speculate: Callable[[ToolCall, RunContext], bool] | None = None,
        hooks: Iterable[Hook] = (),
        ttl_s: float = 60.0,
        timeout_s: float | None = None,
        max_runs_per_turn: int = 8,
        max_runs_per_tool: int = 4,
        max_runs: int | None = None,
        max_concurrency: int = 32,
        max_concurrency_per_tool: int = 4,
        max_results: int = 1024,
        max_runs_per_minute: int | None = None,
        max_tokens_per_minute: int | None = None,
        max_cost_per_minute: float | None = None,
        min_probability: float = 0.5,
        value_per_s: float | None = None,
        adaptive: bool = True,
        engine: Literal["vllm"] | None = None,
        engine_url: str | None = None,
        engine_api_key: str | None = None,
    ) -> None:
        self.config: SpeculationConfig = validated_config(
            mode=mode,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            max_runs_per_turn=max_runs_per_turn,
            max_runs_per_tool=max_runs_per_tool,
            max_runs=max_runs,
            max_concurrency=max_concurrency,
            max_concurrency_per_tool=max_concurrency_per_tool,
            max_results=max_results,
            max_runs_per_minute=max_runs_per_minute,
            max_tokens_per_minute=max_tokens_per_minute,
            max_cost_per_minute=max_cost_per_minute,
            min_probability=min_probability,
            value_per_s=value_per_s,
            adaptive=adaptive,
            engine=engine,
            engine_url=engine_url,
            engine_api_key=engine_api_key,
        )
        self.speculators: tuple[Speculator, ...] = tuple(adopt(given) for given in _listed("speculators", speculators))
        self._scope = None if scope is None else _callable("scope", scope)
        self._may_speculate = None if may_speculate is None else _callable("may_speculate", may_speculate)
        self._counters = Counters()
        self._gate = Gate(self.config)
        self._hooks: tuple[Hook, ...] = (self._gate, self._counters, *_listed("hooks", hooks))
        for hook in self._hooks:
            _callable("hooks", hook)
        self._numbers = itertools.count(1)
        self._named_speculators = list(zip(_names(self.speculators), self.speculators, strict=True))
        self._accounts = Accounts(self._gate.budget)
        self._fences = Fences()
        self._lock = threading.Lock()
        self._background: EventLoopThread | None = None
        self._workers = WorkerThreads(self.config.max_concurrency, "spectool")
        self._caches: dict[asyncio.AbstractEventLoop, ToolCache] = {}
        self._loads: dict[asyncio.AbstractEventLoop, LoopLoad] = {}
        self.engine: EngineClient | None = engine_client(self.config, self._announce)
        self._rules = TurnRules(
            self.config,
            self._gate,
            self.scope_of,
            self._allows,
            self._outlives_turn,
            self._announce,
            self._accounts.charge,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Speculation:
        return self  # what agents share, their copies share too

    @property
    def is_on(self) -> bool:
        """Whether turns are to be started at all."""
        return self.config.mode != "off"

    @property
    def background(self) -> EventLoopThread:
        """The event loop on which the turns of sync runs live; started when first needed."""
        with self._lock:
            if self._background is None or not self._background.is_alive:
                self._background = EventLoopThread("spectool")
                # For whoever drops a Speculation without closing it: the thread would live as long as the process.
                weakref.finalize(self, self._background.stop).atexit = False
            return self._background

    def close(self) -> None:
        """End the library's own threads; runs in flight on the background loop are cancelled.

        Blocks for up to two seconds: from an event loop, use `asyncio.to_thread(speculation.close)`. Not needed before
        a process exits, whose threads are daemons.
        """
        with self._lock:
            background, self._background = self._background, None
        if background is not None:
            background.close()
        self._workers.close()
        with self._lock:
            self._forget_closed_loops()

    def start_turn(
        self,
        prompt: Prompt,
        tools: Sequence[ToolSchema],
        toolbox: Toolbox,
        context: RunContext,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        conversation: Hashable = None,
    ) -> Turn:
        """Begin a turn at the moment its prompt goes to the main model.

        Args:
            prompt: what the main model is asked.
            tools: what it may choose from.
            toolbox: the tools that this run may use.
            context: the agent run.
            loop: the event loop on which the run's tools run; None for a sync run.
            conversation: tells the main model's calls apart that go on at the same time in one run; engine mode only.
        """
        home = loop or self.background.loop
        cache, load = self._cache_and_load_of(home)
        number, engine = next(self._numbers), self.engine
        turn = Turn(
            number,
            prompt=prompt,
            tools=tools,
            toolbox=toolbox,
            context=context,
            rules=self._rules,
            cache=cache,
            load=load,
            loop=home,
            engine_turn=engine.turn(number, context, conversation, home) if engine is not None else None,
        )
        turn.start(self._named_speculators)
        return turn

    def answer_stream(self, loop: asyncio.AbstractEventLoop | None = None) -> AnswerStream | None:
        """Where an adapter feeds what the main model writes in a turn; None if no speculator reads it.

        Args:
            loop: as for `start_turn`.
        """
        if not any(getattr(speculator, "reads_answers", False) for speculator in self.speculators):
            return None
        return AnswerStream(loop or self.background.loop)

    def begin_write(self, context: RunContext, writes: frozenset[str] | None) -> Write:
        """A call of an unmarked tool, or of one with declared `writes`, begins in this run; its `end` is to be told."""
        scope = None if self._scope is not None else _default_scope(context)
        return self._fences.begin(scope=scope, writes=writes)

    def end_run(self, context: RunContext) -> None:
        """Forget the results that only this run could have used, and end its streams."""
        if self.engine is not None:
            self.engine.end_run(context.run)
        if self._scope is None:
            with self._lock:
                caches = list(self._caches.items())
            for loop, cache in caches:
                run_on(loop, cache.drop_owner, _default_scope(context))

    def observe(self, tool: object, event: ToolObserved) -> None:
        """Record that the framework itself ran a tool; a success ends its rest."""
        if event.succeeded:
            self._gate.wake(tool)
        self._announce(event)

    def scope_of(self, call: ToolCall, context: RunContext) -> Hashable:
        """Who may share the result of `call`; raises NotPrepared where the user's `scope` raises."""
        if self._scope is None:
            return _default_scope(context)
        try:
            scope: Hashable = self._scope(call, context)
            hash(scope)
        except Exception as exc:
            _logger.exception("scope(%s) failed; the call is not run early", call.name)
            raise NotPrepared("scope_failed") from exc
        return scope

    def statistics(self) -> SpeculationStatistics:
        """Counts so far, with all that sync runs have done before this call."""
        background = self._background
        if background is not None and background.is_alive and running_loop() is not background.loop:
            wait_in_thread(asyncio.sleep(0), background.loop, gone=None)
        return self._counters.snapshot(tuple(self._gate.assessments()))

    def explain(self) -> str:
        """Why each speculator is asked or not and each tool is run early or not: lines of text for a person."""
        return explain(self.statistics())

    def _allows(self, call: ToolCall, context: RunContext) -> bool:
        if self._may_speculate is None:
            return True
        try:
            allowed = self._may_speculate(call, context)
            if inspect.isawaitable(allowed):
                raise TypeError("may_speculate must not be async")
            return bool(allowed)
        except Exception:
            _logger.exception("may_speculate(%s) failed; the call is not run early", call.name)
            return False

    def _outlives_turn(self, context: RunContext) -> bool:
        # Where no run can be identified, any two might be taken for one.
        return self._scope is not None or context.run is not None

    def _announce(self, event: Event) -> None:
        announce(self._hooks, event)

    def _cache_and_load_of(self, loop: asyncio.AbstractEventLoop) -> tuple[ToolCache, LoopLoad]:
        with self._lock:
            if loop not in self._caches:
                self._forget_closed_loops()
                self._caches[loop] = self._new_cache(loop)
                self._loads[loop] = LoopLoad(loop)
            return self._caches[loop], self._loads[loop]

    def _forget_closed_loops(self) -> None:
        for closed in [loop for loop in self._caches if loop.is_closed()]:
            del self._caches[closed], self._loads[closed]

    def _new_cache(self, loop: asyncio.AbstractEventLoop) -> ToolCache:
        config = self.config
        return ToolCache(
            loop,
            slots=Slots(config.max_concurrency, config.max_concurrency_per_tool),
            workers=self._workers,
            fences=self._fences,
            ttl_s=config.ttl_s,
            max_results=config.max_results,
        )


def _default_scope(context: RunContext) -> Hashable:
    return (context.run, context.thread_id)


def _listed(field: str, values: Iterable[Any]) -> tuple[Any, ...]:
    # A pydantic model, such as a chat model given without a list, is iterable, but no collection.
    if isinstance(values, str) or not isinstance(values, Collection | Iterator):
        raise ConfigurationError(field, values, "a list")
    return tuple(values)


def _callable(field: str, value: Any) -> Any:
    # An async one would be called and never awaited; a `may_speculate` of that kind would allow everything.
    if not callable(value) or any(map(inspect.iscoroutinefunction, (value, getattr(value, "__call__", None)))):  # noqa: B004
        raise ConfigurationError(field, value, "a callable that is not async")
    return value


def _names(speculators: Sequence[Speculator]) -> list[str]:
    """A distinct name for each speculator: its `name`, or its class's, numbered where they repeat."""
    names: list[str] = []
    for speculator in speculators:
        stem = str(getattr(speculator, "name", None) or type(speculator).__name__)
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        names.append(next(name for name in candidates if name not in names))
    return names
