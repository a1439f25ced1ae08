"""Hermes 2 Pro and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from spectool_core.vllm.formats.format import Call, ToolFormat, load_json, without_reasoning

__all__ = ["Hermes"]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# What vLLM's streaming takes for the name is the first of these, and for the arguments all that follows the key.
_NAME_FIRST = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"\\]+"\s*,\s*"arguments"\s*:')


class Hermes(ToolFormat):
    """Reads as `hermes` does (vllm/tool_parsers/hermes_tool_parser.py)."""

    vllm_parser: ClassVar[str] = "hermes"
    start_marker: ClassVar[str] = "<tool_call>"
    control_texts: ClassVar[tuple[str, ...]] = (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    )

    def parse(self, text: str) -> list[Call] | None:
        """See `ToolFormat.parse`; nothing but white space may follow the first call or stand between calls."""
        answer = without_reasoning(text, self.start_marker)
        if answer is None or self.start_marker not in answer:
            return None
        written = answer[answer.index(self.start_marker) :]
        if _CALL.sub("", written).strip():
            return None
        calls = [_call(body) for body in _CALL.findall(written)]
        return None if None in calls else [call for call in calls if call is not None]


def _call(body: str) -> Call | None:
    if not _NAME_FIRST.match(body):
        return None
    try:
        call: Any = load_json(body)
    except ValueError:
        return None
    if set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return None
    return call["name"], call["arguments"]
