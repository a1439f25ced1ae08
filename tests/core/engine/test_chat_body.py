"""When two requests are one: what the engine went on from, and what the framework then sends."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.engine.chat_body import ChatBody, sent_with

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)
CALLS = st.lists(ARGUMENTS, min_size=1, max_size=3)


def asked(messages: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    given = {"model": "m", "messages": messages or [{"role": "user", "content": "go"}], "tools": TOOLS}
    return given | changes


def parsed(body: dict[str, Any]) -> ChatBody:
    found = ChatBody.parse(json.dumps(body).encode())
    assert found is not None
    return found


def answer(calls: list[dict[str, Any]], **style: Any) -> dict[str, Any]:
    made = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "search", "arguments": json.dumps(call, **style)}}
        for n, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def results(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"r{n}"} for n in range(len(calls))]


@given(CALLS)
def test_what_the_engine_went_on_from_is_what_the_framework_sends(calls: list[dict[str, Any]]) -> None:
    before = asked()
    told = [answer(calls, separators=(",", ":"), ensure_ascii=False), *results(calls)]
    sent = answer(calls)
    sent["content"] = ""
    sent["tool_calls"] = [{**call, "index": n} for n, call in enumerate(sent["tool_calls"])]
    later = parsed(asked([*before["messages"], sent, *results(calls)]))
    assert parsed(before).may_become(later)
    assert parsed(before).continued(told) == later


@given(CALLS, CALLS)
def test_calls_are_equal_as_their_json_is(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    equal = [json.dumps(call) for call in ours] == [json.dumps(call) for call in theirs]
    assert (parsed(asked([answer(ours)])) == parsed(asked([answer(theirs)]))) is equal


@given(st.data())
def test_any_change_that_the_model_sees_makes_another_request(data: st.DataObject) -> None:
    body = asked([{"role": "user", "content": "go"}, answer([{"q": 1}]), *results([{}])], temperature=0.5, stream=True)
    changed = deepcopy(body)
    target: Any = data.draw(st.sampled_from([changed, *changed["messages"], changed["tools"][0]["function"]]))
    name = data.draw(st.sampled_from(sorted(set(target) - {"messages", "tools", "tool_calls"})))
    value = data.draw(st.integers() | st.text(max_size=4))
    if name == "content" and not value and target["role"] == "assistant":
        return
    before = json.dumps(target[name])
    target[name] = value
    assert (parsed(body) == parsed(changed)) is (json.dumps(value) == before)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"max_tokens": 5}, {"max_tokens": 6}),
        ({"stream": True}, {"stream": False}),
        ({"stream_options": {"include_usage": True}}, {}),
        ({"tools": []}, {"tools": TOOLS}),
        ({"chat_template_kwargs": {"a": 1, "b": 2}}, {"chat_template_kwargs": {"b": 2, "a": 1}}),
    ],
)
def test_parameters_differ(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert parsed(asked(**ours)) != parsed(asked(**theirs))


def test_what_nobody_sees_makes_no_difference() -> None:
    unseen = {"user": "me", "metadata": {"run": "7"}, "store": False, "prompt_cache_key": "k", "seed": None}
    assert parsed(asked(**unseen)) == parsed(asked())
    bare, full = {"role": "assistant"}, {"role": "assistant", "content": "", "refusal": None, "tool_calls": []}
    assert parsed(asked([bare])) == parsed(asked([full]))


def test_a_text_and_its_one_part_are_the_same() -> None:
    part = {"type": "text", "text": "go"}
    whole = parsed(asked([{"role": "user", "content": "go"}]))
    assert parsed(asked([{"role": "user", "content": [part]}])) == whole
    for other in ([part, part], [{**part, "cache_control": {}}], [{"type": "image_url", "image_url": "x"}], []):
        assert parsed(asked([{"role": "user", "content": other}])) != whole


@pytest.mark.parametrize("other", [[], [{"role": "user", "content": "wait"}], results([{}])])
def test_an_answer_without_results_or_a_new_question_is_not_waited_for(other: list[Any]) -> None:
    question = {"role": "user", "content": "go"}
    later = [question, answer([{}]), *other] if not other or other[0]["role"] == "user" else [question, *other]
    assert not parsed(asked([question])).may_become(parsed(asked(later)))


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": []},
        {"n": 2},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "search"}}},
        {"stop": ["x"]},
        {"response_format": {"type": "json_object"}},
        {"seed": 1},
        {"seed": 0, "temperature": 0.5},
    ],
)
def test_requests_that_the_engine_leaves_alone(changes: dict[str, Any]) -> None:
    assert parsed(asked(tool_choice="auto")).can_go_on
    assert not parsed(asked(**changes)).can_go_on


def test_a_seed_decides_nothing_where_nothing_is_drawn() -> None:
    assert parsed(asked(seed=1, temperature=0.0)).can_go_on


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"messages": 1}', b'{"messages": [1]}', b"\xff"])
def test_a_body_that_is_no_chat_request(body: bytes) -> None:
    assert ChatBody.parse(body) is None


def sent(query: str = "", **headers: str) -> bytes:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return sent_with(httpx.Request("POST", f"http://host/v1/chat/completions{query}", headers=named))


def test_requests_are_alike_whatever_changes_by_itself() -> None:
    assert sent(A="1", B="2", content_length="7", X_Stainless_Retry_Count="1") == sent(
        b="2", a="1", traceparent="00-1", idempotency_key="k", X_Request_Id="mine"
    )


@pytest.mark.parametrize("other", [{"authorization": "b"}, {"query": "?tenant=b"}, {"x_audit": "turn-2"}])
def test_credentials_headers_and_query_are_part_of_what_is_asked(other: dict[str, str]) -> None:
    calls: list[dict[str, Any]] = [{}]
    before, alike, later = (
        ChatBody.parse(json.dumps(body).encode(), sent(**{"authorization": "a", **changed}))
        for body, changed in [
            (asked(), {}),
            (asked([*asked()["messages"], answer(calls), *results(calls)]), {}),
            (asked([*asked()["messages"], answer(calls), *results(calls)]), other),
        ]
    )
    assert before is not None
    assert alike is not None
    assert later is not None
    assert before.may_become(alike)
    assert not before.may_become(later)
    assert before.continued([answer(calls), *results(calls)]) == alike != later
