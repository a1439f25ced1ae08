"""What a tool would receive, the key of that, and which tools are refused: always against really calling the tool."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.tools import BaseTool, InjectedToolArg, InjectedToolCallId, StructuredTool, Tool, tool
from langgraph.prebuilt import InjectedState, InjectedStore, ToolRuntime
from langgraph.types import Command
from pydantic import BaseModel, Field, ValidationError

from spectool_core.annotation import ToolPolicy, speculatable
from spectool_core.calls import ToolCall
from spectool_core.errors import NotSpeculatableError
from spectool_core.runs import NotPrepared, NotReplayable, PreparedCall, Scope
from spectool_langgraph._binding import ToolBinding

SCOPE = Scope("run", None)
ANY_TIME = ToolPolicy()
RECEIVED: list[Any] = []


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: float = 0.5


class Filter(BaseModel):
    field: str = Field(alias="f")
    points: list[Point] = []
    limit: int = 10


@tool
def typed(
    count: int,
    ratio: float = 1.0,
    name: str = "a",
    flag: bool = False,
    maybe: int | None = None,
    items: list[int] = [1],  # noqa: B006
    mapping: dict[str, Any] | None = None,
    color: Color = Color.RED,
    day: datetime.date | None = None,
    point: Point | None = None,
    words: set[str] | None = None,
    anything: Any = None,
) -> str:
    """Take one of everything."""
    RECEIVED.append(dict(locals()))
    return ""


@tool(args_schema=Filter)
def filtered(field: str, points: list[Point], limit: int) -> str:
    """Take a schema with an alias and nested models."""
    RECEIVED.append(dict(locals()))
    return ""


def untyped(**arguments: Any) -> str:
    RECEIVED.append(arguments)
    return ""


described = StructuredTool(
    name="described",
    description="Takes what its JSON schema says, unchecked, as tools from MCP servers.",
    args_schema={"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    func=untyped,
)


class Bare(BaseTool):
    name: str = "bare"
    description: str = "Has no schema."

    def _run(self, count: Any = 3, **others: Any) -> str:
        RECEIVED.append({"count": count, **others})
        return ""


def single_input(text: str) -> str:
    RECEIVED.append(text)
    return ""


single = Tool(name="single", description="Takes one text.", func=single_input)

TOOLS: list[BaseTool] = [typed, filtered, described, Bare(), single]


def prepared(bound: BaseTool, arguments: dict[str, Any], policy: ToolPolicy = ANY_TIME) -> PreparedCall:
    call = ToolCall(bound.name, arguments, "call_1")
    return ToolBinding(bound, policy).prepare(call, scope=SCOPE, config={}, asynchronous=False)


def key_of(bound: BaseTool, arguments: dict[str, Any], policy: ToolPolicy = ANY_TIME) -> Any:
    try:
        return prepared(bound, arguments, policy).key
    except NotPrepared as exc:
        return exc.reason


def really_received(bound: BaseTool, arguments: dict[str, Any]) -> Any:
    """What the tool's function gets from a stock call; "invalid" where stock refuses to run it."""
    RECEIVED.clear()
    try:
        bound.invoke({"type": "tool_call", "name": bound.name, "args": arguments, "id": "call_1"})
    except Exception:
        if not RECEIVED:
            return "invalid"
        raise
    return RECEIVED.pop()


def identical(a: Any, b: Any) -> bool:
    """Equal in type and value, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, BaseModel):
        return identical(a.__dict__, b.__dict__)  # as pydantic: which fields were set does not count
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


SPELLINGS: dict[str, list[Any]] = {
    "count": [1, "1", 1.0, True, 5, "5", 2**63, 10000000000000001, 1e16, "five"],
    "ratio": [1, 1.0, "1", "1.0", True, 0.0, -0.0, 2],
    "name": ["a", "A", "a ", "é", "é", "5", 5],
    "flag": [True, "true", 1, "yes", False, 0, None],
    "maybe": [None, 0, "0", 1, 1.0],
    "items": [[1], ["1"], [1, 2], [2, 1], [1.0], []],
    "mapping": [None, {}, {"a": 1}, {"a": 1.0}, {"a": "1"}, {"a": [1, 2], "b": None}, {"b": None, "a": [1, 2]}],
    "color": ["red", "blue", "RED"],
    "day": ["2024-05-01", "2024-05-01T00:00:00", "2024-05-02", 1714521600, None],
    "point": [{"x": 1}, {"x": "1"}, {"x": 1, "y": 0.5}, {"y": 0.5, "x": 1.0}, {"x": 1, "z": 2}, None],
    "words": [["a", "b"], ["b", "a"], ["b", "a", "a"], []],
    "anything": [1, 1.0, "1", True, None, [1], {"a": [1]}],
    "f": ["a", "b"],
    "field": ["a"],
    "points": [[], [{"x": 1}], [{"x": "1"}], [{"x": 1, "y": 0.5}]],
    "limit": [10, "10", 10.0, 11],
    "text": ["a", "A", "a ", ""],
    "unknown": [1, "1"],
}
REQUIRED = {"typed": "count", "filtered": "f", "single": "text"}
NAMES = {
    "typed": [*typed.args, "unknown"],
    "filtered": ["f", "field", "points", "limit", "unknown"],
    "single": ["text"],
}


@st.composite
def similar_arguments(draw: Callable[..., Any], bound: BaseTool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two argument objects that are alike enough to share a key now and then."""

    def spelled(names: list[str]) -> dict[str, Any]:
        return {name: draw(st.sampled_from(SPELLINGS[name])) for name in names}

    names = NAMES.get(bound.name, list(SPELLINGS))
    first = spelled(draw(st.lists(st.sampled_from(names), max_size=4)))
    if (required := REQUIRED.get(bound.name)) is not None:
        first |= spelled([required])
    second = {name: first[name] for name in draw(st.permutations(list(first)))}
    return first, second | spelled(draw(st.lists(st.sampled_from(names), max_size=2)))


@pytest.mark.parametrize("bound", TOOLS, ids=lambda bound: bound.name)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_one_key_exactly_when_the_tool_would_receive_equal_arguments(bound: BaseTool, data: st.DataObject) -> None:
    first, second = data.draw(similar_arguments(bound))
    keys = key_of(bound, first), key_of(bound, second)
    received = really_received(bound, first), really_received(bound, second)
    assert [key == "invalid_arguments" for key in keys] == [one == "invalid" for one in received]
    if "invalid" not in received:
        assert (keys[0] == keys[1]) == identical(*received)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"count": 2512292042121000001}, {"count": 2512292042121000000}, False),  # case 2
        ({"count": 1, "mapping": {"a": [{"b": 1}]}}, {"count": 1, "mapping": {"a": [{"b": 1}]}}, True),  # case 3
        ({"count": 1, "words": ["a", "b"]}, {"count": 1, "words": ["b", "a", "a"]}, True),  # case 3: a set
        ({"count": 1, "unknown": 2}, {"count": 1}, True),  # case 12
        ({"count": "1"}, {"count": 1}, True),  # case 13
        ({"count": 1.0}, {"count": 1}, True),
        ({"count": 1, "ratio": 1.0, "name": "a"}, {"name": "a", "count": 1}, True),  # case 21: order, a default
        ({"count": 1, "name": "a"}, {"count": 1, "name": "A"}, False),  # case 22
        ({"count": 1, "name": "a"}, {"count": 1, "name": "a "}, False),
        ({"count": 1, "items": [1, 2]}, {"count": 1, "items": [2, 1]}, False),  # case 23
    ],
)
def test_cases_of_the_key(first: dict[str, Any], second: dict[str, Any], same: bool) -> None:
    assert (key_of(typed, first) == key_of(typed, second)) is same


@pytest.mark.parametrize("spelling", ["1", 1.0])
def test_without_a_schema_nothing_is_coerced(spelling: Any) -> None:
    assert key_of(described, {"count": 1}) != key_of(described, {"count": spelling})  # case 13


def test_digits_of_large_integers_reach_the_tool() -> None:
    for digits in (9223372036854775807, 10000000000000001, 2512292042121000001):  # case 2
        RECEIVED.clear()
        prepared(typed, {"count": digits}).run()
        assert RECEIVED.pop()["count"] == digits


@pytest.mark.parametrize("bound", [typed, described], ids=lambda bound: bound.name)
def test_nan_has_no_key(bound: BaseTool) -> None:
    reason = key_of(bound, {"count": 1, "ratio": float("nan"), "anything": float("nan")})
    assert reason == "no_key"  # case 14


def test_a_value_without_canonical_form_has_no_key() -> None:
    class Opaque(BaseModel):
        model_config = {"arbitrary_types_allowed": True}
        callback: Any = Field(default_factory=lambda: object())

    bound = StructuredTool.from_function(lambda callback: "", name="t", description="t", args_schema=Opaque)
    assert key_of(bound, {}) == "no_key"


def test_arguments_nested_too_deeply_have_no_key() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert key_of(described, {"count": deep}) == "no_key"


def test_an_exploding_schema_makes_an_invalid_call() -> None:
    class Explosive(BaseModel):
        def __init__(self, **_: Any) -> None:
            raise KeyError("boom")

        @classmethod
        def model_validate(cls, *_: Any, **__: Any) -> Any:
            raise KeyError("boom")

        x: int = 0

    bound = StructuredTool.from_function(lambda x: "", name="t", description="t", args_schema=Explosive)
    assert key_of(bound, {"x": 1}) == "invalid_arguments"


def test_excluded_arguments_are_not_in_the_key_but_reach_the_tool() -> None:
    policy = ToolPolicy(exclude_args=frozenset({"name"}))
    assert key_of(typed, {"count": 1, "name": "x"}, policy) == key_of(typed, {"count": 1, "name": "y"}, policy)
    RECEIVED.clear()
    prepared(typed, {"count": 1, "name": "x"}, policy).run()
    assert RECEIVED.pop()["name"] == "x"


def test_two_tools_never_share_and_two_bindings_of_one_tool_do() -> None:
    assert key_of(typed, {"count": 1}) == key_of(typed, {"count": 1})
    assert key_of(typed, {"count": 1}) != key_of(typed.model_copy(), {"count": 1})


def test_scopes_never_share() -> None:
    binding = ToolBinding(typed, ANY_TIME)
    call = ToolCall("typed", {"count": 1})
    keys = {
        binding.prepare(call, scope=scope, config={}, asynchronous=False).key
        for scope in (Scope("a", None), Scope("b", None), Scope("a", 1))  # case 20
    }
    assert len(keys) == 3


def test_a_tool_that_changes_its_arguments_leaves_the_call_alone_and_is_no_hit() -> None:
    @tool
    def greedy(mapping: Any) -> str:
        """Change what is given."""
        mapping["list"].append(1)
        return ""

    given_arguments = {"mapping": {"list": []}}
    call = prepared(greedy, given_arguments)
    with pytest.raises(NotReplayable, match="changed the arguments"):
        call.run()
    assert given_arguments == {"mapping": {"list": []}}


async def _anything(x: int) -> str:
    return ""


class AsyncTool(BaseTool):
    name: str = "async_tool"
    description: str = "Has both."

    def _run(self, x: int) -> str:
        return ""

    async def _arun(self, x: int) -> str:
        return ""


ASYNC_ONLY = StructuredTool.from_function(coroutine=_anything, name="t", description="t")
BOTH = StructuredTool.from_function(func=lambda x: "", coroutine=_anything, name="t", description="t")


@pytest.mark.parametrize(
    ("bound", "asynchronous", "blocking"),
    [
        (typed, False, True),
        (typed, True, True),
        (ASYNC_ONLY, True, False),
        (BOTH, True, False),
        (BOTH, False, True),
        (AsyncTool(), True, False),
        (AsyncTool(), False, True),
        (Bare(), True, True),
        (single, True, True),
    ],
)
def test_a_run_blocks_unless_stock_would_await_it(bound: BaseTool, asynchronous: bool, blocking: bool) -> None:
    call = ToolCall(bound.name, {"x": 1, "count": 1} if bound is not single else {"text": "a"})
    binding = ToolBinding(bound, ANY_TIME)
    assert binding.prepare(call, scope=SCOPE, config={}, asynchronous=asynchronous).blocking is blocking


def test_an_async_only_tool_is_not_prepared_in_a_sync_graph() -> None:
    with pytest.raises(NotPrepared) as caught:
        ToolBinding(ASYNC_ONLY, ANY_TIME).prepare(ToolCall("t", {"x": 1}), scope=SCOPE, config={}, asynchronous=False)
    assert caught.value.reason == "async_only"


def test_a_prepared_call_runs_once() -> None:
    call = prepared(typed, {"count": 1})
    call.run()
    with pytest.raises(RuntimeError, match="once"):
        call.run()


# What is refused


def _injecting_state(x: int, state: Annotated[dict, InjectedState]) -> str:
    return ""


def _injecting_a_field(x: int, messages: Annotated[list | None, InjectedState("messages")] = None) -> str:
    return ""


def _injecting_store(x: int, store: Annotated[Any, InjectedStore()]) -> str:
    return ""


def _injecting_id(x: int, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
    return ""


def _injecting_runtime(x: int, runtime: ToolRuntime) -> str:
    return ""


def _injecting_renamed_runtime(x: int, context: ToolRuntime[None, dict]) -> str:
    return ""


def _injecting_own(x: int, secret: Annotated[str, InjectedToolArg] = "") -> str:
    return ""


class Injecting(BaseTool):
    name: str = "injecting"
    description: str = "Its method takes what its schema does not show."
    args_schema: type[BaseModel] = Point

    def _run(self, x: int, y: float, runtime: ToolRuntime) -> str:
        return ""


class Overriding(BaseTool):
    name: str = "overriding"
    description: str = "Changes what its own code receives."

    def _run(self, x: int) -> str:
        return ""

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return super().invoke(*args, **kwargs)


def _going(x: int) -> Command:
    return Command(goto="b")


def _going_in_a_list(x: int) -> list[Command[str]]:
    return []


def _maybe_going(x: int) -> str | Command:
    return ""


def from_function(function: Callable[..., Any], **fields: Any) -> BaseTool:
    return StructuredTool.from_function(function, description="t", **fields)


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        (from_function(_injecting_state), "state"),
        (from_function(_injecting_a_field), "messages"),
        (from_function(_injecting_store), "store"),
        (from_function(_injecting_id), "tool_call_id"),
        (from_function(_injecting_runtime), "runtime"),
        (from_function(_injecting_renamed_runtime), "context"),
        (from_function(_injecting_own), "secret"),
        (Injecting(), "runtime"),
        (Overriding(), "overrides invoke"),
        (from_function(_going), "returns a Command"),
        (from_function(_going_in_a_list), "returns a Command"),
        (from_function(_anything, return_direct=True), "return_direct"),
        (from_function(_anything, metadata={"__handoff_destination": "bob"}), "hands over"),
        (Bare(name=""), "no name"),
    ],
)
def test_tools_that_cannot_be_run_early_are_refused_with_the_reason(bound: BaseTool, reason: str) -> None:
    speculatable(bound)
    with pytest.raises(NotSpeculatableError, match=reason):
        ToolBinding.of(bound)


def test_a_marked_tool_that_never_runs_early_is_bound_all_the_same() -> None:
    binding = ToolBinding.of(speculatable(from_function(_injecting_state), writes=["db"]))
    assert binding is not None
    assert binding.policy.writes == {"db"}


def test_an_unmarked_tool_is_not_bound() -> None:
    assert ToolBinding.of(typed) is None


def test_a_union_with_command_is_told_at_run_time() -> None:
    assert ToolBinding(from_function(_maybe_going), ANY_TIME) is not None


@pytest.mark.parametrize("arguments", [{}, {"count": "many"}])
def test_what_stock_refuses_is_not_prepared(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        typed.invoke({"type": "tool_call", "name": "typed", "args": arguments, "id": "1"})
    assert key_of(typed, arguments) == "invalid_arguments"
