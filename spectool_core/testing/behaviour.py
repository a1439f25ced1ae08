"""How a fake engine differs from one that works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spectool_core.testing.latch import Latch

__all__ = ["EngineBehaviour"]


@dataclass(frozen=True, slots=True)
class EngineBehaviour:
    """What is wrong with a fake engine; by default nothing.

    Args:
        is_installed: without the plugin it is a stock server.
        hold_s: seconds for which a turn waits for the outputs of pending calls.
        post_status: every post is refused with this HTTP status; None takes them.
        before_injected: opened before the client hears that the engine went on.
        injected: makes the messages that the client hears of from those that the engine went on from; text is sent
            as the event's data.
    """

    is_installed: bool = True
    hold_s: float = 2.0
    post_status: int | None = None
    before_injected: Latch | None = None
    injected: Callable[[list[dict[str, Any]]], list[dict[str, Any]] | str] | None = None
