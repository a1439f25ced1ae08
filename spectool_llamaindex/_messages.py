"""LlamaIndex's messages in the OpenAI chat format."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ToolCallBlock,
)
from pydantic import BaseModel

from spectool_core.calls import Message

__all__ = ["in_openai_format"]

_ROLES = {"chatbot": "assistant", "model": "assistant"}


def in_openai_format(messages: Iterable[ChatMessage]) -> Sequence[Message]:
    """Convert a history, oldest message first; thoughts and what the format does not know are left out."""
    return [_message(message) for message in messages]


def _message(message: ChatMessage) -> Message:
    role = _ROLES.get(message.role.value, message.role.value)
    parts = [part for block in message.blocks if (part := _part(block)) is not None]
    calls = [_call(block) for block in message.blocks if isinstance(block, ToolCallBlock)]
    calls = calls or [_plain(call) for call in message.additional_kwargs.get("tool_calls") or ()]
    converted: dict[str, Any] = {"role": role, "content": _content(parts)}
    if calls:
        converted["tool_calls"] = calls
        converted["content"] = converted["content"] or None
    if role == "tool":
        converted["tool_call_id"] = message.additional_kwargs.get("tool_call_id")
    if name := message.additional_kwargs.get("name"):
        converted["name"] = name
    return converted


def _content(parts: list[dict[str, Any]]) -> Any:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(block: Any) -> dict[str, Any] | None:
    match block:
        case TextBlock():
            return {"type": "text", "text": block.text}
        case ImageBlock():
            url = str(block.url) if block.url else _data_url(block.resolve_image(), block.image_mimetype)
            image = {"url": url} | ({"detail": block.detail} if block.detail else {})
            return {"type": "image_url", "image_url": image}
        case AudioBlock():
            data = _base64(block.resolve_audio())
            return {"type": "input_audio", "input_audio": {"data": data, "format": block.format}}
        case DocumentBlock():
            url = _data_url(block.resolve_document(), block.document_mimetype)
            return {"type": "file", "file": {"filename": block.title, "file_data": url}}
        case _:
            return None


def _call(block: ToolCallBlock) -> dict[str, Any]:
    arguments = block.tool_kwargs if isinstance(block.tool_kwargs, str) else json.dumps(block.tool_kwargs)
    function = {"name": block.tool_name, "arguments": arguments}
    return {"id": block.tool_call_id, "type": "function", "function": function}


def _plain(call: Any) -> Any:
    return call.model_dump(exclude_none=True) if isinstance(call, BaseModel) else call


def _base64(stream: Any) -> str:
    return base64.b64encode(stream.read()).decode()


def _data_url(stream: Any, mimetype: str | None) -> str:
    return f"data:{mimetype or 'application/octet-stream'};base64,{_base64(stream)}"
