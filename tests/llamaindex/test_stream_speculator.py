"""A main model that is streamed: the calls that it has written run while it writes on, and the run is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ToolCallBlock
from llama_index.llms.openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import Field

from spectool_core import Speculation, StreamSpeculator
from spectool_core.calls import ToolCall
from spectool_core.statistics import SourceStatistics
from spectool_llamaindex import SpeculativeFunctionAgent
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes
from tests.llamaindex.agents import alone, function_agent, react_agent
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.comparing import compare
from tests.llamaindex.scripted import ScriptedLLM, thinking
from tests.llamaindex.tools import make_tools
from tests.tool_log import ToolLog


@dataclass(frozen=True)
class Written:
    """What a model writes next, `after_s`: text and pieces of calls; or that it breaks off."""

    after_s: float
    text: str = ""
    pieces: tuple[dict[str, Any], ...] = ()
    error: Exception | None = None

    @property
    def delta(self) -> dict[str, Any]:
        return {"content": self.text or None, **({"tool_calls": list(self.pieces)} if self.pieces else {})}


def piece(arguments: Any = "", *, index: int = 0, name: str | None = None, id: str | None = None) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_mapping(turn: int, delta: dict[str, Any]) -> Any:
    """One chunk of the server's, as JSON."""
    choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None}
    return {
        "id": f"chunk-{turn}",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "scripted",
        "choices": [choice],
    }


def as_model(turn: int, delta: dict[str, Any]) -> Any:
    """The same as the client of OpenAI gives it."""
    return ChatCompletionChunk.model_validate(as_mapping(turn, delta))


class WritingLLM(ScriptedLLM):
    """Writes the answer of each turn piece by piece.

    Attributes:
        scripts: what it writes, turn by turn.
        raw_of: makes the chunk that it gives as `raw`, of the turn and the delta.
    """

    replies: list[Reply] = Field(default_factory=list, exclude=True)
    scripts: list[list[Written]] = Field(exclude=True)
    raw_of: Callable[[int, dict[str, Any]], Any] = Field(as_model, exclude=True)

    def _reply(self, turn: int, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Reply:
        return Reply()

    async def _answer(self, turn: int, reply: Reply) -> AsyncIterator[ChatResponse]:
        text, calls = "", dict[int, ToolCallBlock]()
        for written in self.scripts[turn]:
            await asyncio.sleep(written.after_s)
            if written.error is not None:
                raise copy(written.error)  # LlamaIndex writes on it
            text += written.text
            for each in written.pieces:
                _add(calls, each)
            blocks = [TextBlock(text=text), *(call.model_copy() for call in calls.values())]
            message = ChatMessage(role="assistant", blocks=blocks)
            yield ChatResponse(message=message, delta=written.text, raw=self.raw_of(turn, written.delta))


def _add(calls: dict[int, ToolCallBlock], written: dict[str, Any]) -> None:
    function = written["function"]
    call = calls.setdefault(written["index"], ToolCallBlock(tool_call_id="", tool_name="", tool_kwargs=""))
    call.tool_call_id = call.tool_call_id or written["id"] or ""
    call.tool_name += function["name"] or ""
    call.tool_kwargs = str(call.tool_kwargs) + str(function["arguments"] or "")


# The call closes at 0.75; the answer ends at 1.75.
CALL_THEN_TEXT = [
    Written(0.25, pieces=(piece(name="lookup", id="call_0"),)),
    Written(0.25, pieces=(piece('{"q": '),)),
    Written(0.25, pieces=(piece('"a"}'),)),
    Written(0.5, "I look "),
    Written(0.5, "that up."),
]

# The first call closes at 0.5, the second one with the answer, at 1.5.
TWO_CALLS = [
    Written(0.25, "Both.", (piece('{"q"', name="lookup", id="call_0"),)),
    Written(0.25, pieces=(piece(': "a"}'),)),
    Written(0.5, pieces=(piece('{"input": "b"', name="search", id="call_1", index=1),)),
    Written(0.5, pieces=(piece("}", index=1),)),
]

# The second one closes first, at 0.75, the first one at 1.0; the answer ends at 2.0.
INTERLEAVED = [
    Written(0.25, pieces=(piece(name="lookup", id="call_0"), piece('{"input"', name="search", id="call_1", index=1))),
    Written(0.25, pieces=(piece('{"q": '), piece(': "b', index=1))),
    Written(0.25, pieces=(piece('"}', index=1),)),
    Written(0.25, pieces=(piece('"a"}'),)),
    Written(1.0, "Both at once."),
]

END = [Written(0.25, "That "), Written(0.25, "is it.")]
END_S = 0.5


def streaming(*others: Any, **settings: Any) -> Speculation:
    return Speculation([StreamSpeculator(), *others], **settings)


def answering(
    *scripts: list[Written], raw_of: Callable[[int, dict[str, Any]], Any] = as_model, **settings: Any
) -> Callable[[ToolLog, Speculation | None], Any]:
    """What makes the agent, stock or speculative, whose model writes this and then the end."""

    def make(log: ToolLog, given: Speculation | None) -> Any:
        llm = WritingLLM(scripts=[*scripts, END], raw_of=raw_of)
        return function_agent(llm, make_tools(log), given, **settings)

    return make


def num_predictions(speculation: Speculation) -> int:
    return speculation.statistics().speculators["stream"].num_predictions


@pytest.mark.parametrize(
    ("tool_s", "outcome", "saved_s"),
    [(0.4, (1, 0, 0), 0.4), (1.0, (1, 0, 0), 1.0), (1.6, (0, 1, 0), 1.0)],
)
@pytest.mark.parametrize("raw_of", [as_model, as_mapping])
def test_a_call_runs_while_the_model_goes_on_with_text(
    tool_s: float, outcome: tuple[int, int, int], saved_s: float, raw_of: Callable[[int, dict[str, Any]], Any]
) -> None:
    """`compare` holds the events, messages, spans and callbacks of both runs against one another."""
    speculation = streaming()
    compared = compare(answering(CALL_THEN_TEXT, raw_of=raw_of), speculation, latency_s=lambda *_: tool_s)
    assert compared.stock.duration_s == pytest.approx(1.75 + tool_s + END_S)
    assert compared.saved_s == pytest.approx(saved_s)
    assert outcomes(speculation) == outcome
    assert compared.log.events == compared.stock_log.events
    assert len(compared.ours.of("AgentStream")) == len(CALL_THEN_TEXT) + len(END)


@pytest.mark.parametrize("in_workflow", [False, True])
@pytest.mark.parametrize(
    ("script", "outcome", "saved_s"),
    [
        # 0.9 s of `lookup` from 0.5 on, in time; 1.3 s of `search` from 1.5 on, where the answer ends.
        (TWO_CALLS, (1, 0, 1), 0.0),
        # 0.9 s of `lookup` from 1.0 on; 1.3 s of `search` from 0.75 on, which ends 1.25 s before it would have.
        (INTERLEAVED, (1, 1, 0), 1.25),
    ],
    ids=["one after the other", "interleaved"],
)
def test_calls_run_while_the_model_goes_on_with_calls(
    script: list[Written], outcome: tuple[int, int, int], saved_s: float, in_workflow: bool
) -> None:
    speculation = streaming()
    make = answering(script)
    compared = compare(
        (lambda log, given: alone(make(log, given))) if in_workflow else make,
        speculation,
        latency_s=lambda name, _: 0.9 if name == "lookup" else 1.3,
        in_order=False,
    )
    assert compared.saved_s == pytest.approx(saved_s)
    assert outcomes(speculation) == outcome
    assert compared.log.counts("started") == compared.stock_log.counts("started")


class Server:
    """Stands where the client of OpenAI is, and answers as its server does."""

    def __init__(self, *scripts: list[Written]) -> None:
        self.chat = self.completions = self
        self._scripts = scripts

    async def create(self, *, messages: list[dict[str, Any]], stream: bool, **_: Any) -> AsyncIterator[Any]:
        assert stream
        return self._chunks(sum(message["role"] == "assistant" for message in messages))

    async def _chunks(self, turn: int) -> AsyncIterator[ChatCompletionChunk]:
        for written in self._scripts[turn]:
            await asyncio.sleep(written.after_s)
            yield as_model(turn, written.delta)
        yield ChatCompletionChunk.model_validate({**as_mapping(turn, {}), "choices": []})  # as where usage is asked for


def test_the_llm_of_openai() -> None:
    """LlamaIndex's own, over the chunks of such a server."""

    def play(given: Speculation | None) -> tuple[list[str], str, float]:
        async def main() -> tuple[list[str], str, float]:
            llm = OpenAI(model="gpt-4o-mini", api_key="unused")
            llm._aclient = Server([*TWO_CALLS, Written(1.0, "Both at once.")], END)
            tools = make_tools(ToolLog(lambda *_: 0.4))
            agent: Any = (
                FunctionAgent(llm=llm, tools=tools)
                if given is None
                else SpeculativeFunctionAgent(llm=llm, tools=tools, speculation=given)
            )
            output = await agent.run(user_msg="go")
            said = [str(called.tool_output) for called in output.tool_calls]
            return sorted(said), str(output), asyncio.get_running_loop().time()

        return run_virtual(main)

    speculation = streaming()
    stock, ours = play(None), play(speculation)
    assert stock == (["lookup of a1", "search of b"], "That is it.", pytest.approx(2.5 + 0.4 + END_S))
    assert ours == (*stock[:2], pytest.approx(2.5 + END_S))
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((piece('{"text": "n"}', name="note", id="call_0"),), id="not marked"),
        pytest.param((piece("{}", name="unknown", id="call_0"),), id="not there"),
        pytest.param((piece("{}", name="lookup", id="call_0"),), id="perhaps not all"),
        pytest.param((piece('{"q": "a"', name="lookup", id="call_0"),), id="not closed"),
        pytest.param((piece('{"q": "a", "n', name="lookup", id="call_0"),), id="cut off"),
        pytest.param((piece("q = a", name="lookup", id="call_0"),), id="no JSON"),
        pytest.param((piece('{"other": 1}', name="lookup", id="call_0"),), id="not taken by the tool"),
    ],
)
def test_what_is_no_whole_call_of_a_marked_tool_does_not_run_early(pieces: tuple[dict[str, Any], ...]) -> None:
    """LlamaIndex parses what is not closed as far as it goes, and runs it once the answer has ended."""
    speculation = streaming()
    compared = compare(answering([Written(0.25, pieces=pieces), Written(1.0, "Hm.")]), speculation)
    assert compared.saved_s == 0.0
    assert speculation.statistics().num_launched == 0
    assert compared.log.events == compared.stock_log.events


def without(*_: Any) -> None:
    return None


OTHER_FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": without,
    "text": json.dumps,
    "a list": lambda delta: [delta],
    "an object": lambda delta: SimpleNamespace(choices=[SimpleNamespace(delta=delta)]),
    "the delta alone": lambda delta: delta,
    "a whole message": lambda delta: {"message": {"role": "assistant", **delta}},
    "choices without a delta": lambda delta: {"choices": [{"message": delta}]},
    "no choices": lambda delta: {"choices": []},
    "choices that are none": lambda delta: {"choices": None},
    "choices by name": lambda delta: {"choices": {"0": {"delta": delta}}},
    "a choice that is none": lambda delta: {"choices": [None]},
    "a delta that is none": lambda delta: {"choices": [{"delta": None}]},
    "a delta that is a list": lambda delta: {"choices": [{"delta": [delta]}]},
    "another protocol": lambda delta: {"type": "content_block_delta", "delta": {"partial_json": str(delta)}},
    "calls that are no list": lambda delta: {"choices": [{"delta": {"tool_calls": "lookup"}}]},
    "calls that are text": lambda delta: {"choices": [{"delta": {"tool_calls": ["lookup"]}}]},
    "a function that is text": lambda delta: {"choices": [{"delta": {"tool_calls": [{"function": "lookup"}]}}]},
    "arguments that are no JSON": lambda delta: {
        "choices": [{"delta": {"tool_calls": [{"function": {"name": "lookup", "arguments": {"q": {1, 2}}}}]}}]
    },
}


@pytest.mark.parametrize("form", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_chunks_of_another_form_start_nothing_and_break_nothing(form: Callable[[dict[str, Any]], Any]) -> None:
    speculation = streaming()
    compared = compare(answering(CALL_THEN_TEXT, raw_of=lambda _, delta: form(delta)), speculation)
    assert compared.ours.error is None
    assert compared.saved_s == 0.0
    assert compared.log.events == compared.stock_log.events
    assert outcomes(speculation) == (0, 0, 1)
    assert num_predictions(speculation) == 0
    assert speculation.statistics().num_speculators_failed == 0


def test_a_model_that_is_not_streamed() -> None:
    speculation = streaming()
    compared = compare(answering(CALL_THEN_TEXT, streaming=False), speculation)
    assert compared.ours.of("AgentStream") == []
    assert compared.saved_s == 0.0
    assert compared.log.events == compared.stock_log.events
    assert outcomes(speculation) == (0, 0, 1)
    assert num_predictions(speculation) == 0


def test_an_agent_whose_calls_are_text() -> None:
    """It writes no calls, only text that is read when it has ended."""
    replies = [thinking(Call("lookup", {"q": "a"})), thinking()]
    speculation = streaming()
    compared = compare(lambda log, given: react_agent(replies, make_tools(log), given), speculation)
    assert compared.saved_s == 0.0
    assert outcomes(speculation) == (0, 0, 1)
    assert num_predictions(speculation) == 0


def test_an_answer_that_breaks_off_ends_what_it_has_started() -> None:
    script = [*CALL_THEN_TEXT[:4], Written(0.25, error=ConnectionError("the model is down"))]
    speculation = streaming()
    compared = compare(answering(script), speculation, latency_s=lambda *_: 2.0)
    assert "the model is down" in str(compared.stock.error)
    assert compared.saved_s == 0.0
    assert compared.log.events == [("lookup", "a1", "started"), ("lookup", "a1", "cancelled")]
    assert compared.stock_log.events == []


def test_turns_do_not_hear_one_another() -> None:
    """The ids and indexes of each answer are those of the last one."""
    scripts = [
        [
            Written(0.25, pieces=(piece('{"q": "', name="lookup", id="call_0"),)),
            Written(0.25, pieces=(piece(f'{q}"}}'),)),
            Written(1.0, "So."),
        ]
        for q in "abc"
    ]
    speculation = streaming()
    compared = compare(answering(*scripts), speculation)
    assert compared.saved_s == pytest.approx(3 * 0.4)
    assert outcomes(speculation) == (3, 0, 0)
    assert compared.log.events == compared.stock_log.events


def test_beside_another_speculator_each_earns_its_own() -> None:
    """The other one names the first call before it is written, and is wrong about the second."""
    right, wrong = ToolCall("lookup", {"q": "a"}), ToolCall("search", {"input": "wrong"})
    speculation = streaming(GuessingSpeculator([Guess((right, wrong), 0.125)]))
    compared = compare(answering(INTERLEAVED), speculation, latency_s=lambda *_: 0.5, in_order=False)
    assert compared.saved_s == pytest.approx(0.5)
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("search", "b"): 1, ("search", "wrong"): 1}
    assert speculation.statistics().speculators == {
        "stream": SourceStatistics(num_turns=2, num_predictions=2, num_right=2, num_hits=1, saved_s=0.5),
        "guessing": SourceStatistics(num_turns=2, num_predictions=2, num_right=1, num_hits=1, saved_s=0.5),
    }


def test_a_read_beside_a_write_is_not_served() -> None:
    """The read closes first, and has run by the time that the write is written: too early to know."""
    script = [
        Written(0.25, pieces=(piece('{"q": "a"}', name="lookup", id="call_0"),)),
        Written(1.0, pieces=(piece('{"text": "n"}', name="note", id="call_1", index=1),)),
        Written(0.25, "Noted."),
    ]
    speculation = streaming()
    compared = compare(answering(script), speculation, in_order=False)
    assert outcomes(speculation) == (0, 0, 1)
    assert compared.saved_s == 0.0
    assert compared.log.counts("started") == {("lookup", "a1"): 2, ("note", "n"): 1}
