"""xLAM 2: the turn is a JSON array, `[{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from spectool_core.vllm.formats.format import Call, ToolFormat, load_json, without_reasoning
from spectool_core.vllm.formats.llama3_json import Llama3Json

__all__ = ["XLam"]

# What vLLM's streaming takes for the arguments of a call: braces nest once, and none stands in a string.
_ARGUMENTS = re.compile(r'"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(\{(?:[^{}]|(?:\{[^{}]*\}))*\})')


class XLam(ToolFormat):
    """Reads as `xlam` does (vllm/tool_parsers/xlam_tool_parser.py), bare arrays only."""

    vllm_parser: ClassVar[str] = "xlam"
    start_marker: ClassVar[str] = ""
    control_texts: ClassVar[tuple[str, ...]] = (
        *Llama3Json.control_texts,
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    end_tokens: ClassVar[tuple[str, ...]] = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")

    def parse(self, text: str) -> list[Call] | None:
        """See `ToolFormat.parse`; the array must be all that the answer holds."""
        answer = without_reasoning(text, '"arguments"')
        if answer is None or not answer.strip().startswith("["):
            return None
        try:
            calls: Any = load_json(answer.strip())
            streamed = [(name, load_json(arguments)) for name, arguments in _ARGUMENTS.findall(answer)]
        except ValueError:
            return None
        read = [(call["name"], call["arguments"]) for call in calls if isinstance(call, dict) and set(call) == _KEYS]
        return read if read and len(read) == len(calls) and read == streamed else None


_KEYS = {"name", "arguments"}
