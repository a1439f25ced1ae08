"""The mark `@speculatable`: consent to run a tool before the main model asks for it.

A mark is a frozen `ToolPolicy` put on the object it is given; the object itself is returned, never a wrapper, so
signature, identity and pickling stay as they are. Nothing that is not marked is ever run early.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MethodType
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, overload

from spectool_core.errors import ConfigurationError

__all__ = ["PolicyFields", "Reuse", "ToolPolicy", "is_marked_itself", "mark", "policy_of", "speculatable"]

T = TypeVar("T")
Tools = TypeVar("Tools", bound=Collection[Any])

Reuse = Literal["turn", "ttl"]
"""How long a result may be used: until its turn is settled, or until its time to live ends."""

_MARK = "__spectool_policy__"

# Where frameworks keep what a tool runs: LangChain's `func` and `coroutine`, LlamaIndex's `real_fn` (the function as
# given; `fn` and `async_fn` may be converted ones), then the methods that a tool class defines.
_IMPLEMENTATIONS = ("func", "coroutine", "real_fn", "fn", "async_fn", "_run", "_arun", "call", "acall", "__call__")


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """What the author of a tool allows speculation to do with it.

    Args:
        ttl_s: how long a result stays usable; None leaves it to the `Speculation`.
        timeout_s: how long an early run may take before it is given up; None leaves it to the `Speculation`.
        max_concurrency: how many early runs of this tool there may be at once; None leaves it to the `Speculation`.
        reuse: "turn": a result serves the turn it was started in; "ttl": also later turns of its scope.
        reads: tags of what the tool reads; None (undeclared) means everything.
        writes: tags of what the tool writes; a tool that writes is never run early, its tags narrow its fence.
        exclude_args: names of arguments that do not affect the result and are left out of the key.
        cost: what one run costs, in a currency of yours; for the gate, which does not weigh it yet.
        needs_approval: a human must agree to each call; such a tool is never run early.

    `reads`, `writes` and `exclude_args` take any iterable of strings. Raises ConfigurationError.
    """

    ttl_s: float | None = None
    timeout_s: float | None = None
    max_concurrency: int | None = None
    reuse: Reuse = "turn"
    reads: frozenset[str] | None = None
    writes: frozenset[str] | None = None
    exclude_args: frozenset[str] = frozenset()
    cost: float = 0.0
    needs_approval: bool = False

    def __post_init__(self) -> None:
        for field in ("ttl_s", "timeout_s"):
            value = getattr(self, field)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ConfigurationError(field, value, "a positive, finite number of seconds, or None")
        limit = self.max_concurrency
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigurationError("max_concurrency", limit, "a whole number of at least 1, or None")
        if self.reuse not in get_args(Reuse):
            raise ConfigurationError("reuse", self.reuse, '"turn" or "ttl"')
        if not (_is_number(self.cost) and 0 <= self.cost < math.inf):
            raise ConfigurationError("cost", self.cost, "a finite number of at least 0")
        if not isinstance(self.needs_approval, bool):
            raise ConfigurationError("needs_approval", self.needs_approval, "True or False")
        for field in ("reads", "writes", "exclude_args"):
            value = getattr(self, field)
            if value is not None or field == "exclude_args":
                object.__setattr__(self, field, _strings(field, value))

    @property
    def runs_early(self) -> bool:
        """Whether the tool may be run before the main model asks for it."""
        return not self.needs_approval and not self.writes


class PolicyFields(TypedDict, total=False):
    """The fields of `ToolPolicy` as `speculatable` and `mark` take them."""

    ttl_s: float | None
    timeout_s: float | None
    max_concurrency: int | None
    reuse: Reuse
    reads: Iterable[str] | None
    writes: Iterable[str] | None
    exclude_args: Iterable[str]
    cost: float
    needs_approval: bool


@overload
def speculatable(tool: T, /, **policy: Unpack[PolicyFields]) -> T: ...
@overload
def speculatable(**policy: Unpack[PolicyFields]) -> Callable[[T], T]: ...
def speculatable(*tool: Any, **policy: Any) -> Any:
    """Mark a function, coroutine function, framework tool object or tool class as safe to run early.

    Used as `@speculatable`, as `@speculatable(ttl_s=30, reads=["docs"])`, above or below a framework's own decorator,
    or after the fact as `speculatable(tool)`. Returns the same object. The last mark of an object wins.

    Only mark tools that a model may call unseen: no side effects, no cost that matters. Raises ConfigurationError.
    """
    mark_ = _policy(policy)
    if not tool:
        return functools.partial(_put, policy=mark_)
    return _put(*tool, policy=mark_)


def mark(tools: Tools, names: Iterable[str] | None = None, **policy: Unpack[PolicyFields]) -> Tools:
    """Mark those of `tools` whose name is in `names`, or all of them, and return the same collection.

    Raises ConfigurationError, with nothing marked, if a name is not the name of one of the tools.
    """
    if not isinstance(tools, Collection) or isinstance(tools, str | bytes | Mapping):
        raise ConfigurationError("tools", tools, "a list of tools; for a single one use speculatable(tool)")
    mark_ = _policy(policy)
    for tool in tools:
        _check_is_tool(tool)
    wanted = None if names is None else _strings("names", names)
    if wanted is not None and (unknown := wanted - {_name_of(tool) for tool in tools}):
        existing = ", ".join(sorted(map(repr, map(_name_of, tools))))
        raise ConfigurationError("names", sorted(unknown), f"names of the given tools: {existing}")
    for tool in tools:
        if wanted is None or _name_of(tool) in wanted:
            _put(tool, policy=mark_)
    return tools


def policy_of(tool: object) -> ToolPolicy | None:
    """The policy that `tool` is marked with, or None: then it is never run early.

    The first mark found counts, looking at: the object itself, then what it wraps (a partial's or bound method's
    function, `__wrapped__`); the functions it runs, in the order of `_IMPLEMENTATIONS`; its class. A mark on a class
    does not reach subclasses: they may do what nobody agreed to.
    """
    if (found := _mark_within(tool)) is not None:
        return found
    for name in _IMPLEMENTATIONS:
        if (found := _mark_within(_read(tool, name))) is not None:
            return found
    return _own_mark(type(tool))


def is_marked_itself(tool: object) -> bool:
    """Whether the mark is on the tool object or its class, so that it speaks for all functions that the tool has."""
    return _mark_within(tool) is not None or _own_mark(type(tool)) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _strings(field: str, value: Any) -> frozenset[str]:
    # A bare string is iterable too and would become a set of its letters.
    if not isinstance(value, str | bytes) and isinstance(value, Iterable):
        items = list(value)
        if all(isinstance(item, str) and item for item in items):
            return frozenset(items)
    raise ConfigurationError(field, value, "a list or set of non-empty strings")


def _policy(given: Mapping[str, Any]) -> ToolPolicy:
    known = [field.name for field in fields(ToolPolicy)]
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(name, value, f"one of the fields {', '.join(known)}")
    return ToolPolicy(**given)


def _read(tool: object, name: str) -> object:
    try:
        return getattr(tool, name, None)
    except Exception:  # a property of someone else's class; what cannot be read holds no mark
        return None


def _layers(tool: object) -> Iterator[object]:
    """The object and what it wraps, outermost first."""
    seen: list[object] = []
    while tool is not None and all(tool is not layer for layer in seen):
        yield tool
        seen.append(tool)
        if isinstance(tool, functools.partial):
            tool = tool.func
        elif isinstance(tool, MethodType | staticmethod | classmethod):
            tool = tool.__func__
        else:
            tool = _read(tool, "__wrapped__")


def _name_of(tool: object) -> str:
    candidates = [_read(tool, "name"), _read(_read(tool, "metadata"), "name")]
    candidates += [_read(layer, "__name__") for layer in _layers(tool)]
    return next((name for name in candidates if isinstance(name, str)), type(tool).__name__)


def _check_is_tool(tool: object) -> None:
    holds_one = any(callable(_read(tool, name)) for name in ("__func__", *_IMPLEMENTATIONS))
    if not (callable(tool) or holds_one):
        raise ConfigurationError("tool", tool, "a function, a framework's tool object or a tool class")


# Marks of objects that hold no attributes. Keyed by identity, since tool objects need be neither hashable nor
# comparable; each entry goes with its object, so an id that is used again never inherits a mark.
_elsewhere: dict[tuple[int, ...], tuple[weakref.ref[Any], ToolPolicy]] = {}


def _identity(tool: object) -> tuple[int, ...]:
    # Each access of a bound method makes a new object, so it is known by what it binds.
    return (id(tool.__self__), id(tool.__func__)) if isinstance(tool, MethodType) else (id(tool),)


def _own_mark(tool: object) -> ToolPolicy | None:
    entry = _elsewhere.get(_identity(tool))
    if entry is not None and entry[0]() is not None:
        return entry[1]
    attributes = None if isinstance(tool, MethodType) else _read(tool, "__dict__")
    found = attributes.get(_MARK) if isinstance(attributes, Mapping) else None
    return found if isinstance(found, ToolPolicy) else None


def _mark_within(tool: object) -> ToolPolicy | None:
    return next((found for layer in _layers(tool) if (found := _own_mark(layer)) is not None), None)


def _put(tool: T, *, policy: ToolPolicy) -> T:
    _check_is_tool(tool)
    # A class body sees the descriptor, callers see the function in it.
    holder: Any = tool.__func__ if isinstance(tool, staticmethod | classmethod) else tool
    attributes = None if isinstance(holder, MethodType) else _read(holder, "__dict__")
    try:
        if isinstance(holder, type):
            setattr(holder, _MARK, policy)
        elif isinstance(attributes, dict):
            # Past `__setattr__`, which pydantic models refuse. They keep cached properties the same way, so the mark
            # is copied and pickled with the tool, and is in no field, dump or callback.
            attributes[_MARK] = policy
        else:
            _put_elsewhere(holder, policy)
    except TypeError:
        raise ConfigurationError("tool", tool, "an object that takes attributes or weak references") from None
    return tool


def _put_elsewhere(tool: Any, policy: ToolPolicy) -> None:
    key = _identity(tool)
    reference = weakref.WeakMethod if isinstance(tool, MethodType) else weakref.ref
    _elsewhere[key] = (reference(tool, lambda _: _elsewhere.pop(key, None)), policy)
