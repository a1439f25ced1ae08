"""Tool-call formats on text; on the models' own tokenizers they are tested where vLLM is (tests/engine)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.errors import ConfigurationError
from spectool_core.vllm.formats import FORMATS, Harmony, Hermes, Llama3Json, Mistral, XLam, tool_format

ARGUMENTS = {"city": "São Paulo", "days": 3, "exact": True, "near": [1.5, None], "in": {"unit": "C"}}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
HEADER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"

SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'

ONE_CALL = [
    (Hermes, f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>'),
    (Hermes, f'I look.\n<tool_call>{{"name": "weather", "arguments": {WRITTEN}}}</tool_call>\n'),
    (Hermes, f'<think>hm</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>'),
    (Llama3Json, f'{{"name": "weather", "parameters": {WRITTEN}}}'),
    (Llama3Json, f'<|python_tag|>{{"name": "weather", "arguments": {WRITTEN}}}'),
    (Llama3Json, f'{{"type": "function", "name": "weather", "parameters": {WRITTEN}}}'),
    (Mistral, f"[TOOL_CALLS]weather[ARGS]{WRITTEN}"),
    (Mistral, f"I look.[TOOL_CALLS]weather{WRITTEN}"),
    (Mistral, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WRITTEN}}}]'),
    (Mistral, f'[TOOL_CALLS][{{"name": "weather", "arguments": {WRITTEN}, "id": "abcdefghi"}}]'),
    (XLam, f'[{{"name": "weather", "arguments": {WRITTEN}}}]'),
    (XLam, f'<think>hm</think>\n[{{"name": "weather", "arguments": {WRITTEN}}}]'),
    (Harmony, f"{HEADER}{WRITTEN}"),
    (Harmony, f" to=functions.weather<|channel|>commentary json<|message|>{WRITTEN}"),
    (Harmony, f"<|channel|>analysis<|message|>Look < it up.<|end|><|start|>assistant{HEADER}{WRITTEN}"),
]

TWO_CALLS = [
    (
        Hermes,
        f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>\n{SECOND}',
    ),
    (Mistral, f"[TOOL_CALLS]weather[ARGS]{WRITTEN}[TOOL_CALLS]time[ARGS]{{}}"),
    (Mistral, f'[TOOL_CALLS][{{"name": "weather", "arguments": {WRITTEN}}}, {{"name": "time", "arguments": {{}}}}]'),
    (XLam, f'[{{"name": "weather", "arguments": {WRITTEN}}}, {{"name": "time", "arguments": {{}}}}]'),
]

NO_CALL = [
    (Hermes, "Sunny."),
    (Hermes, '<tool_call>\n{"name": "weather", "arguments": {}}\n'),
    (Hermes, '<tool_call>{"name": "weather"}</tool_call>'),
    (Hermes, '<tool_call>{"arguments": {}, "name": "weather"}</tool_call>'),
    (Hermes, '<tool_call>{"name": "weather", "arguments": {}, "id": 1}</tool_call>'),
    (Hermes, '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>'),
    (Hermes, '<tool_call>{"name": "we\\u0061ther", "arguments": {}}</tool_call>'),
    (Hermes, '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>'),
    (Hermes, '<tool_call>{"name": "weather", "arguments": {}}</tool_call> and then'),
    (Hermes, '<think><tool_call>{"name": "weather", "arguments": {}}</tool_call></think>Sunny.'),
    (Hermes, '<think><tool_call>{"name": "weather", "arguments": {}}</tool_call>'),
    (Hermes, '<tool_call>[{"name": "weather", "arguments": {}}]</tool_call>'),
    (Llama3Json, "Sunny."),
    (Llama3Json, 'So: {"name": "weather", "parameters": {}}'),
    (Llama3Json, '{"name": "weather", "parameters": {}}; {"name": "time", "parameters": {}}'),
    (Llama3Json, '{"name": "weather", "parameters": {}, "arguments": {}}'),
    (Llama3Json, '{"name": "weather", "parameters": []}'),
    (Llama3Json, '{"city": "Rome"}'),
    (Llama3Json, '{"name": "weather", "parameters": {'),
    (Mistral, "Sunny."),
    (Mistral, "[TOOL_CALLS]weather"),
    (Mistral, "[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{}"),
    (Mistral, "[TOOL_CALLS]weather[ARGS]{} Sunny."),
    (Mistral, "[TOOL_CALLS][]"),
    (Mistral, '[TOOL_CALLS][{"name": "weather"}]'),
    (Mistral, "[THINK]so [TOOL_CALLS]weather[ARGS]{}"),
    (Mistral, '[TOOL_CALLS]weather[ARGS]{"x": "[TOOL_CALLS]'),
    (XLam, "Sunny."),
    (XLam, "[]"),
    (XLam, "[1, 2]"),
    (XLam, '[{"name": "weather", "arguments": {"a": {"b": {"c": 1}}}}]'),
    (XLam, '[{"name": "weather", "arguments": {"a": "}"}}]'),
    (XLam, '[{"name": "weather", "arguments": {}}, {"name": "time"}]'),
    (XLam, '[{"name": "weather", "arguments": {}}] done'),
    (Harmony, "<|channel|>final<|message|>Sunny."),
    (Harmony, "<|channel|>commentary to=python <|constrain|>json<|message|>{}"),
    (Harmony, "<|channel|>commentary to=functions.weather code<|message|>{}"),
    (Harmony, f"{HEADER}[]"),
    (Harmony, f'{HEADER}{{"x": "<|end|>"}}'),
    (Harmony, f"{HEADER}{{"),
    (Harmony, f"analysis: hm {HEADER}{{}}"),
]


@pytest.mark.parametrize(("kind", "text"), ONE_CALL)
def test_a_call_is_read(kind: Any, text: str) -> None:
    assert kind().parse(text) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize(("kind", "text"), TWO_CALLS)
def test_calls_in_one_turn_are_read_in_order(kind: Any, text: str) -> None:
    assert kind().parse(text) == [("weather", ARGUMENTS), ("time", {})]


@pytest.mark.parametrize(("kind", "text"), NO_CALL)
def test_where_it_is_not_certain_there_is_no_call(kind: Any, text: str) -> None:
    assert kind().parse(text) is None


@given(text=st.text(st.sampled_from('<tool_call>/{}[]":,ARGS_CLOS|neamrgut \n'), max_size=60))
@pytest.mark.parametrize("name", FORMATS)
def test_no_text_breaks_a_format(name: str, text: str) -> None:
    calls = tool_format(name).parse(text)

    assert calls is None or all(isinstance(call, str) and isinstance(arguments, dict) for call, arguments in calls)


def test_deep_nesting_is_no_call() -> None:
    assert Hermes().parse('<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100_000) is None
    deep = "[" * 100_000 + "]" * 100_000
    assert Hermes().parse(f'<tool_call>{{"name": "f", "arguments": {{"x": {deep}}}}}</tool_call>') is None


def test_an_unknown_format_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigurationError, match="hermes, qwen, llama3_json, mistral, xlam, harmony"):
        tool_format("pythonic")


class Bytes:
    """A tokenizer of one token a byte, that knows `<|im_end|>`."""

    def get_vocab(self) -> dict[str, int]:
        return {"[TOOL_CALLS]": 5}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(token_ids).decode()


def test_calls_are_read_from_tokens_without_the_end_token() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'

    assert Hermes().read_calls([*text.encode(), 1_000_000], Bytes()) == [("weather", {})]
    assert Hermes().start_ids(Bytes()) == tuple(b"<tool_call>")
    assert Mistral().start_ids(Bytes()) == (5,)
    assert Harmony().start_ids(Bytes()) == ()
