"""Mistral: `[TOOL_CALLS]name[ARGS]{...}` since tokenizer 11, `[TOOL_CALLS][{"name", "arguments"}]` before."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from spectool_core.vllm.formats.format import Call, ToolFormat, json_value_at, load_json

__all__ = ["Mistral"]

_NAMED = re.compile(r"([A-Za-z0-9_.\-]+)(?:\[ARGS\])?(?=\{)")


class Mistral(ToolFormat):
    """Reads as `mistral` does (vllm/parser/mistral.py)."""

    vllm_parser: ClassVar[str] = "mistral"
    start_marker: ClassVar[str] = "[TOOL_CALLS]"
    control_texts: ClassVar[tuple[str, ...]] = (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CONTENT]",
        "[THINK]",
        "[/THINK]",
    )

    def parse(self, text: str) -> list[Call] | None:
        """See `ToolFormat.parse`."""
        before, marker, written = text.partition(self.start_marker)
        written = written.strip()
        if not marker or before.count("[THINK]") != before.count("[/THINK]"):
            return None
        try:
            return _listed(load_json(written)) if written.startswith("[") else _named(written)
        except ValueError:
            return None


def _listed(calls: Any) -> list[Call] | None:
    if not isinstance(calls, list) or not calls:
        return None
    read: list[Call] = []
    for call in calls:
        if not isinstance(call, dict) or not {"name", "arguments"} <= set(call) <= {"name", "arguments", "id"}:
            return None
        if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
            return None
        read.append((call["name"], call["arguments"]))
    return read


def _named(written: str) -> list[Call] | None:
    read: list[Call] = []
    position = 0
    while True:
        name = _NAMED.match(written, position)
        if name is None:
            return None
        arguments, position = json_value_at(written, name.end())
        read.append((name[1], arguments))
        rest = written[position:]
        if not rest.strip():
            return read
        if not rest.startswith(Mistral.start_marker):
            return None
        position += len(Mistral.start_marker)
