from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tools import BaseTool, StructuredTool, tool

from spectool_core import annotation
from spectool_core.annotation import ToolPolicy, mark, policy_of, speculatable
from spectool_core.errors import ConfigurationError

DEFAULT = ToolPolicy()


def search(query: str) -> str:
    """Search."""
    return query


def delete(path: str) -> str:
    """Delete."""
    return path


@pytest.fixture
def function() -> Callable[[str], str]:
    def lookup(query: str) -> str:
        """Look up."""
        return query

    return lookup


@speculatable
def pickled(query: str) -> str:
    """Look up."""
    return query


# ToolPolicy.


def test_a_policy_takes_any_iterable_of_tags() -> None:
    policy = ToolPolicy(reads=["docs", "docs"], writes=(), exclude_args={"trace": 1}.keys())  # type: ignore[arg-type]
    assert policy.reads == frozenset({"docs"})
    assert policy.writes == frozenset()
    assert policy.exclude_args == frozenset({"trace"})
    assert ToolPolicy(reads=iter(["a"])).reads == frozenset({"a"})  # type: ignore[arg-type]
    assert ToolPolicy().reads is None


def test_a_policy_is_a_value() -> None:
    assert ToolPolicy(reads=["a"]) == ToolPolicy(reads=frozenset({"a"}))  # type: ignore[arg-type]
    assert hash(ToolPolicy(ttl_s=1)) == hash(ToolPolicy(ttl_s=1.0))
    assert pickle.loads(pickle.dumps(ToolPolicy(ttl_s=1))) == ToolPolicy(ttl_s=1)
    with pytest.raises(AttributeError):
        DEFAULT.cost = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("policy", "early"),
    [
        (ToolPolicy(), True),
        (ToolPolicy(reads=frozenset({"docs"})), True),
        (ToolPolicy(writes=frozenset()), True),
        (ToolPolicy(writes=frozenset({"docs"})), False),
        (ToolPolicy(needs_approval=True), False),
    ],
)
def test_a_tool_that_writes_or_needs_approval_does_not_run_early(policy: ToolPolicy, early: bool) -> None:
    assert policy.runs_early is early


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, value) for field in ("ttl_s", "timeout_s") for value in (0, -1, math.nan, math.inf, True, "1", [])],
        *[("max_concurrency", value) for value in (0, -1, 1.0, True, "1")],
        *[("reuse", value) for value in ("run", None, 1, ["turn"])],
        *[("cost", value) for value in (-0.1, math.nan, math.inf, None, True, "1")],
        *[("needs_approval", value) for value in (None, 1, "yes")],
        *[(field, value) for field in ("reads", "writes", "exclude_args") for value in ("docs", b"docs", [1], [""], 1)],
        ("exclude_args", None),
        ("tll_s", 1),
    ],
)
def test_a_field_that_is_not_allowed_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        speculatable(**{field: value})
    assert caught.value.field == field
    assert f"{field}={value!r} is not allowed; allowed: " in str(caught.value)


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.integers(min_value=1))
def test_every_positive_time_is_allowed(value: float) -> None:
    assert ToolPolicy(ttl_s=value, timeout_s=value, cost=value).ttl_s == value


# Forms of the decorator.


def test_both_forms_return_the_same_function(function: Any) -> None:
    signature = inspect.signature(function)
    assert speculatable(function) is function
    assert policy_of(function) == DEFAULT
    assert speculatable(ttl_s=30, reads=["docs"])(function) is function
    assert policy_of(function) == ToolPolicy(ttl_s=30, reads=frozenset({"docs"}))
    assert speculatable(function, cost=2.0) is function
    assert policy_of(function) == ToolPolicy(cost=2.0), "the last mark wins as a whole"
    assert inspect.signature(function) == signature
    assert function.__doc__ == "Look up."


def test_an_empty_call_is_a_decorator(function: Any) -> None:
    assert policy_of(speculatable()(function)) == DEFAULT


def test_what_is_not_marked_has_no_policy(function: Any) -> None:
    for unmarked in (
        function,
        tool(function),
        functools.partial(function),
        search,
        len,
        None,
        1,
        "search",
        MagicMock(),
    ):
        assert policy_of(unmarked) is None


def test_coroutine_functions() -> None:
    @speculatable
    async def lookup(query: str) -> str:
        """Look up."""
        return query

    assert inspect.iscoroutinefunction(lookup)
    assert policy_of(lookup) == policy_of(tool(lookup)) == DEFAULT


def test_marked_functions_pickle() -> None:
    assert pickle.loads(pickle.dumps(pickled)) is pickled


@pytest.mark.parametrize("value", ["search", 1, None, [search], {"type": "function"}, object()])
def test_what_is_no_tool_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        speculatable(value)
    assert caught.value.field == "tool"


# Wrapped functions, methods and classes.


def test_a_partial_has_its_functions_mark_unless_it_has_its_own(function: Any) -> None:
    speculatable(function)
    partial = functools.partial(functools.partial(function), "a")
    assert policy_of(partial) == DEFAULT
    assert policy_of(speculatable(partial, cost=1.0)) == ToolPolicy(cost=1.0)
    assert policy_of(function) == DEFAULT


def test_a_mark_is_seen_through_wraps(function: Any) -> None:
    @functools.wraps(function)
    def logged(*args: Any) -> Any:
        return function(*args)

    assert policy_of(logged) is None
    speculatable(function)
    assert policy_of(logged) == DEFAULT


def test_a_ring_of_wrappers_ends(function: Any) -> None:
    function.__wrapped__ = function
    assert policy_of(function) is None


def test_methods_marked_in_the_class_body() -> None:
    class Index:
        @speculatable
        def plain(self) -> None: ...

        @speculatable
        @staticmethod
        def static() -> None: ...

        @staticmethod
        @speculatable
        def static_below() -> None: ...

        @speculatable
        @classmethod
        def cls_(cls) -> None: ...

        def unmarked(self) -> None: ...

    index = Index()
    for method in (index.plain, Index.plain, index.static, Index.static_below, index.cls_, Index.cls_):
        assert policy_of(method) == DEFAULT
    assert policy_of(index.unmarked) is None
    assert policy_of(index) is None


def test_a_bound_method_is_marked_for_its_own_object_only() -> None:
    class Database:
        def __eq__(self, other: object) -> bool:  # equal and unhashable
            return True

        def query(self, sql: str) -> str:
            """Query."""
            return sql

        def write(self, sql: str) -> str:
            return sql

    test, live = Database(), Database()
    size = len(annotation._elsewhere)
    speculatable(test.query)
    assert policy_of(test.query) == DEFAULT
    assert policy_of(StructuredTool.from_function(test.query)) == DEFAULT
    assert policy_of(live.query) is policy_of(test.write) is policy_of(Database.query) is None
    speculatable(test.query, cost=1.0)
    assert policy_of(test.query) == ToolPolicy(cost=1.0)
    del test
    assert len(annotation._elsewhere) == size


def test_builtins_and_slotted_objects_hold_a_mark_as_long_as_they_live() -> None:
    class Slotted:
        __slots__ = ("__weakref__",)

        def __call__(self) -> None: ...

    assert policy_of(speculatable(math.sqrt)) == DEFAULT
    size = len(annotation._elsewhere)
    for _ in range(50):
        slotted = Slotted()
        assert policy_of(slotted) is None, "an id that is used again must not inherit a mark"
        assert policy_of(speculatable(slotted)) == DEFAULT
        del slotted
    assert len(annotation._elsewhere) == size
    annotation._elsewhere.pop((id(math.sqrt),))


def test_an_object_that_can_hold_no_mark_is_refused() -> None:
    class Bare:
        __slots__ = ()

        def __call__(self) -> None: ...

    for bare in (Bare(), Bare().__call__, int):
        with pytest.raises(ConfigurationError, match="an object that takes attributes"):
            speculatable(bare)


def test_an_instance_has_its_classs_mark_and_a_subclass_does_not() -> None:
    @speculatable(cost=1.0)
    class Search:
        def __call__(self, query: str) -> str:
            return query

    class Delete(Search):
        def __call__(self, query: str) -> str:
            return query

    assert policy_of(Search) == policy_of(Search()) == ToolPolicy(cost=1.0)
    assert policy_of(Delete) is policy_of(Delete()) is None
    assert policy_of(speculatable(Search())) == DEFAULT


def test_a_marked_call_method_marks_what_runs_it() -> None:
    class Search:
        @speculatable
        def __call__(self, query: str) -> str:
            return query

    class Renamed(Search): ...

    class Delete(Search):
        def __call__(self, query: str) -> str:
            return query

    assert policy_of(Search()) == policy_of(Renamed()) == DEFAULT
    assert policy_of(Delete()) is None


# LangChain's tools.


def test_above_and_below_the_tool_decorator() -> None:
    @tool
    @speculatable(ttl_s=30)
    def below(query: str) -> str:
        """Search."""
        return query

    @speculatable(ttl_s=30)
    @tool
    def above(query: str) -> str:
        """Search."""
        return query

    @speculatable(cost=1.0)
    @tool("named", return_direct=False)
    @speculatable
    async def both(query: str) -> str:
        """Search."""
        return query

    assert policy_of(below) == policy_of(above) == ToolPolicy(ttl_s=30)
    assert policy_of(both) == ToolPolicy(cost=1.0), "the outer mark counts"


def test_a_marked_tool_shows_no_sign_of_it() -> None:
    plain = tool(search)
    marked = plain.model_copy()
    assert speculatable(marked) is marked
    assert policy_of(plain) is None
    assert plain == marked
    assert repr(plain) == repr(marked)
    assert plain.model_dump() == marked.model_dump()
    assert dict(plain) == dict(marked)
    assert plain.tags == marked.tags
    assert plain.metadata == marked.metadata
    assert plain.args_schema.model_json_schema() == marked.args_schema.model_json_schema()  # type: ignore[union-attr]
    seen: list[tuple[Any, Any]] = []

    class Watch(BaseCallbackHandler):
        def on_tool_start(self, serialized: Any, input_str: str, **kwargs: Any) -> None:
            seen.append((serialized, {name: value for name, value in kwargs.items() if name != "run_id"}))

    for each in (plain, marked):
        assert each.invoke({"query": "a"}, {"callbacks": [Watch()]}) == "a"
    assert seen[0] == seen[1]


def test_copies_of_a_tool_keep_the_mark() -> None:
    marked = speculatable(tool(search))
    copies = [
        marked.model_copy(),
        marked.model_copy(update={"name": "other"}),
        copy.copy(marked),
        copy.deepcopy(marked),
    ]
    assert [policy_of(each) for each in copies] == [DEFAULT] * 4
    assert policy_of(tool(search)) is None


def test_tool_classes_instances_and_run_methods() -> None:
    class Search(BaseTool):
        name: str = "search"
        description: str = "Search."

        def _run(self, query: str) -> str:
            return query

    class Strict(Search):
        model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    class Quick(Search):
        @speculatable
        async def _arun(self, query: str) -> str:
            return query

    strict = Strict()
    assert policy_of(speculatable(strict)) == DEFAULT
    assert policy_of(Strict()) is None
    assert policy_of(Quick()) == DEFAULT
    speculatable(Search)
    assert policy_of(Search()) == DEFAULT
    assert policy_of(Strict()) is None
    assert Search().invoke({"query": "a"}) == "a"
    assert "spectool" not in repr(Search.model_json_schema())


def test_a_tools_function_and_coroutine_are_both_looked_at(function: Any) -> None:
    @speculatable(cost=1.0)
    async def asynchronous(query: str) -> str:
        return query

    both = StructuredTool.from_function(function, asynchronous)
    assert policy_of(both) == ToolPolicy(cost=1.0)
    speculatable(function)
    assert policy_of(both) == DEFAULT


# LlamaIndex's tools, by shape: its FunctionTool is a plain object with these properties.


class FunctionTool:
    def __init__(self, fn: Any) -> None:
        self._fn = fn

    @property
    def metadata(self) -> Any:
        return type("ToolMetadata", (), {"name": self._fn.__name__})

    @property
    def real_fn(self) -> Any:
        if self._fn is None:
            raise ValueError("Real function is not set!")
        return self._fn

    def call(self, *args: Any) -> Any:
        return self._fn(*args)


def test_llama_index_tools(function: Any) -> None:
    llama = FunctionTool(function)
    assert policy_of(llama) is policy_of(FunctionTool(None)) is None
    assert mark([llama], names=["lookup"])[0] is llama
    assert policy_of(llama) == DEFAULT
    assert policy_of(FunctionTool(speculatable(function))) == DEFAULT


# mark.


def mcp_like(name: str) -> StructuredTool:
    # As langchain-mcp-adapters builds them: a coroutine made in a closure, and a JSON schema instead of a model.
    async def call_tool(**arguments: Any) -> Any:
        await asyncio.sleep(0)
        return name, None

    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    return StructuredTool(
        name=name,
        description=name,
        args_schema=schema,
        coroutine=call_tool,
        response_format="content_and_artifact",
    )


def test_mark_by_name_returns_the_same_list_of_the_same_tools() -> None:
    tools = [mcp_like("search"), mcp_like("read"), mcp_like("delete")]
    before = list(tools)
    assert mark(tools, names=["search", "read"], ttl_s=5, reads=["docs"]) is tools
    assert all(now is then for now, then in zip(tools, before, strict=True))
    expected = ToolPolicy(ttl_s=5, reads=frozenset({"docs"}))
    assert [policy_of(each) for each in tools] == [expected, expected, None]


def test_mark_without_names_marks_all() -> None:
    tools = (mcp_like("search"), functools.partial(lambda query: query))
    assert mark(tools) is tools
    assert [policy_of(each) for each in tools] == [DEFAULT, DEFAULT]
    assert mark([]) == []


def test_mark_takes_an_iterator_of_names() -> None:
    tools = [mcp_like("search")]
    mark(tools, iter(["search"]))
    assert policy_of(tools[0]) == DEFAULT


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"names": ["search", "serach"]}, "names"),
        ({"names": "search"}, "names"),
        ({"names": [1]}, "names"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"nmaes": ["search"]}, "nmaes"),
    ],
)
def test_mark_refuses_and_then_marks_nothing(arguments: dict[str, Any], field: str) -> None:
    tools = [mcp_like("search"), mcp_like("read")]
    with pytest.raises(ConfigurationError) as caught:
        mark(tools, **arguments)
    assert caught.value.field == field
    assert [policy_of(each) for each in tools] == [None, None]


def test_mark_lists_the_names_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"names=\['serach'\] is not allowed; .*: 'delete', 'search'"):
        mark([search, delete], names=["serach"])


@pytest.mark.parametrize("tools", [search, "search", {"search": search}, iter([search]), None, tool(search)])
def test_mark_refuses_what_is_no_list_of_tools(tools: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mark(tools)
    assert caught.value.field == "tools"


def test_mark_refuses_a_list_with_something_else_in_it(function: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mark([function, "search"])
    assert caught.value.field == "tool"
    assert policy_of(function) is None
