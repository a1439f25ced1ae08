"""What engine mode must know of a tool-call format."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from spectool_core.vllm.wire import refuse_constant

__all__ = ["Call", "ToolFormat", "json_value_at", "load_json", "without_reasoning"]

Call: TypeAlias = tuple[str, dict[str, Any]]
"""A tool's name and its arguments, as `json.loads` reads them."""


class ToolFormat(ABC):
    """Reads whole turns; where it is not certain that vLLM's parser reads the same, streamed or not, it reads none.

    Attributes:
        vllm_parser: the name of vLLM's own parser of the format, which answers the clients that get a call.
        start_marker: the text with which a call begins; empty where calls begin like other text.
        end_tokens: special tokens, besides the model's EOS, that may end a turn which holds calls.
        control_texts: texts that a tool output must not hold, since the model reads them as structure.
    """

    vllm_parser: ClassVar[str]
    start_marker: ClassVar[str]
    end_tokens: ClassVar[tuple[str, ...]] = ()
    control_texts: ClassVar[tuple[str, ...]]

    @abstractmethod
    def parse(self, text: str) -> list[Call] | None:
        """The calls in a turn's text, special tokens shown and the end token cut off; None where it has none."""

    def start_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The tokens with which every call begins; empty where there are none such."""
        if not self.start_marker:
            return ()
        # Some tokenizers never read a special token out of text.
        token_id = tokenizer.get_vocab().get(self.start_marker)
        encoded = tokenizer.encode(self.start_marker, add_special_tokens=False) if token_id is None else (token_id,)
        return tuple(encoded)

    def read_calls(self, token_ids: Sequence[int], tokenizer: Any) -> list[Call] | None:
        """The calls of a turn whose last token is its end token, in order; None where that is not certain."""
        return self.parse(_decode(tokenizer, list(token_ids[:-1])))


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    try:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    except TypeError:  # a tokenizer that is not Hugging Face's never cleans up
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))


def without_reasoning(text: str, start_marker: str) -> str | None:
    """The text after `</think>`; None where thinking goes on, or seems to hold a call."""
    reasoning, closed, answer = text.rpartition("</think>")
    if "<think>" in answer:
        return None
    return None if closed and start_marker and start_marker in reasoning else answer


def load_json(text: str) -> Any:
    """JSON as vLLM's parsers load it; NaN, the infinities and what is no JSON raise ValueError."""
    try:
        return _decoder.decode(text)
    except RecursionError as exc:
        raise ValueError("JSON nests too deep") from exc


def json_value_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends; raises ValueError as `load_json` does."""
    try:
        return _decoder.raw_decode(text, start)
    except RecursionError as exc:
        raise ValueError("JSON nests too deep") from exc


_decoder = json.JSONDecoder(parse_constant=refuse_constant)
