"""Llama 3: `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or without it."""

from __future__ import annotations

from typing import Any, ClassVar

from spectool_core.vllm.formats.format import Call, ToolFormat, load_json

__all__ = ["Llama3Json"]


class Llama3Json(ToolFormat):
    """Reads as `llama3_json` does (vllm/tool_parsers/llama_tool_parser.py), one call a turn.

    Several objects in a row are left to vLLM: what its streaming makes of them depends on where its deltas end.
    """

    vllm_parser: ClassVar[str] = "llama3_json"
    start_marker: ClassVar[str] = ""
    end_tokens: ClassVar[tuple[str, ...]] = ("<|eot_id|>", "<|eom_id|>")
    control_texts: ClassVar[tuple[str, ...]] = (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    )

    def parse(self, text: str) -> list[Call] | None:
        """See `ToolFormat.parse`; the call must be all that the turn holds."""
        body = text.removeprefix("<|python_tag|>")
        if not body.startswith("{"):
            return None
        try:
            call: Any = load_json(body.rstrip())
        except ValueError:
            return None
        keys = set(call)
        if keys not in ({"name", "parameters"}, {"name", "arguments"}, *_TYPED):
            return None
        name, arguments = call["name"], call.get("parameters", call.get("arguments"))
        return [(name, arguments)] if isinstance(name, str) and name and isinstance(arguments, dict) else None


_TYPED = ({"type", "name", "parameters"}, {"type", "name", "arguments"})
