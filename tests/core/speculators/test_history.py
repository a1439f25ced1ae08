from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectool_core import HistorySpeculator, Prediction, Prompt, Speculation
from spectool_core.calls import ToolCall
from spectool_core.errors import ConfigurationError
from spectool_core.speculators import Speculator
from tests.core.fakes import search, start, toolbox_of

Message = Mapping[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def asks(tool: str, /, **arguments: Any) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{tool}_{function['arguments']}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def returns(output: Any) -> Message:
    return {"role": "tool", "content": output if isinstance(output, str) else json.dumps(output)}


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


TOOLS = tools("find_user", "get_order", "list_orders", "search", "cancel_order", "weather", "status")


async def asked(speculator: Speculator, prompt: Prompt | Sequence[Any], offered: Any = TOOLS) -> list[Prediction]:
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(list(prompt))
    found = [guess async for guess in speculator.predict(prompt, offered)]
    assert all(isinstance(guess, Prediction) for guess in found)
    return found  # type: ignore[return-value]


async def best(speculator: Speculator, messages: Sequence[Any]) -> tuple[str, Mapping[str, Any]] | None:
    found = await asked(speculator, messages)
    return (found[0].name, found[0].arguments) if found else None


def taught(*conversations: Sequence[Message], times: int = 1, **options: Any) -> HistorySpeculator:
    speculator = HistorySpeculator(**options)
    for _ in range(times):
        for conversation in conversations:
            speculator.learn(conversation)
    return speculator


# Where arguments come from


async def test_a_constant() -> None:
    speculator = taught(*[[user(f"Hello, {n}"), asks("status", scope="all")] for n in "abcdef"])
    assert await best(speculator, [user("Hello, you")]) == ("status", {"scope": "all"})


async def test_a_tool_without_arguments() -> None:
    speculator = taught(*[[user(f"Hello, {n}"), asks("status")] for n in "abcdef"])
    assert await best(speculator, [user("Hello, you")]) == ("status", {})


async def test_a_word_of_the_user_by_its_shape() -> None:
    names = ("mia_li_3668", "omar_davis_3817", "yara_garcia_1905", "lucas_brown_4047")
    speculator = taught(*[[user(f"I am {name}, hello there"), asks("find_user", id=name)] for name in names])
    assert await best(speculator, [user("Hello, it is ivan_rossi_8555 again.")]) == (
        "find_user",
        {"id": "ivan_rossi_8555"},
    )


async def test_codes_of_one_length_are_one_shape() -> None:
    speculator = taught(*[[user(f"My order is {code}."), asks("get_order", id=code)] for code in ("NO6JO3", "AIXC49")])
    assert await best(taught_again(speculator), [user("Look at WUNAFK!")]) == ("get_order", {"id": "WUNAFK"})


def taught_again(speculator: HistorySpeculator) -> HistorySpeculator:
    for code in ("HKEG34", "JG7FMM", "EUJUY6"):
        speculator.learn([user(f"My order is {code}."), asks("get_order", id=code)])
    return speculator


async def test_a_number_of_the_user() -> None:
    speculator = taught(*[[user(f"Show me order {n}"), asks("get_order", id=n)] for n in (17, 4711, 23, 99)])
    assert await best(speculator, [user("Now order 52, please")]) == ("get_order", {"id": 52})


async def test_a_date_of_the_user_as_iso_date() -> None:
    system = {"role": "system", "content": "The current time is 2024-05-15 15:00:00."}
    dates = {"May 20th": "2024-05-20", "June 3": "2024-06-03", "1 July": "2024-07-01", "May 2, 2025": "2025-05-02"}
    speculator = taught(*[[system, user(f"On {text}"), asks("weather", date=iso)] for text, iso in dates.items()])
    assert await best(speculator, [system, user("What about Dec. 24?")]) == ("weather", {"date": "2024-12-24"})


async def test_a_field_of_an_output() -> None:
    def conversation(n: int) -> list[Message]:
        return [
            user("Hello"),
            asks("find_user", id=n),
            returns({"name": "x", "address": {"city": f"City-{n}", "zip": n + 100}}),
            asks("weather", city=f"City-{n}"),
        ]

    speculator = taught(*map(conversation, range(5)))
    assert await best(speculator, conversation(77)[:3]) == ("weather", {"city": "City-77"})


async def test_the_next_element_of_a_list_that_was_not_used() -> None:
    def conversation(*ids: str) -> list[Message]:
        orders = [message for code in ids for message in (asks("get_order", id=code), returns({"order": code}))]
        return [user("Hello"), asks("list_orders"), returns({"orders": ids}), *orders, says("That is all.")]

    lists = (("A1B2", "C3D4", "E5F6"), ("G7H8", "I9J0"), ("K1L2", "M3N4", "O5P6"), ("A7B8", "C9D0", "E1F2", "G3H4"))
    speculator = taught(*[conversation(*ids) for ids in lists], times=2)
    new = conversation("Q1R2", "S3T4", "U5V6")
    assert await best(speculator, new[:3]) == ("get_order", {"id": "Q1R2"})
    assert await best(speculator, new[:5]) == ("get_order", {"id": "S3T4"})
    assert await best(speculator, new[:7]) == ("get_order", {"id": "U5V6"})


async def test_several_arguments_of_one_object() -> None:
    def conversation(*routes: tuple[str, str]) -> list[Message]:
        flights = [{"origin": origin, "destination": destination, "price": 7} for origin, destination in routes]
        searched = [
            message
            for origin, destination in routes
            for message in (asks("search", origin=origin, destination=destination), returns([]))
        ]
        return [user("Hello"), asks("list_orders"), returns({"flights": flights}), *searched]

    speculator = taught(
        conversation(("JFK", "SEA"), ("SEA", "JFK")), conversation(("MCO", "BOS"), ("BOS", "CLT")), times=2
    )
    new = conversation(("DEN", "PHL"), ("PHL", "DEN"), ("DEN", "MIA"))
    assert await best(speculator, new[:3]) == ("search", {"origin": "DEN", "destination": "PHL"})
    assert await best(speculator, new[:5]) == ("search", {"origin": "PHL", "destination": "DEN"})


async def test_a_key_of_a_mapping() -> None:
    def conversation(n: int) -> list[Message]:
        cards = {f"card_{n}": {"brand": "visa"}, f"card_{n + 1}": {"brand": "visa"}}
        return [user("Hello"), asks("find_user", id=n), returns({"cards": cards}), asks("status", card=f"card_{n}")]

    speculator = taught(*map(conversation, range(10, 60, 10)))
    assert await best(speculator, conversation(700)[:3]) == ("status", {"card": "card_700"})


async def test_an_argument_of_an_earlier_call() -> None:
    def conversation(word: str) -> list[Message]:
        return [user("Hello"), asks("search", query=word), returns("done"), asks("weather", place=word)]

    speculator = taught(*map(conversation, ("paris", "oslo", "rome", "bonn")))
    assert await best(speculator, conversation("kyiv")[:3]) == ("weather", {"place": "kyiv"})


async def test_a_word_of_the_models_own_text() -> None:
    def conversation(code: str) -> list[Message]:
        return [user("Hello"), says(f"Shall I cancel {code}?"), user("yes, please"), asks("cancel_order", id=code)]

    speculator = taught(*map(conversation, ("AB12", "CD34", "EF56", "GH78")))
    assert await best(speculator, conversation("XY99")[:3]) == ("cancel_order", {"id": "XY99"})


async def test_a_word_of_an_output_that_is_no_json() -> None:
    def conversation(code: str) -> list[Message]:
        return [user("Hello"), asks("search"), returns(f"The best is {code} (5 stars)"), asks("get_order", id=code)]

    speculator = taught(*map(conversation, ("AB12", "CD34", "EF56", "GH78")))
    assert await best(speculator, conversation("XY99")[:3]) == ("get_order", {"id": "XY99"})


async def test_a_read_is_repeated_after_a_write() -> None:
    def conversation(code: str) -> list[Message]:
        read = asks("get_order", id=code)
        return [user(f"Cancel {code}"), read, returns("open"), asks("cancel_order", id=code), returns("done"), read]

    speculator = taught(*map(conversation, ("AB12", "CD34", "EF56", "GH78")))
    assert await best(speculator, conversation("XY99")[:5]) == ("get_order", {"id": "XY99"})


async def test_calls_that_are_read_from_text() -> None:
    def read_text(text: str) -> list[ToolCall]:
        return [ToolCall("get_order", {"id": text.removeprefix("Action: ")})] if text.startswith("Action") else []

    speculator = HistorySpeculator()
    for number, code in enumerate(("AB12", "CD34", "EF56", "GH78")):
        messages = [user(f"Order {code}, {number}"), says(f"Action: {code}"), user("Observation: open")]
        prompt = Prompt(messages, read_text=read_text)
        await asked(speculator, prompt)
    prompt = Prompt([user("Order XY99")], read_text=read_text)
    assert [(guess.name, guess.arguments) async for guess in speculator.predict(prompt, TOOLS)][:1] == [
        ("get_order", {"id": "XY99"})
    ]


# Probability


async def test_it_is_that_of_the_very_next_answer() -> None:
    speculator = HistorySpeculator()
    for n in range(60):
        answer = asks("status", scope="all") if n % 3 == 0 else says("Fine.")
        speculator.learn([user(f"Hello, {n}th"), answer])
    (guess,) = await asked(speculator, [user("Hello, you")])
    assert guess.probability == pytest.approx(1 / 3, abs=0.15)


async def test_what_always_follows_becomes_nearly_certain() -> None:
    speculator = taught(*[[user(f"Hello, {n}th"), asks("status", scope="all")] for n in range(60)])
    (guess,) = await asked(speculator, [user("Hello, you")])
    assert guess.probability > 0.9


async def test_the_most_probable_comes_first_and_the_improbable_not_at_all() -> None:
    conversations = [[user(f"Hello, {n}th"), asks("status", scope="all" if n % 3 else "one")] for n in range(60)]
    speculator = taught(*conversations)
    found = await asked(speculator, [user("Hello, you")])
    assert [guess.arguments["scope"] for guess in found] == ["all", "one"]
    assert found[0].probability > found[1].probability
    picky = taught(*conversations, min_probability=0.5)
    assert [guess.arguments["scope"] for guess in await asked(picky, [user("Hello, you")])] == ["all"]
    single = taught(*conversations, max_predictions=1)
    assert [guess.arguments["scope"] for guess in await asked(single, [user("Hello, you")])] == ["all"]


async def test_habits_change() -> None:
    speculator = taught(*[[user(f"Hello, {n}th"), asks("status", scope="old")] for n in range(100)])
    for n in range(100):
        speculator.learn([user(f"Hi, {n}th"), asks("status", scope="new")])
    assert await best(speculator, [user("Hello, you")]) == ("status", {"scope": "new"})


async def test_only_what_is_offered_is_predicted() -> None:
    speculator = taught(*[[user(f"Hello, {n}"), asks("status", scope="all")] for n in "abcdef"])
    assert await asked(speculator, [user("Hello, you")], tools("search")) == []
    assert await asked(speculator, [user("Hello, you")], []) == []


async def test_nothing_is_predicted_before_anything_was_learned() -> None:
    assert await asked(HistorySpeculator(), [user("Hello")]) == []


async def test_tools_that_may_not_be_run_early_are_left_out() -> None:
    conversations = [
        [user(f"Order AB{n}"), asks("get_order", id=f"AB{n}"), returns("open"), asks("cancel_order", id=f"AB{n}")]
        for n in range(10, 18)
    ]
    speculator = taught(*conversations, tools=["get_order"])
    assert await best(speculator, [user("Order XY99")]) == ("get_order", {"id": "XY99"})
    assert {guess.name for guess in await asked(speculator, conversations[0][:3])} <= {"get_order"}


async def test_what_else_the_user_has_said_decides_between_tools() -> None:
    conversations = [
        messages
        for n in range(10, 30)
        for messages in (
            [user(f"I am mia_li_{n}"), asks("find_user", id=f"mia_li_{n}")],
            [user(f"I am mia_li_{n}, about AB{n}CD"), asks("get_order", id=f"AB{n}CD")],
        )
    ]
    speculator = taught(*conversations)
    assert await best(speculator, [user("I am omar_lee_7")]) == ("find_user", {"id": "omar_lee_7"})
    assert await best(speculator, [user("I am omar_lee_7, about XY99ZZ")]) == ("get_order", {"id": "XY99ZZ"})


async def test_a_conversation_that_is_new_and_long_costs_no_more_than_its_end() -> None:
    messages = [message for n in range(30) for message in (asks("get_order", id=n), returns({"n": n}))]
    speculator = HistorySpeculator()
    await asked(speculator, [user("Hello"), *messages])
    assert speculator.statistics().num_calls == 4


# Learning from prompts


async def test_each_answer_is_learned_once_when_the_next_prompt_arrives() -> None:
    messages = [
        user("Hello AB12"),
        asks("get_order", id="AB12"),
        returns("open"),
        says("It is open."),
        user("Thanks"),
        says("Bye"),
        user("Bye"),
    ]
    speculator = HistorySpeculator()
    for length in (1, 3, 5, 7):
        await asked(speculator, messages[:length])
    assert (speculator.statistics().num_answers, speculator.statistics().num_calls) == (3, 1)
    for length in (7, 5, 3, 7):
        await asked(speculator, messages[:length])
    assert speculator.statistics().num_calls <= 2


async def test_a_trimmed_history_is_not_learned_again() -> None:
    messages: list[Message] = [user("Hello")]
    speculator = HistorySpeculator()
    for n in range(12):
        messages += [asks("get_order", id=n), returns({"n": n})]
        await asked(speculator, messages[-9:])
    assert speculator.statistics().num_calls == 12


async def test_an_output_that_is_cleared_later_is_not_learned_again() -> None:
    messages: list[Message] = [user("Hello")]
    speculator = HistorySpeculator()
    for n in range(12):
        messages += [asks("get_order", id=n), {**returns({"n": n}), "tool_call_id": f"call_{n}"}]
        await asked(speculator, messages)
        messages[-1] = {**messages[-1], "content": "[cleared]"}
    assert speculator.statistics().num_calls == 12


async def test_a_changing_system_message_changes_nothing() -> None:
    messages: list[Message] = [user("Hello")]
    speculator = HistorySpeculator()
    for n in range(12):
        messages += [asks("get_order", id=n), returns({"n": n})]
        await asked(speculator, [{"role": "system", "content": f"It is {n} o'clock"}, *messages])
    assert speculator.statistics().num_calls == 12
    assert speculator.statistics().num_conversations == 1


async def test_the_same_conversation_held_again_is_new_evidence() -> None:
    messages = [user("The daily report"), asks("status", scope="all"), returns("fine")]
    speculator = HistorySpeculator()
    for _ in range(10):
        await asked(speculator, messages[:1])
        await asked(speculator, messages)
    assert speculator.statistics().num_calls == 10


async def test_a_prompt_that_nothing_followed_was_answered_in_text() -> None:
    speculator = HistorySpeculator(max_conversations=2)
    for n in range(10):
        await asked(speculator, [user(f"Hello {n}")])
    assert (speculator.statistics().num_answers, speculator.statistics().num_conversations) == (8, 2)


async def test_learning_a_followed_conversation_adds_its_end_alone() -> None:
    messages = [user("Hello"), asks("status"), returns("fine"), says("Fine.")]
    speculator = HistorySpeculator()
    await asked(speculator, messages[:1])
    await asked(speculator, messages[:3])
    speculator.learn(messages)
    assert speculator.statistics().num_answers == 2


async def test_it_learns_as_it_is_used() -> None:
    speculator = HistorySpeculator()
    for n in range(8):
        await asked(speculator, [user(f"Show AB{n}1"), asks("get_order", id=f"AB{n}1"), returns("open")])
    assert await best(speculator, [user("Show XY99")]) == ("get_order", {"id": "XY99"})


# Bounds


async def test_memory_is_bounded() -> None:
    speculator = HistorySpeculator(max_conversations=4, max_tenants=2, tenant=lambda prompt: prompt.native)
    for n in range(300):
        messages = [
            user(f"Hello {n} AB{n} x-{n}"),
            asks(f"tool_{n}", **{f"argument_{n}": n, "other": f"x-{n}"}),
            returns({f"field_{n}": {"a": [n]}}),
        ]
        prompt = Prompt(messages, native=f"tenant {n % 3 if n > 250 else 0}")
        await asked(speculator, prompt)
    held = speculator.statistics()
    assert held.num_tenants == 2
    assert held.num_conversations <= 8
    assert held.num_templates <= 2 * 128 * 64


async def test_many_ways_to_the_same_tool_are_bounded() -> None:
    speculator = HistorySpeculator()
    for n in range(100):
        speculator.learn([user("Hello"), asks("search", id=n), returns({f"f{n}x": n}), asks("get_order", id=n)])
    assert 0 < speculator.statistics().num_templates <= 128


async def test_a_huge_conversation_is_read_within_bounds() -> None:
    big = {"orders": [{"id": n, "name": f"name-{n}", "more": {"x": n}} for n in range(20_000)]}
    messages: list[Message] = [user("word " * 100_000), asks("list_orders"), returns(big)]
    started_s = time.process_time()
    await asked(HistorySpeculator(), [*messages, *[returns(big)] * 20])
    assert time.process_time() - started_s < 3


# Tenants


async def test_what_is_learned_for_one_tenant_is_used_for_no_other() -> None:
    speculator = HistorySpeculator(tenant=lambda prompt: prompt.native)
    for n in range(8):
        speculator.learn([user(f"Hello {n}"), asks("status", scope="secret")], tenant="acme")
    for tenant, num in (("acme", 1), ("other", 0), (None, 0)):
        prompt = Prompt([user("Hello")], native=tenant)
        assert len([guess async for guess in speculator.predict(prompt, TOOLS)]) == num
    assert speculator.statistics().num_tenants == 2
    speculator.forget(tenant="acme")
    assert [guess async for guess in speculator.predict(Prompt([user("Hello")], native="acme"), TOOLS)] == []


async def test_the_tenant_may_be_in_a_context_variable() -> None:
    tenant: ContextVar[str | None] = ContextVar("tenant", default=None)
    history = HistorySpeculator(tenant=lambda prompt: tenant.get())
    speculation = Speculation([history])

    async def run(name: str | None) -> None:
        tenant.set(name)
        turn = start(speculation, toolbox_of(search()), tools=TOOLS)
        await asyncio.sleep(0.01)
        turn.answer([])

    await asyncio.gather(run("acme"), run("other"), run(None))
    assert history.statistics().num_tenants == 2
    assert history.statistics().num_conversations == 2


async def test_forget() -> None:
    speculator = taught(*[[user(f"Hello, {n}"), asks("status", scope="all")] for n in "abcdef"])
    assert await asked(speculator, [user("Hello")])
    speculator.forget()
    assert await asked(speculator, [user("Hello")]) == []
    assert speculator.statistics().num_answers == 0


# Cost


def test_a_turn_of_sixty_messages_costs_less_than_two_milliseconds() -> None:
    async def costs() -> list[float]:
        speculator = HistorySpeculator()
        measured = []
        for run in range(6):
            messages: list[Message] = [user(f"Hello, I am mia_li_{run}")]
            for n in range(30):
                ids = [f"AB{run}{n}{i}" for i in range(6)]
                output = {"orders": ids, "user": {"name": f"name_{n}"}, "flights": [{"a": i, "b": n} for i in range(9)]}
                messages += [asks("get_order" if n % 2 else "search", id=ids[0], number=n), returns(output)]
                started_s = time.process_time()
                await asked(speculator, messages)
                if n >= 25:
                    measured.append(time.process_time() - started_s)
        return measured

    assert statistics.median(asyncio.run(costs())) < 0.002


def test_any_thread_and_loop_at_the_same_time() -> None:
    speculator = HistorySpeculator()
    errors: list[BaseException] = []

    async def converse(run: int) -> None:
        for n in range(15):
            code = f"AB{run}{n}"
            await asked(speculator, [user(f"Show {code}")])
            await asked(speculator, [user(f"Show {code}"), asks("get_order", id=code), returns("open")])

    def work(run: int) -> None:
        try:
            asyncio.run(converse(run))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(run,)) for run in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert speculator.statistics().num_calls == 90


# Anything goes

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.builds(pow, st.just(10), st.just(5000))
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
TEXTS = st.text(max_size=30) | st.sampled_from(
    [
        "May 20th",
        "20 \u017fep 2024",
        "٣٤ ² 12345678901234567890",
        '{"a": [1, {"b9": NaN}]}',
        "[" * 5000,
        "\ud800",
        "9" * 5000,
    ]
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "function": VALUES
        | st.fixed_dictionaries({"name": st.sampled_from(["a", "b"]), "arguments": TEXTS | VALUES})
        | st.fixed_dictionaries(
            {"name": st.sampled_from(["a", "b"]), "arguments": st.just('{"x": 1e400, "y": ["z"]}')}
        ),
    },
)
MESSAGES = (
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system", "function"]) | VALUES,
            "content": TEXTS | VALUES | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})),
            "tool_calls": VALUES | st.lists(CALLS | VALUES, max_size=3),
            "tool_call_id": VALUES,
            "name": VALUES,
        },
    )
    | VALUES
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(MESSAGES, max_size=8), max_size=4))
def test_no_history_is_too_odd(conversations: list[list[Any]]) -> None:
    async def main() -> None:
        speculator = HistorySpeculator(max_conversations=2, min_probability=0.0)
        for messages in conversations:
            for length in range(len(messages) + 1):
                await asked(speculator, messages[:length], tools("a", "b"))
            speculator.learn(messages)

    asyncio.run(main())


# Configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", 5),
        ("path", ""),
        ("path", "/nonexistent/folder/history.jsonl"),
        ("path", "/"),
        ("tenant", "acme"),
        ("max_predictions", 0),
        ("max_predictions", True),
        ("min_probability", 1.5),
        ("min_probability", float("nan")),
        ("max_conversations", 0),
        ("max_tenants", "many"),
        ("name", ""),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=field):
        HistorySpeculator(**{field: value})


def test_it_is_a_speculator_that_asks_no_model() -> None:
    speculator = HistorySpeculator()
    assert Speculation(speculators=[speculator]).speculators == (speculator,)
    assert (speculator.name, speculator.uses_model) == ("history", False)
