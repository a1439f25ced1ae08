"""Which answer a script gives, how often a speculator is right, and when each piece of an answer is due."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.errors import ConfigurationError
from spectool_core.testing import (
    Answer,
    ChatRequest,
    Flaky,
    HttpError,
    Quirks,
    ScriptedCall,
    ScriptedModel,
    ScriptEndedError,
)
from spectool_core.testing.timeline import Timeline, num_tokens_of

SEARCH = Answer(tool_calls=[ScriptedCall("search", {"query": "tides", "limit": 3})])


def request_of(task: str = "which?", *, turn: int = 0, **fields) -> ChatRequest:
    history = [{"role": "user", "content": task}, *[{"role": "assistant", "content": "..."}] * turn]
    return ChatRequest(model="main", messages=history, **fields)


def test_task_is_the_first_user_message_whatever_its_form():
    parts = [{"type": "text", "text": "whi"}, {"type": "image_url"}, {"type": "text", "text": "ch?"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "user", "content": "x"},
    ]
    assert ChatRequest("main", messages).task == "which?"
    assert ChatRequest("main", []).task == ""


@pytest.mark.parametrize(
    "script",
    [SEARCH, [SEARCH], {"which?": SEARCH}, {"which?": [SEARCH]}, lambda request: SEARCH],
    ids=["answer", "turns", "tasks", "turns by task", "function"],
)
def test_every_form_of_script_answers(script):
    assert ScriptedModel(script).answers(request_of()) == [SEARCH]


@pytest.mark.parametrize("script", [[SEARCH], {"which?": [SEARCH]}, {"other": SEARCH}])
def test_script_says_where_it_ends(script):
    with pytest.raises(ScriptEndedError):
        ScriptedModel(script).answers(request_of(turn=1))


def test_flaky_fails_as_often_as_told():
    script = Flaky(SEARCH, HttpError(429), num_times=2)
    faults = [ScriptedModel(script).answers(request_of())[0].fault for _ in range(3)]
    assert faults == [HttpError(429), HttpError(429), None]


@given(st.integers(0, 5), st.text(), st.integers(0, 9), st.integers(1, 4))
def test_draws_repeat_exactly_and_each_choice_has_its_own(seed, task, turn, n):
    model = ScriptedModel(SEARCH, acceptance_rate=0.5, seed=seed)
    request = request_of(task, turn=turn, n=n)
    answers = model.answers(request)

    assert answers == ScriptedModel(SEARCH, acceptance_rate=0.5, seed=seed).answers(request)
    # The draw of a choice does not depend on how many are asked for.
    assert answers[0] == model.answers(request_of(task, turn=turn, n=1))[0]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_share_of_right_answers_is_the_acceptance_rate(rate):
    model = ScriptedModel(SEARCH, acceptance_rate=rate)
    answers = [model.answers(request_of(f"task {number}", n=2)) for number in range(1000)]
    for choice in range(2):
        share = statistics.mean(both[choice].tool_calls == SEARCH.tool_calls for both in answers)
        # Draws are fixed by the seed; 5 standard deviations hold for almost every seed.
        assert abs(share - rate) <= 5 * (rate * (1 - rate) / 1000) ** 0.5


def test_request_seed_gives_samples_of_their_own():
    model = ScriptedModel(SEARCH, acceptance_rate=0.5)
    accepted = {model.accepts(request_of(body={"seed": seed})) for seed in range(20)}
    assert accepted == {True, False}


def test_wrong_answers_keep_names_and_types_and_differ_between_choices():
    wrong = ScriptedModel(SEARCH, acceptance_rate=0.0).answers(request_of(n=2))
    arguments = [answer.tool_calls[0].arguments for answer in wrong]
    assert [answer.tool_calls[0].name for answer in wrong] == ["search", "search"]
    assert arguments[0] != arguments[1]
    assert all(isinstance(each["query"], str) and each["limit"] == 3 and each["query"] != "tides" for each in arguments)


def test_speculator_plays_at_its_own_pace_and_without_the_main_models_faults():
    main = Answer("a", SEARCH.tool_calls, generation_s=9.0, reasoning_tokens=50, fault=HttpError(500))
    played = ScriptedModel(main, acceptance_rate=1.0).answers(request_of())[0]
    assert played == Answer("a", SEARCH.tool_calls)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (lambda: ScriptedModel(SEARCH, generation_s=-1), "generation_s"),
        (lambda: ScriptedModel(SEARCH, seconds_per_token=-0.1), "seconds_per_token"),
        (lambda: ScriptedModel(SEARCH, generation_s=1, seconds_per_token=0.1), "seconds_per_token"),
        (lambda: ScriptedModel(SEARCH, acceptance_rate=1.1), "acceptance_rate"),
        (lambda: ScriptedModel(SEARCH, max_num_deltas=0), "max_num_deltas"),
        (lambda: ScriptedModel(7), "script"),
        (lambda: Answer(reasoning_tokens=-1), "reasoning_tokens"),
    ],
)
def test_bad_values_are_refused_by_name(model, field):
    with pytest.raises(ConfigurationError, match=field):
        model()


def test_time_is_first_token_plus_tokens():
    model = ScriptedModel(SEARCH, time_to_first_token_s=0.5, seconds_per_token=0.01, reasoning_tokens=100)
    answer = Answer("x" * 40, SEARCH.tool_calls)
    timeline = Timeline(answer, model, "digest")

    call = SEARCH.tool_calls[0]
    num_tokens = 100 + 10 + num_tokens_of(call.name) + num_tokens_of(call.text)
    assert timeline.num_completion_tokens == num_tokens
    assert timeline.generation_s == pytest.approx(0.5 + 0.01 * num_tokens, abs=1e-12)
    assert timeline.num_tokens_at(0.5) == 0
    assert timeline.num_tokens_at(timeline.generation_s) == num_tokens


def test_answer_overrides_its_models_pace():
    model = ScriptedModel(SEARCH, generation_s=2.0)
    assert Timeline(Answer("x" * 40), model, "").generation_s == 2.0
    assert Timeline(Answer("x" * 40, generation_s=3.0), model, "").generation_s == 3.0
    assert Timeline(Answer("x" * 40, seconds_per_token=0.5), model, "").generation_s == 5.0


CALLS = st.lists(
    st.builds(
        ScriptedCall,
        st.sampled_from(["a", "search"]),
        st.one_of(
            st.dictionaries(st.text(max_size=5), st.text(max_size=50), max_size=3),
            st.text(max_size=50),
            st.lists(st.text(max_size=9), max_size=4).map(tuple),
        ),
    ),
    max_size=3,
)
QUIRKS = st.builds(Quirks, call_deltas=st.sampled_from(["separate", "merged", "whole"]))


@given(
    st.builds(Answer, st.text(max_size=200), CALLS, st.none() | st.integers(0, 90), st.none() | st.integers(0, 300)),
    st.floats(0, 10),
    st.floats(0, 10),
    QUIRKS,
)
def test_deltas_join_to_the_message_in_order_of_time_and_end_on_time(answer, first_token_s, generation_s, quirks):
    model = ScriptedModel(
        answer, time_to_first_token_s=first_token_s, generation_s=generation_s, quirks=quirks, max_num_deltas=8
    )
    timeline = Timeline(answer, model, "digest")
    deltas, message = timeline.deltas(), timeline.message()

    due = [delta.due_s for delta in deltas]
    assert due == sorted(due)
    assert due[0] == min(first_token_s, generation_s)
    assert due[-1] == generation_s or len(deltas) == 1
    contents = [delta.content for delta in deltas]
    assert "".join(content.get("content", "") for content in contents) == (message["content"] or "")
    assert "".join(c.get("reasoning_content", "") for c in contents) == message.get("reasoning_content", "")
    arguments = [""] * len(answer.tool_calls)
    for call in (call for content in contents for call in content.get("tool_calls", ())):
        arguments[call["index"]] += call["function"]["arguments"]
    assert arguments == [call.text for call in answer.tool_calls]
    assert [d.completes_call for d in deltas if d.completes_call is not None] == list(range(len(answer.tool_calls)))


def test_deltas_are_bounded_however_long_the_answer():
    answer = Answer("word " * 10_000, [ScriptedCall("write", {"text": "word " * 10_000})], reasoning_tokens=10_000)
    assert len(Timeline(answer, ScriptedModel(answer, max_num_deltas=16), "").deltas()) <= 16 + 3


def test_arguments_keep_their_digits_and_letters():
    call = ScriptedCall("f", {"n": 9223372036854775807, "text": "größe"})
    assert json.loads(call.text) == call.arguments
    assert "größe" in call.text
