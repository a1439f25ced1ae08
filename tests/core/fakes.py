"""A toolbox over plain functions, speculators that say what they are told, and a decorator for the virtual clock."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.canonical import CallKey, canonicalize
from spectool_core.errors import CanonicalizationError
from spectool_core.events import CallResolved, Event, LaunchSkipped, ToolObserved
from spectool_core.runs import NotPrepared, PreparedCall, RunContext, Scope
from spectool_core.speculation import Speculation
from spectool_core.testing import FakeTool, run_virtual
from spectool_core.turn import Claimed, Turn

PROMPT = Prompt([{"role": "user", "content": "What next?"}])
RUN = RunContext(run="run", thread_id="thread")

READ = ToolPolicy()
TTL = ToolPolicy(reuse="ttl")


def call(name: str = "search", query: str = "x", id: str | None = None) -> ToolCall:
    return ToolCall(name, {"query": query}, id)


def search(latency_s: float | Callable[[Mapping[str, Any]], float] = 1.0, **options: Any) -> FakeTool:
    """A tool of one argument, whose result tells the runs apart."""
    numbers = iter(range(1, 1_000_000))
    options.setdefault("result", lambda arguments: f"{arguments['query']}#{next(numbers)}")
    return FakeTool(options.pop("name", "search"), latency_s=latency_s, **options)


class FakeToolbox:
    """A `Toolbox` of plain functions; a tool without a policy is unmarked."""

    def __init__(self) -> None:
        self._bound: dict[str, tuple[Callable[..., Any], ToolPolicy | None, bool]] = {}
        self._tools: dict[str, object] = {}
        self._parameters: dict[str, set[str]] = {}

    def add(self, tool: FakeTool, policy: ToolPolicy | None = READ, *, blocking: bool = False) -> FakeTool:
        self.add_function(tool.name, tool.function if blocking else tool.coroutine, policy, blocking=blocking)
        return tool

    def add_function(
        self,
        name: str,
        function: Callable[..., Any],
        policy: ToolPolicy | None = READ,
        *,
        blocking: bool = False,
        tool: object = None,
        parameters: Collection[str] = ("query",),
    ) -> None:
        self._parameters[name] = set(parameters)
        self._bound[name] = (function, policy, blocking)
        self._tools[name] = function if tool is None else tool

    def tool(self, name: str) -> object:
        return self._tools[name]

    def policy(self, name: str) -> ToolPolicy | None:
        return self._bound[name][1] if name in self._bound else None

    def prepare(self, call: ToolCall, scope: Scope) -> PreparedCall:
        function, policy, blocking = self._bound[call.name]
        if policy is None:
            raise NotPrepared("unmarked")
        if policy.writes:
            raise NotPrepared("writes")
        if policy.needs_approval:
            raise NotPrepared("needs_approval")
        if set(call.arguments) != self._parameters[call.name]:
            raise NotPrepared("invalid")
        try:
            key = CallKey(self._tools[call.name], scope, canonicalize(call.arguments))
        except CanonicalizationError:
            raise NotPrepared("no_key") from None
        return PreparedCall(
            call=call,
            key=key,
            scope=scope,
            policy=policy,
            run=functools.partial(function, **call.arguments),
            blocking=blocking,
            content=lambda result: result if isinstance(result, str) else None,
        )


def toolbox_of(*tools: FakeTool, policy: ToolPolicy | None = READ, blocking: bool = False) -> FakeToolbox:
    toolbox = FakeToolbox()
    for tool in tools:
        toolbox.add(tool, policy, blocking=blocking)
    return toolbox


class Predicts:
    """A speculator that takes `delay_s` before each of its predictions, then ends."""

    def __init__(self, *calls: ToolCall, delay_s: float = 0.25, name: str = "fake") -> None:
        self.name = name
        self.calls = calls
        self.delay_s = delay_s
        self.num_active = 0
        self.num_asked = 0
        self.num_cancelled = 0

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        self.num_asked += 1
        self.num_active += 1
        try:
            for predicted in self.calls:
                await asyncio.sleep(self.delay_s)
                yield predicted
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_active -= 1


class FromFunction:
    """A speculator whose `predict` is the given async generator function of no arguments."""

    def __init__(self, predict: Callable[[], Any]) -> None:
        self._predict = predict

    def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        return self._predict()  # type: ignore[no-any-return]


def observed(tool: str = "search", *, marked: bool = True, succeeded: bool) -> ToolObserved:
    return ToolObserved(tool, marked, 0.0, 1.0, succeeded)


class Recorder:
    """A hook that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def start(
    speculation: Speculation,
    toolbox: FakeToolbox,
    context: RunContext = RUN,
    *,
    loop: asyncio.AbstractEventLoop | None = None,
    background: bool = False,
    tools: Sequence[ToolSchema] = (),
) -> Turn:
    home = None if background else loop or asyncio.get_running_loop()
    return speculation.start_turn(PROMPT, tools, toolbox, context, loop=home)


async def real_call(toolbox: FakeToolbox, claimed: Claimed, asked: ToolCall) -> Any:
    """What the framework does with a claim: the result that it was given, or the tool itself."""
    if claimed.outcome != "miss":
        return claimed.result
    function = toolbox._bound[asked.name][0]
    return await function(**asked.arguments)


async def take_turn(
    speculation: Speculation,
    toolbox: FakeToolbox,
    *calls: ToolCall,
    generation_s: float = 1.0,
    context: RunContext = RUN,
    tools: Sequence[ToolSchema] = (),
) -> list[tuple[str, Any]]:
    """One whole turn of a framework that runs the calls of an answer at once: outcomes and results in order."""
    turn = start(speculation, toolbox, context, tools=tools)
    await asyncio.sleep(generation_s)
    turn.answer(calls)

    async def serve(asked: ToolCall) -> tuple[str, Any]:
        claimed = await turn.claim(asked)
        return claimed.outcome, await real_call(toolbox, claimed, asked)

    return await asyncio.gather(*map(serve, calls))


def virtual(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., None]:
    """Run an async test on a virtual clock, and fail if it leaves a task behind."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            problems: list[str] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
            await test(*args, **kwargs)
            await no_tasks()
            assert problems == []

        run_virtual(main)

    return run


async def no_tasks() -> None:
    """Fail unless every other task is about to end."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def now() -> float:
    return asyncio.get_running_loop().time()


def speculation_of(*predictions: ToolCall, **config: Any) -> Speculation:
    delay_s = config.pop("delay_s", 0.25)
    return Speculation([Predicts(*predictions, delay_s=delay_s)] if predictions else [], **config)


def misses(hook: Recorder) -> list[str]:
    return [event.reason for event in hook.of(CallResolved) if event.outcome == "miss"]


def skips(hook: Recorder) -> list[str]:
    return [event.reason for event in hook.of(LaunchSkipped)]
