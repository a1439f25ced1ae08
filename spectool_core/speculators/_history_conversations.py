"""Recognises conversations that go on, so that each message is read once and each answer is learned once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from cachetools import LRUCache

from spectool_core.calls import Message
from spectool_core.speculators._history_conversation import (
    Answer,
    Conversation,
    ReadText,
    answer_in,
    asked_in,
    text_of,
    word,
)
from spectool_core.speculators._history_knowledge import Forecast, Knowledge

__all__ = ["Conversations"]

_MAX_LEARNED = 16384
_WINDOW = 4
_MAX_BACKLOG = 4
_START = 0


class _Followed:
    """A conversation, when the model was last asked, what its answer is expected to be, and what came right before."""

    def __init__(self, origin: int) -> None:
        self.conversation = Conversation()
        self.origin = origin
        self.asked = 0
        self.forecast: Forecast | None = None
        self.window: tuple[int, ...] = ()


class _Read(NamedTuple):
    """A message, all messages up to it as one number, and the last few."""

    message: Message
    prefix: int
    window: tuple[int, ...]


class Conversations:
    """The conversations of one tenant, followed from prompt to prompt. Not thread-safe; bounded.

    A prompt that continues an earlier one is read from there. Any other is read as a whole, but of its answers only
    those are learned that have not been learned before, and no more than the last few, which bounds the time that it
    takes. An answer is known by the messages right before it; when the model is asked the same once more, its answer
    is news.

    Args:
        knowledge: what learns.
        max_conversations: how many are remembered. One that is forgotten while an answer is due has ended in text: an
            answer with calls would have been followed by a prompt with their results.
    """

    def __init__(self, knowledge: Knowledge, max_conversations: int) -> None:
        self._knowledge = knowledge
        self._max_conversations = max_conversations
        self._followed: OrderedDict[int, _Followed] = OrderedDict()
        self._learned: LRUCache[Hashable, int] = LRUCache(_MAX_LEARNED)
        self._num_origins = 0
        self._num_asked = 0

    def __len__(self) -> int:
        return len(self._followed)

    def ask(
        self, messages: Sequence[Message], tools: Collection[str] | None, read_text: ReadText | None = None
    ) -> Forecast:
        """Learn what is new in a prompt, and forecast the answer to it."""
        reads = _reads(messages)
        followed, rest, _ = self._find(reads)
        answers = [position for position, read in enumerate(rest) if read.message.get("role") == "assistant"]
        first = answers[-_MAX_BACKLOG] if len(answers) > _MAX_BACKLOG else 0
        for position, read in enumerate(rest):
            self._read(followed, read, read_text, learns=position >= first, once=True)
        self._learned.pop(followed.window, None)
        self._num_asked += 1
        followed.asked = self._num_asked
        followed.forecast = self._knowledge.forecast(followed.conversation, tools)
        self._remember(reads, followed)
        return followed.forecast

    def learn(self, messages: Sequence[Message], read_text: ReadText | None = None) -> None:
        """Learn a conversation, or what has been added to one that was followed."""
        reads = _reads(messages)
        followed, rest, is_known = self._find(reads)
        for read in rest:
            self._read(followed, read, read_text, learns=True, once=False)
        if is_known:
            self._remember(reads, followed)

    def _find(self, reads: Sequence[_Read]) -> tuple[_Followed, Sequence[_Read], bool]:
        """The conversation that the messages continue, what is new in them, and whether it is one that was known."""
        known = [position for position in range(len(reads), 0, -1) if reads[position - 1].prefix in self._followed][:2]
        if known:
            # Where the whole prompt is known, it may be that a conversation like an earlier one has come this far.
            whole_is_old = len(known) > 1 and known[0] == len(reads)
            position = max(known, key=lambda each: self._at(reads, each).asked) if whole_is_old else known[0]
            return self._followed.pop(reads[position - 1].prefix), reads[position:], True
        self._num_origins += 1
        return _Followed(self._num_origins), reads, False

    def _at(self, reads: Sequence[_Read], position: int) -> _Followed:
        return self._followed[reads[position - 1].prefix]

    def _remember(self, reads: Sequence[_Read], followed: _Followed) -> None:
        self._followed[reads[-1].prefix if reads else _START] = followed
        while len(self._followed) > self._max_conversations:
            _, forgotten = self._followed.popitem(last=False)
            if forgotten.forecast is not None:
                self._learn(forgotten, Answer())

    def _read(self, followed: _Followed, read: _Read, read_text: ReadText | None, *, learns: bool, once: bool) -> None:
        answer = answer_in(read.message, read_text)
        if answer is None:
            followed.conversation.read_message(read.message, read_text)
        else:
            if once and followed.window in self._learned:
                followed.origin = self._learned[followed.window]
            elif learns:
                self._learn(followed, answer)
            followed.conversation.read_answer(answer)
        followed.forecast = None
        followed.window = read.window

    def _learn(self, followed: _Followed, answer: Answer) -> None:
        forecast = followed.forecast or self._knowledge.forecast(followed.conversation)
        self._knowledge.learn(followed.conversation, forecast, answer, followed.origin)
        for length in range(1, _WINDOW + 1):  # a history may be cut off anywhere
            self._learned[followed.window[-length:]] = followed.origin


def _reads(messages: Sequence[Message]) -> list[_Read]:
    """The messages, with what they are recognised by; system messages, which may tell the time, count for nothing."""
    reads: list[_Read] = []
    prefix = _START
    window: tuple[int, ...] = ()
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        role = word(message.get("role"))
        if role not in ("system", "developer"):
            text, asked, answered = text_of(message), asked_in(message), word(message.get("tool_call_id"))
            prefix = hash((prefix, role, text, asked, answered))
            # An old output may be shortened later on; it is an output of the same call all the same.
            window = (*window, hash((role, "" if role == "tool" else text, asked, answered)))[-_WINDOW:]
        reads.append(_Read(message, prefix, window))
    return reads
