"""What a response's sequence goes on from: decided at each turn's end, for as long as it stays in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spectool_core.vllm.engine_commands import CallsEngine
from spectool_core.vllm.planner import Planner, TurnStart
from spectool_core.vllm.rendering import ConversationRenderer, Message, RenderingRefusedError, tool_message
from spectool_core.vllm.tool_cache import CachedResponse, Entry, Injected, ToolCache
from spectool_core.vllm.turns import EndedTurn
from spectool_core.vllm.wire import call_key

__all__ = ["Injection", "Injector", "TurnEnds"]


class TurnEnds(Protocol):
    """The part of an engine sequence that ends turns; see `sequences.EngineSequence`."""

    async def turn_end(self, turn: int) -> EndedTurn:
        """How the engine ended it."""
        ...

    async def resume(self, turn: int, end_id: int, suffix_ids: Sequence[int], max_tokens: int | None) -> bool:
        """Go on from a parked turn."""
        ...

    async def release(self, turn: int) -> None:
        """End the sequence here, parked or not."""
        ...


@dataclass(frozen=True, slots=True)
class Injection:
    """What the engine went on from, behind a turn.

    Args:
        injected: the calls and their outputs, in order.
        messages: the same in OpenAI format: the turn's assistant message, then the tools'.
        suffix_ids: the tokens that were appended.
    """

    injected: list[Injected]
    messages: list[Message]
    suffix_ids: list[int]


class Injector:
    """Decides how the turns of one response go on.

    Args:
        cached: what has been posted for it.
        cache: holds it.
        renderer: of the request.
        commands: the engine core's; None at level sessions.
        hold_s: seconds for which a turn waits for tools that still run.
        may_wait: whether one more turn may wait.
        next_max_tokens: the budget of a turn with a prompt of so many tokens; None where one budget spans all turns.

    Attributes:
        num_left: tokens that are left of one budget for all turns.
    """

    def __init__(
        self,
        cached: CachedResponse,
        cache: ToolCache,
        renderer: ConversationRenderer,
        commands: CallsEngine | None,
        *,
        hold_s: float,
        may_wait: Callable[[], bool],
        next_max_tokens: Callable[[int], int] | None,
    ) -> None:
        self.cached = cached
        self.num_left: Callable[[], int] = lambda: 0
        self._cache = cache
        self._renderer = renderer
        self._hold_s = hold_s
        self._may_wait = may_wait
        self._next_max_tokens = next_max_tokens
        self._planner = None if commands is None else Planner(cached, cache, renderer, commands, next_max_tokens)
        self._turn: TurnStart | None = None
        self._changed = asyncio.Event()
        self._has_ended = False
        cached.on_change = self._changed.set

    def begin_turn(self, turn: TurnStart) -> None:
        """A turn's prompt is known."""
        self._turn = turn
        self._cache.begin_turn(self.cached, turn.number)
        if self._planner is not None:
            self._planner.begin_turn(turn)

    async def sync(self) -> None:
        """Return when the engine knows what has been posted."""
        if self._planner is not None:
            await self._planner.sync()

    def end_soon(self) -> None:
        """Nobody wants the next turn: the current one comes to its end, and is not waited at."""
        self._has_ended = True
        self._changed.set()

    def close(self) -> None:
        """The response has ended."""
        if self._planner is not None:
            self._planner.close()
        self._cache.end(self.cached)

    async def note_unexplained_finish(self) -> None:
        """Note why the engine did not go on, after the response's end."""
        if self._planner is not None:
            await self._planner.note_unexplained_finish()

    async def inject(
        self, sequence: TurnEnds, answer: Message, calls: Sequence[tuple[str, dict[str, Any]]], end_id: int
    ) -> Injection | None:
        """What the engine went on from behind the current turn; None where it did not, and the sequence is over.

        Args:
            sequence: the engine's.
            answer: the turn's assistant message, as vLLM's parser made it.
            calls: its calls.
            end_id: the token that ended the turn.
        """
        turn = self._turn
        if turn is None:
            return None
        injection = None if self._has_ended else await self._decided(turn, sequence, answer, calls, end_id)
        if self._has_ended:
            self.cached.refuse(turn.number, "ended")
        if injection is None or self._has_ended:
            # It may be parked, or, where the scheduler went on, write the next turn already.
            await sequence.release(turn.number)
            return None
        for made in injection.injected:
            noted = {"name": made.name, "params": made.params, "tool_call_id": made.tool_call_id}
            self.cached.injected.append({"turn": turn.number, **noted})
        return injection

    async def _decided(
        self,
        turn: TurnStart,
        sequence: TurnEnds,
        answer: Message,
        calls: Sequence[tuple[str, dict[str, Any]]],
        end_id: int,
    ) -> Injection | None:
        end = await sequence.turn_end(turn.number)
        keys = [call_key(name, params) for name, params in calls]
        if end.outcome == "finished":
            self.cached.refuse(turn.number, end.reason or "unknown_to_the_engine")
            return None
        if end.keys is not None and list(end.keys) != keys:
            self.cached.refuse(turn.number, "other_calls")
            return None
        if end.outcome == "injected":
            return self._injected(turn, answer, keys)
        self.cached.state = "parked"
        try:
            return await self._joined(sequence, turn, answer, keys, end_id)
        finally:
            if self.cached.state == "parked":
                self.cached.state = "running"

    def _injected(self, turn: TurnStart, answer: Message, keys: Sequence[str]) -> Injection | None:
        planned = None if self._planner is None or len(keys) != 1 else self._planner.planned(turn.number, keys[0])
        if planned is None or planned.rendered is None:
            self.cached.refuse(turn.number, "unplanned")
            return None
        return self._injection(answer, [planned.entry], planned.rendered.suffix_ids)

    async def _joined(
        self, sequence: TurnEnds, turn: TurnStart, answer: Message, keys: Sequence[str], end_id: int
    ) -> Injection | None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._hold_s
        while True:
            self._changed.clear()
            known = self._cache.entries_in(self.cached, turn.number)
            entries = [known[key] for key in keys if key in known]
            if self._has_ended:
                return None
            if not keys or len(entries) < len(keys):
                self.cached.refuse(turn.number, "not_cached")
                return None
            if all(entry.text is not None for entry in entries):
                return await self._resumed(sequence, turn, answer, entries, end_id)
            if loop.time() >= until_s or not self._may_wait():
                self.cached.refuse(turn.number, "held_too_long" if loop.time() >= until_s else "too_many_parked")
                return None
            now_s = self._cache.clock()
            wait_s = min(until_s - loop.time(), *(entry.expires_s - now_s for entry in entries))
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _resumed(
        self, sequence: TurnEnds, turn: TurnStart, answer: Message, entries: Sequence[Entry], end_id: int
    ) -> Injection | None:
        texts = [entry.text or "" for entry in entries]
        try:
            rendered = await self._renderer.after(turn.messages, turn.prompt_ids, answer, texts)
        except RenderingRefusedError as exc:
            self.cached.refuse(turn.number, "cannot_render", str(exc))
            return None
        own = self._next_max_tokens
        max_tokens = self.num_left() if own is None else own(rendered.num_prompt_tokens)
        if max_tokens < 1 or not await sequence.resume(turn.number, end_id, rendered.suffix_ids, max_tokens):
            self.cached.refuse(turn.number, "no_room")
            return None
        return self._injection(answer, entries, rendered.suffix_ids)

    def _injection(self, answer: Message, entries: Sequence[Entry], suffix_ids: list[int]) -> Injection:
        ids = [str(call["id"]) for call in answer["tool_calls"]]
        made = [
            Injected(entry.name, entry.params, entry.text or "", id_) for entry, id_ in zip(entries, ids, strict=True)
        ]
        tools = [tool_message(call.tool_call_id, call.output) for call in made]
        return Injection(made, [answer, *tools], suffix_ids)
