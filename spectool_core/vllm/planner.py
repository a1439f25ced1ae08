"""What the engine is told of a response: which calls are cached or pending, and how a turn goes on that makes one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from spectool_core.vllm.engine_commands import CallsEngine
from spectool_core.vllm.rendering import ConversationRenderer, Message, Rendered, RenderingRefusedError
from spectool_core.vllm.tool_cache import CachedResponse, Entry, ToolCache

__all__ = ["Planned", "Planner", "TurnStart"]

# Event loops call back up to their clock's resolution early; an entry that had not expired then would be looked at no
# more.
_EXPIRY_SLACK_S = 0.01


@dataclass(frozen=True, slots=True)
class TurnStart:
    """What a turn is rendered from.

    Args:
        number: its number in the response, from 1.
        messages: the conversation.
        prompt_ids: as it was rendered.
    """

    number: int
    messages: Sequence[Message]
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Planned:
    """An output for a turn, as it was planned.

    Args:
        entry: what was posted.
        rendered: how the turn goes on; None where that cannot be rendered before the turn's end.
    """

    entry: Entry
    rendered: Rendered | None


class Planner:
    """Renders outputs ahead, and tells the engine core what is cached, pending or expired.

    Args:
        cached: what has been posted for the response.
        cache: holds it.
        renderer: of the request.
        commands: the engine core's.
        next_max_tokens: the budget of a turn with a prompt of so many tokens; None where one budget spans all turns.
    """

    def __init__(
        self,
        cached: CachedResponse,
        cache: ToolCache,
        renderer: ConversationRenderer,
        commands: CallsEngine,
        next_max_tokens: Callable[[int], int] | None,
    ) -> None:
        self._cached = cached
        self._cache = cache
        self._renderer = renderer
        self._commands = commands
        self._next_max_tokens = next_max_tokens
        self._turn: TurnStart | None = None
        self._planned: dict[tuple[int, str], Planned] = {}
        self._expected: dict[int | None, list[str]] = {}
        self._syncing = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_told = False

    def begin_turn(self, turn: TurnStart) -> None:
        """A turn's prompt is known: outputs that are there already are planned for it."""
        self._turn = turn
        # The engine has forgotten the turns before.
        self._planned = {place: plan for place, plan in self._planned.items() if place[0] >= turn.number}
        self._expected = {when: keys for when, keys in self._expected.items() if when is None or when >= turn.number}
        self._sync_soon()

    def planned(self, turn: int, key: str) -> Planned | None:
        """What was planned for this call in this turn."""
        return self._planned.get((turn, key))

    def close(self) -> None:
        """The response has ended."""
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self._tasks:
            task.cancel()

    async def note_unexplained_finish(self) -> None:
        """Ask the engine why it did not go on from a turn with calls, after the response's end."""
        if not self._was_told:
            return
        for record in await self._commands.call("turns", self._cached.id):
            # Where nothing had been posted by then, the engine has not looked for calls.
            if record["outcome"] == "finished" and (record["keys"] or record["reason"] == "nothing_cached"):
                self._cached.refuse(record["turn"], record["reason"])

    async def sync(self) -> None:
        """Tell the engine what has changed; returns when it knows.

        Nothing before the first turn's prompt is known: the engine has not heard of the response, or leaves it alone.
        """
        turn = self._turn
        if turn is None:
            return
        async with self._syncing:
            await self._withdraw()
            told = self._expect() + await self._plan(turn)
            await asyncio.gather(*told)
            self._sync_at_expiry()

    def _sync_soon(self) -> None:
        if self._cached.state != "finished":
            task = asyncio.get_running_loop().create_task(self.sync())
            self._tasks.add(task)
            task.add_done_callback(self._synced)

    def _synced(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._cached.refuse(self._cached.turn, "engine_error", type(error).__name__)

    async def _withdraw(self) -> None:
        """Drop the plans whose entry is gone, once the engine has dropped them."""
        gone = {place: plan for place, plan in self._planned.items() if not self._is_there(plan.entry)}
        told = {key for (_, key), plan in gone.items() if plan.rendered is not None}
        if told:
            await asyncio.gather(*self._expect(without=told))
            # The engine may have gone on before it was told, by the plan for the turn's calls.
            records = await self._commands.call("turns", self._cached.id)
            made = {(record["turn"], key) for record in records for key in record["keys"]}
            gone = {place: plan for place, plan in gone.items() if plan.rendered is None or place not in made}
        self._planned = {place: plan for place, plan in self._planned.items() if gone.get(place) is not plan}

    def _is_there(self, entry: Entry) -> bool:
        known = self._cached.entries.get((entry.turn, entry.key))
        return known is entry and entry.expires_s > self._cache.clock()

    def _expect(self, without: Collection[str] = ()) -> list[Any]:
        now_s = self._cache.clock()
        keys: dict[int | None, list[str]] = {turn: [] for turn in self._expected}
        for entry in self._cached.entries.values():
            if entry.expires_s > now_s and entry.key not in without:
                keys.setdefault(entry.turn, []).append(entry.key)
        changed = {turn: listed for turn, listed in keys.items() if self._expected.get(turn) != listed}
        self._was_told |= bool(changed)
        self._expected = {turn: listed for turn, listed in keys.items() if listed}
        return [self._commands.call("expect", self._cached.id, listed, turn) for turn, listed in changed.items()]

    async def _plan(self, turn: TurnStart) -> list[Any]:
        told = []
        for entry in self._cache.entries_in(self._cached, turn.number).values():
            place = (turn.number, entry.key)
            # One plan a call and turn, until the engine has dropped it: it may have gone on from it.
            if entry.text is None or place in self._planned:
                continue
            rendered = await self._rendered_ahead(turn, entry, entry.text)
            if turn is not self._turn:
                break  # it has ended meanwhile
            self._planned[place] = Planned(entry, rendered)
            if rendered is not None:
                budget = None if self._next_max_tokens is None else self._next_max_tokens(rendered.num_prompt_tokens)
                plan = {
                    "turn": turn.number,
                    "keys": [entry.key],
                    "call_ids": rendered.call_ids,
                    "suffix_ids": rendered.suffix_ids,
                    "max_tokens": budget,
                }
                told.append(self._commands.call("plan", self._cached.id, plan))
        return told

    async def _rendered_ahead(self, turn: TurnStart, entry: Entry, text: str) -> Rendered | None:
        try:
            return await self._renderer.ahead(turn.messages, turn.prompt_ids, entry.name, entry.params, text)
        except RenderingRefusedError as exc:
            self._cached.refuse(turn.number, "cannot_render", str(exc))
            return None

    def _sync_at_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        expiries = [entry.expires_s for entry in self._cached.entries.values()]
        if expiries:
            wait_s = max(0.0, min(expiries) - self._cache.clock()) + _EXPIRY_SLACK_S
            self._expiry = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _expire(self) -> None:
        now_s = self._cache.clock()
        if any(entry.expires_s <= now_s for entry in self._cached.entries.values()):
            self._cache.drop_stale(self._cached)
            self._sync_soon()
