"""Harmony (gpt-oss): messages on channels; a call goes to `functions.<name>` and ends the turn with `<|call|>`."""

from __future__ import annotations

import re
from typing import ClassVar

from spectool_core.vllm.formats.format import Call, ToolFormat, load_json

__all__ = ["Harmony"]

_SPECIAL = re.compile(r"<\|[a-z_]+\|>")
# A message that says something, and the call; the recipient stands before the channel or after it.
_SAID = re.compile(
    r"<\|channel\|>(?:analysis|commentary|final)<\|message\|>[^<]*(?:<(?!\|)[^<]*)*<\|end\|><\|start\|>assistant"
)
_CALL = re.compile(
    r"(?: to=functions\.(?P<before>[\w\-]+)<\|channel\|>(?:commentary|analysis)|"
    r"<\|channel\|>(?:commentary|analysis) to=functions\.(?P<after>[\w\-]+))"
    r"(?: ?(?:<\|constrain\|>)?json)?<\|message\|>(?P<arguments>.*)",
    re.DOTALL,
)


class Harmony(ToolFormat):
    """Reads as vLLM's Harmony parser does (vllm/parser/harmony.py); a turn holds one call, as `<|call|>` ends it."""

    vllm_parser: ClassVar[str] = "openai"
    start_marker: ClassVar[str] = ""
    end_tokens: ClassVar[tuple[str, ...]] = ("<|call|>",)
    control_texts: ClassVar[tuple[str, ...]] = (
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
        "<|startoftext|>",
        "<|endoftext|>",
    )

    def parse(self, text: str) -> list[Call] | None:
        """See `ToolFormat.parse`; `text` begins after `<|start|>assistant`."""
        position = 0
        while said := _SAID.match(text, position):
            position = said.end()
        call = _CALL.fullmatch(text, position)
        if call is None or _SPECIAL.search(call["arguments"]):
            return None
        try:
            arguments = load_json(call["arguments"])
        except ValueError:
            return None
        return [(call["before"] or call["after"], arguments)] if isinstance(arguments, dict) else None
