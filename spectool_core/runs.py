"""What the core needs to know of a framework's tools: a call made ready to run early, and who makes it ready."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from spectool_core.annotation import ToolPolicy
from spectool_core.bounds import Bound
from spectool_core.calls import ToolCall
from spectool_core.canonical import CallKey

__all__ = ["NotPrepared", "NotReplayable", "PreparedCall", "RunContext", "Scope", "Toolbox"]


class Scope(NamedTuple):
    """Who may share a result: `owner`, within turn `turn` only unless that is None."""

    owner: Hashable
    turn: int | None


class NotReplayable(Exception):  # noqa: N818 - an outcome of a run, caught by the core; users never see it
    """The tool emitted something while it ran early that cannot be replayed, so its result may not be used."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A valid call of a marked tool, bound to what runs it.

    Args:
        call: the call as the model made it.
        key: what must be equal for another call to share this one's result; its scope is `scope`.
        scope: who may share the result.
        policy: the tool's mark.
        run: starts the run. It returns the result, or an awaitable of it unless `blocking`. The result is opaque to
            the core. It raises `NotReplayable` where a hit could not repeat what the tool emitted.
        blocking: `run` blocks and belongs on one of the library's threads.
        cap: bounds the early runs in flight of one agent run, which share it; None where the framework has no such
            bound.
        content: what the framework will show the main model of a result: the content of its tool message, where that
            is text; None where that cannot be told. Needed in engine mode only.
    """

    call: ToolCall
    key: CallKey
    scope: Scope
    policy: ToolPolicy
    run: Callable[[], Any]
    blocking: bool
    cap: Bound | None = None
    content: Callable[[Any], str | None] | None = None


@dataclass(frozen=True, slots=True)
class RunContext:
    """The agent run that a turn belongs to.

    Args:
        run: identity of this run of the graph or workflow; None where no run can be identified.
        thread_id: the conversation, where the framework knows one.
        configurable: what the user passed to the run, for `scope` and `may_speculate` (a tenant, a user).
    """

    run: Hashable
    thread_id: str | None = None
    configurable: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class NotPrepared(Exception):  # noqa: N818 - an answer of the toolbox, caught by the core; users never see it
    """A call cannot be run early: `reason` is a word for events and statistics."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Toolbox(Protocol):
    """The tools that one agent run may use, as its framework binds them."""

    def policy(self, name: str) -> ToolPolicy | None:
        """The mark of the tool of this name; None if it is unknown or unmarked, which means a write."""
        ...

    def prepare(self, call: ToolCall, scope: Scope) -> PreparedCall:
        """Bind a call to its tool, or raise NotPrepared with the reason. Never raises anything else."""
        ...
