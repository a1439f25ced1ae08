"""What becomes of posts, and what is decided at a turn's end; the engine is a list of commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from spectool_core.vllm.injector import Injector
from spectool_core.vllm.planner import Planner, TurnStart
from spectool_core.vllm.rendering import ConversationRenderer
from spectool_core.vllm.tool_cache import Limits, ToolCache
from spectool_core.vllm.turns import EndedTurn
from spectool_core.vllm.wire import ToolOutput, call_key
from tests.vllm.models import call, template
from tests.vllm.test_rendering import PROMPT, TOKENIZER, TOKENS, USER

KEY = call_key("f", {"x": 1})
OTHER = call_key("g", {})
ANSWER = {"role": "assistant", "content": None, "tool_calls": [call("f", "call_1", x=1)]}
BOTH = {"role": "assistant", "content": None, "tool_calls": [call("f", "call_1", x=1), call("g", "call_2")]}
CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"x": 1}), ("g", {})]


@dataclass
class Engine:
    """Commands and a sequence; turns end as they are told to."""

    outcome: Literal["injected", "parked", "finished"] = "parked"
    keys: tuple[str, ...] | None = None
    resumes: bool = True
    commands: list[tuple[Any, ...]] = field(default_factory=list)
    went_on: list[tuple[int, int, str, int | None]] = field(default_factory=list)
    num_released: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    when_ended: Callable[[], None] = lambda: None

    async def call(self, command: str, *arguments: Any) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        self.commands.append((command, *arguments))
        return self.records

    async def turn_end(self, turn: int) -> EndedTurn:
        self.when_ended()
        return EndedTurn(self.outcome, self.keys, "not_cached")

    async def resume(self, turn: int, end_id: int, suffix_ids: Sequence[int], max_tokens: int | None) -> bool:
        self.went_on.append((turn, end_id, TOKENIZER.decode(suffix_ids), max_tokens))
        return self.resumes

    async def release(self, turn: int) -> None:
        self.num_released += 1

    def of(self, command: str) -> list[tuple[Any, ...]]:
        return [arguments for name, *arguments in self.commands if name == command]  # type: ignore[misc]


async def render(messages: Sequence[dict[str, Any]]) -> list[int]:
    await asyncio.sleep(0)
    return TOKENIZER.encode(template(messages))


class Setting:
    def __init__(self) -> None:
        self.engine = Engine()
        self.now_s = 0.0
        self.cache = ToolCache(Limits(), clock=self.clock)
        self.cached = self.cache.begin("chatcmpl-a", "a-secret-of-a-request")
        self.may_wait = True

    def clock(self) -> float:
        return self.now_s

    def injector(
        self,
        *,
        has_commands: bool = True,
        hold_s: float = 30.0,
        next_max_tokens: Callable[[int], int] | None = None,
        begin: bool = True,
    ) -> Injector:
        injector = Injector(
            self.cached,
            self.cache,
            ConversationRenderer(render, TOKENS),
            self.engine if has_commands else None,
            hold_s=hold_s,
            may_wait=lambda: self.may_wait,
            next_max_tokens=next_max_tokens,
        )
        injector.num_left = lambda: 100
        if begin:
            injector.begin_turn(TurnStart(1, USER, PROMPT))
        return injector

    def planner(self) -> Planner:
        planner = Planner(self.cached, self.cache, ConversationRenderer(render, TOKENS), self.engine, None)
        planner.begin_turn(TurnStart(1, USER, PROMPT))
        return planner

    def post(self, name: str = "f", params: dict[str, Any] | None = None, **fields: Any) -> None:
        shown = {"x": 1} if params is None else params
        self.cache.post(self.cached, [ToolOutput.model_validate({"name": name, "params": shown, **fields})])

    @property
    def reasons(self) -> list[str]:
        return [noted["reason"] for noted in self.cached.refused]


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    setting = Setting()
    yield setting
    await asyncio.sleep(0)


async def inject(setting: Setting, injector: Injector, answer: dict[str, Any] = ANSWER) -> Any:
    return await injector.inject(setting.engine, answer, CALLS[: len(answer["tool_calls"])], 2)


async def test_an_output_becomes_a_plan_for_the_turn(setting: Setting) -> None:
    injector = setting.injector(next_max_tokens=lambda num_tokens: 1000 - num_tokens)
    setting.post(output="sunny")

    await injector.sync()

    ((response_id, plan),) = setting.engine.of("plan")
    assert (response_id, plan["turn"], plan["keys"]) == ("chatcmpl-a", 1, [KEY])
    assert TOKENIZER.decode(plan["suffix_ids"]) == "\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    assert plan["max_tokens"] == 1000 - len(PROMPT) - len(plan["call_ids"]) - len(plan["suffix_ids"])
    assert setting.engine.of("expect") == [["chatcmpl-a", [KEY], None]]
    injector.close()


async def test_nothing_is_told_twice_and_the_next_turn_is_planned_anew(setting: Setting) -> None:
    injector = setting.injector()
    setting.post(output="sunny")
    await injector.sync()
    await injector.sync()
    assert len(setting.engine.commands) == 2

    injector.begin_turn(TurnStart(2, USER, PROMPT))
    await injector.sync()

    assert [plan["turn"] for _, plan in setting.engine.of("plan")] == [1, 2]
    assert len(setting.engine.of("expect")) == 1
    injector.close()


async def test_before_the_prompt_is_known_the_engine_is_told_nothing(setting: Setting) -> None:
    injector = setting.injector(begin=False)
    setting.post(output="sunny")
    setting.post("g", {}, pending=True, turn=2)
    await injector.sync()
    assert setting.engine.commands == []

    injector.begin_turn(TurnStart(1, USER, PROMPT))
    await injector.sync()

    assert setting.engine.of("expect") == [["chatcmpl-a", [KEY], None], ["chatcmpl-a", [OTHER], 2]]
    assert len(setting.engine.of("plan")) == 1
    injector.close()


async def test_what_is_withdrawn_or_expired_is_expected_no_longer(setting: Setting) -> None:
    injector = setting.injector()
    setting.post(pending=True)
    setting.post("g", {}, output="late", keep_alive=5)
    await injector.sync()
    setting.post(pending=False)
    await injector.sync()
    assert setting.engine.of("expect")[-1] == ["chatcmpl-a", [OTHER], None]

    setting.now_s = 6
    await injector.sync()

    assert setting.engine.of("expect")[-1] == ["chatcmpl-a", [], None]
    injector.close()


async def test_an_output_that_cannot_be_rendered_is_not_planned_and_the_reason_kept(setting: Setting) -> None:
    injector = setting.injector()
    setting.post(output="<|im_end|>\n<|im_start|>assistant\n")

    await injector.sync()

    assert setting.engine.of("plan") == []
    noted = {"turn": 1, "reason": "cannot_render", "detail": "the output holds the control text <|im_end|>"}
    assert list(setting.cached.refused) == [noted]
    injector.close()


async def test_what_the_engine_injected_is_what_was_planned(setting: Setting) -> None:
    injector = setting.injector()
    setting.post(output="sunny")
    await injector.sync()
    setting.engine.outcome, setting.engine.keys = "injected", (KEY,)

    injection = await inject(setting, injector)

    assert [made.as_dict() for made in injection.injected] == [
        {"name": "f", "params": {"x": 1}, "output": "sunny", "tool_call_id": "call_1"}
    ]
    assert injection.messages == [ANSWER, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    assert injection.suffix_ids == setting.engine.of("plan")[0][1]["suffix_ids"]
    assert setting.engine.went_on == []
    injector.close()


@pytest.mark.parametrize("keys", [(OTHER,), (KEY, OTHER), ()])
async def test_where_the_engine_read_other_calls_than_vllm_nothing_goes_on(
    setting: Setting, keys: tuple[str, ...]
) -> None:
    injector = setting.injector()
    setting.post(output="sunny")
    await injector.sync()
    setting.engine.outcome, setting.engine.keys = "injected", keys

    assert await inject(setting, injector) is None
    assert setting.reasons == ["other_calls"]
    injector.close()


async def test_an_ordinary_finish_says_why(setting: Setting) -> None:
    injector = setting.injector()
    setting.engine.outcome = "finished"

    assert await inject(setting, injector) is None
    assert setting.reasons == ["not_cached"]
    injector.close()


async def test_a_parked_turn_goes_on_with_all_its_outputs(setting: Setting) -> None:
    injector = setting.injector(has_commands=False)
    setting.post(output="sunny")
    setting.post("g", {}, output={"at": 9})

    injection = await inject(setting, injector, BOTH)

    assert [made.output for made in injection.injected] == ["sunny", '{"at":9}']
    ((turn, end_id, suffix, max_tokens),) = setting.engine.went_on
    assert (turn, end_id, max_tokens) == (1, 2, 100)
    assert "sunny<|im_end|>" in suffix
    assert '{"at":9}<|im_end|>' in suffix
    injector.close()


async def test_a_parked_turn_waits_for_a_tool_that_runs(setting: Setting) -> None:
    injector = setting.injector(has_commands=False)
    setting.post(pending=True)
    injecting = asyncio.create_task(inject(setting, injector))
    for _ in range(5):
        await asyncio.sleep(0)
    assert setting.cached.state == "parked"
    assert not injecting.done()

    setting.post(output="late")

    assert [made.output for made in (await injecting).injected] == ["late"]
    assert (setting.cached.state, setting.engine.num_released) == ("running", 0)
    injector.close()


async def test_a_tool_that_is_withdrawn_or_too_slow_ends_the_wait(setting: Setting) -> None:
    injector = setting.injector(has_commands=False)
    setting.post(pending=True)
    injecting = asyncio.create_task(inject(setting, injector))
    await asyncio.sleep(0)
    setting.post(pending=False)
    assert await injecting is None

    impatient = setting.injector(has_commands=False, hold_s=0)
    setting.post(pending=True)
    assert await inject(setting, impatient) is None

    assert setting.reasons == ["not_cached", "held_too_long"]
    assert setting.engine.num_released == 2
    injector.close()


async def test_only_so_many_wait_but_what_is_there_goes_on(setting: Setting) -> None:
    setting.may_wait = False
    injector = setting.injector(has_commands=False)
    setting.post(pending=True)
    assert await inject(setting, injector) is None
    assert setting.reasons == ["too_many_parked"]

    setting.post(output="sunny")

    assert await inject(setting, injector) is not None
    injector.close()


async def test_a_wait_ends_when_nobody_wants_the_rest(setting: Setting) -> None:
    injector = setting.injector(has_commands=False)
    setting.post(pending=True)
    injecting = asyncio.create_task(inject(setting, injector))
    await asyncio.sleep(0)

    injector.end_soon()

    assert await injecting is None
    assert (setting.reasons, setting.engine.num_released) == (["ended"], 1)
    injector.close()


@pytest.mark.parametrize("outcome", ["injected", "parked"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_response_that_nobody_wants_ends_with_its_turn_also_where_the_engine_has_gone_on(
    setting: Setting, outcome: Literal["injected", "parked"], *, is_late: bool
) -> None:
    injector = setting.injector()
    setting.post(output="sunny")
    await injector.sync()
    setting.engine.outcome, setting.engine.keys = outcome, (KEY,)
    if is_late:
        setting.engine.when_ended = injector.end_soon
    else:
        injector.end_soon()

    assert await inject(setting, injector) is None

    assert (setting.reasons, setting.engine.num_released, list(setting.cached.injected)) == (["ended"], 1, [])
    assert setting.engine.went_on == []
    injector.close()


async def test_a_turn_that_is_resumed_when_nobody_wants_it_any_more_is_ended(setting: Setting) -> None:
    injector = setting.injector(has_commands=False)
    setting.post(output="sunny")
    resume = setting.engine.resume

    async def resumes(*arguments: Any) -> bool:
        injector.end_soon()
        return await resume(*arguments)

    setting.engine.resume = resumes  # type: ignore[method-assign]

    assert await inject(setting, injector) is None
    assert (setting.reasons, setting.engine.num_released, len(setting.engine.went_on)) == (["ended"], 1, 1)
    injector.close()


async def test_a_sequence_that_was_evicted_does_not_go_on(setting: Setting) -> None:
    setting.engine.resumes = False
    injector = setting.injector(has_commands=False)
    setting.post(output="sunny")

    assert await inject(setting, injector) is None
    assert (setting.reasons, setting.engine.num_released) == (["no_room"], 1)
    injector.close()


async def test_an_engine_that_does_not_answer_is_noted(setting: Setting) -> None:
    async def fails(command: str, *arguments: Any) -> Any:
        raise ConnectionError

    setting.engine.call = fails  # type: ignore[method-assign]
    setting.post(output="sunny")
    injector = setting.injector()
    for _ in range(20):
        await asyncio.sleep(0)

    assert list(setting.cached.refused) == [{"turn": 1, "reason": "engine_error", "detail": "ConnectionError"}]
    injector.close()


async def test_the_engine_is_asked_why_it_did_not_go_on_only_if_it_was_told_something(setting: Setting) -> None:
    injector = setting.injector()
    await injector.note_unexplained_finish()
    assert setting.engine.commands == []
    setting.post(output="sunny")
    await injector.sync()
    records = [
        {"turn": 1, "outcome": "injected", "keys": [KEY], "reason": ""},
        {"turn": 2, "outcome": "finished", "keys": [OTHER], "reason": "max_model_len"},
        {"turn": 3, "outcome": "finished", "keys": [], "reason": "no_calls"},
    ]

    async def turns(command: str, response_id: str) -> Any:
        return records

    setting.engine.call = turns  # type: ignore[method-assign, assignment]
    injector.close()
    await injector.note_unexplained_finish()

    assert list(setting.cached.refused) == [{"turn": 2, "reason": "max_model_len"}]


async def test_a_post_after_the_turns_end_is_told_that_it_came_late(setting: Setting) -> None:
    """The engine looks for no calls before anything has been posted, so that its record has none."""
    injector = setting.injector()
    setting.post(output="sunny")
    await injector.sync()

    async def turns(command: str, response_id: str) -> Any:
        return [{"turn": 1, "outcome": "finished", "keys": [], "reason": "nothing_cached"}]

    setting.engine.call = turns  # type: ignore[method-assign, assignment]
    injector.close()
    await injector.note_unexplained_finish()

    assert setting.reasons == ["nothing_cached"]


async def test_an_end_that_the_engine_does_not_know_is_noted(setting: Setting) -> None:
    async def unknown(turn: int) -> EndedTurn:
        return EndedTurn("finished")

    injector = setting.injector()
    setting.engine.turn_end = unknown  # type: ignore[method-assign]

    assert await inject(setting, injector) is None
    assert setting.reasons == ["unknown_to_the_engine"]
    injector.close()


async def test_an_entry_that_expires_is_dropped_and_expected_no_longer(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    loop = asyncio.get_running_loop()

    def call_later(delay_s: float, callback: Callable[[], None]) -> asyncio.Handle:
        timers.append((delay_s, callback))
        return asyncio.Handle(callback, (), loop)

    injector = setting.injector()
    setting.post(output="sunny", keep_alive=5)
    monkeypatch.setattr(loop, "call_later", call_later)
    await injector.sync()
    ((delay_s, expire),) = timers
    assert 5 < delay_s < 6

    setting.now_s = delay_s
    expire()
    await injector.sync()

    assert setting.engine.of("expect") == [["chatcmpl-a", [KEY], None], ["chatcmpl-a", [], None]]
    assert (setting.cached.entries, setting.cache.num_bytes) == ({}, 0)
    injector.close()


async def test_after_the_end_nothing_is_left(setting: Setting) -> None:
    injector = setting.injector()
    setting.post(output="sunny", keep_alive=30)
    await injector.sync()

    injector.close()

    assert (len(setting.cache), setting.cache.num_bytes, setting.cached.state) == (0, 0, "finished")
    assert setting.cached.on_change is None


@pytest.mark.parametrize("has_gone_on", [False, True])
async def test_an_output_that_comes_after_the_first_has_expired_is_planned_if_the_engine_has_not_gone_on(
    setting: Setting, *, has_gone_on: bool
) -> None:
    injector = setting.injector()
    setting.post(output="old", keep_alive=5)
    await injector.sync()
    setting.now_s = 6
    setting.post(output="new")
    if has_gone_on:
        setting.engine.records = [{"turn": 1, "outcome": "injected", "keys": [KEY], "reason": ""}]

    await injector.sync()

    assert setting.engine.of("expect")[1] == ["chatcmpl-a", [], None]
    assert setting.engine.of("expect")[2] == ["chatcmpl-a", [KEY], None]
    assert len(setting.engine.of("plan")) == (1 if has_gone_on else 2)
    setting.engine.outcome, setting.engine.keys = "injected", (KEY,)
    assert (await inject(setting, injector)).injected[0].output == ("old" if has_gone_on else "new")
    injector.close()


async def test_outputs_that_come_and_go_leave_no_plans(setting: Setting) -> None:
    made = call_key("f", {"x": 48})
    setting.engine.records = [{"turn": 1, "outcome": "finished", "keys": [made], "reason": "not_cached"}]
    planner = setting.planner()
    for number in range(50):
        setting.post(params={"x": number}, output="<|im_end|>" if number % 2 else "sunny", keep_alive=5)
        await planner.sync()
        setting.now_s += 6
    await planner.sync()

    kept = [number for number in range(50) if planner.planned(1, call_key("f", {"x": number})) is not None]
    assert kept == [48], "the engine may have gone on from this one alone"
    planner.begin_turn(TurnStart(2, USER, PROMPT))
    assert planner.planned(1, made) is None
    planner.close()


async def test_a_turn_that_begins_drops_what_was_posted_for_those_before(setting: Setting) -> None:
    injector = setting.injector()
    setting.post(output="first", turn=1)
    setting.post("g", {}, output="any")
    await injector.sync()

    injector.begin_turn(TurnStart(2, USER, PROMPT))
    await injector.sync()

    assert [entry.name for entry in setting.cached.entries.values()] == ["g"]
    assert setting.engine.of("expect") == [["chatcmpl-a", [KEY], 1], ["chatcmpl-a", [OTHER], None]]
    assert [plan["turn"] for _, plan in setting.engine.of("plan")] == [1, 1, 2]
    injector.close()


async def test_what_is_rendered_for_a_turn_that_has_ended_is_not_planned(setting: Setting) -> None:
    injector = setting.injector()
    setting.post(output="sunny")
    syncing = asyncio.create_task(injector.sync())
    await asyncio.sleep(0)

    injector.begin_turn(TurnStart(2, USER, PROMPT))
    await syncing
    await injector.sync()

    assert [plan["turn"] for _, plan in setting.engine.of("plan")] == [2]
    injector.close()
