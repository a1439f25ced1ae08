"""A tokenizer of one token a character, with special tokens that it reads in any text, and a chat template for it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2, "<tool_call>": 3, "</tool_call>": 4, "<|odd|>": 5}
_PARTS = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


class CharacterTokenizer:
    """Like Hugging Face's: special tokens are read wherever their text stands."""

    eos_token_id = SPECIAL["<|im_end|>"]
    all_special_tokens = ("<|im_start|>", "<|im_end|>")
    all_special_ids = (1, 2)

    def get_vocab(self) -> dict[str, int]:
        return dict(SPECIAL)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        token_ids = []
        for part in _PARTS.split(text):
            token_ids += [SPECIAL[part]] if part in SPECIAL else [ord(character) + 100 for character in part]
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        texts = {token_id: text for text, token_id in SPECIAL.items()}
        return "".join(texts.get(token_id) or chr(token_id - 100) for token_id in token_ids)


def template(messages: Sequence[dict[str, Any]], *, writes_ids: bool = False, strips_thinking: bool = False) -> str:
    """ChatML with Hermes calls."""
    text = ""
    for place, message in enumerate(messages):
        text += f"<|im_start|>{message['role']}\n"
        if strips_thinking and place + 1 == len(messages):
            text += "(last)"
        for call in message.get("tool_calls") or ():
            function = call["function"]
            text += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
        if writes_ids and "tool_call_id" in message:
            text += f"[{message['tool_call_id']}]"
        text += f"{message.get('content') or ''}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def call(name: str, id_: str, **params: Any) -> dict[str, Any]:
    """A call in OpenAI format."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(params)}}
