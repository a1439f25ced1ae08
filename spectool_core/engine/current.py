"""The turn whose main model is being called: set where a turn is started, read by the HTTP transport beneath."""

from __future__ import annotations

from contextvars import ContextVar

from spectool_core.engine.turn import EngineTurn

__all__ = ["current_turn", "set_current_turn"]

_current: ContextVar[EngineTurn | None] = ContextVar("spectool_engine_turn", default=None)


def current_turn() -> EngineTurn | None:
    """The turn whose main model is being called in this context."""
    return _current.get()


def set_current_turn(turn: EngineTurn | None) -> None:
    """From now on, the main model that is called in this context answers `turn`; None for a call of no turn."""
    if turn is not None or _current.get() is not None:
        _current.set(turn)
