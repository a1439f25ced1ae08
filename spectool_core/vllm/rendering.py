"""How a turn goes on, as tokens: the conversation with call and output, rendered by the server's own chat template.

What follows the turn's prompt, up to the first token that ends a turn, is the call as the template writes it; the rest
is the suffix, which leads to the next turn's first token. An output that holds a control text of the model is never
injected: the client path goes on with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from spectool_core.vllm.formats import ToolFormat
from spectool_core.vllm.injection import find

__all__ = [
    "ConversationRenderer",
    "Message",
    "ModelTokens",
    "Rendered",
    "RenderingRefusedError",
    "call_message",
    "tool_message",
]

Message: TypeAlias = dict[str, Any]
Render: TypeAlias = Callable[[Sequence[Message]], Awaitable[list[int]]]
"""Renders messages with the request's tools and parameters, through the generation prompt."""


class RenderingRefusedError(Exception):
    """The conversation cannot be gone on from by tokens; the message is the reason."""


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """What engine mode must know of a model's tokenizer.

    Args:
        eos_id: the end token that is reported without a stop reason; None if the model has none.
        stop_ids: the tokens at which the engine ends a turn.
        call_end_ids: those of them that may end a turn which holds calls.
        special_ids: the tokens that the model reads as structure.
        control_texts: the texts of those tokens, and the format's own.
        start_ids: the tokens with which a call begins; empty where there are none such.
    """

    eos_id: int | None
    stop_ids: frozenset[int]
    call_end_ids: frozenset[int]
    special_ids: frozenset[int]
    control_texts: tuple[str, ...]
    start_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, generation_eos: int | Sequence[int] | None, tool_format: ToolFormat) -> ModelTokens:
        """Read them from a tokenizer, `eos_token_id` of the generation config, and a format."""
        listed = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or ())
        stop_ids = frozenset(listed) | ({tokenizer.eos_token_id} - {None})
        vocabulary = tokenizer.get_vocab()
        call_ends = {vocabulary[text] for text in tool_format.end_tokens if text in vocabulary} & stop_ids
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token_id: str(token) for token_id, token in added.items() if getattr(token, "special", True)}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=False))
        control = {text: vocabulary[text] for text in tool_format.control_texts if text in vocabulary}
        texts = {*special.values(), *tool_format.control_texts} - {""}
        return cls(
            tokenizer.eos_token_id,
            stop_ids,
            frozenset(call_ends) or stop_ids,
            frozenset(special) | frozenset(control.values()) | stop_ids,
            tuple(sorted(texts)),
            tool_format.start_ids(tokenizer),
        )

    def control_text_in(self, text: str) -> str | None:
        """The first control text that `text` holds."""
        return next((control for control in self.control_texts if control in text), None)

    def structure_of(self, token_ids: Sequence[int]) -> list[int]:
        """The special tokens among `token_ids`, in order."""
        return [token_id for token_id in token_ids if token_id in self.special_ids]


@dataclass(frozen=True, slots=True)
class Rendered:
    """How a turn goes on.

    Args:
        call_ids: the turn's calls as the template writes them, through the token that ends the turn.
        suffix_ids: from there to the next turn's first token.
        num_prompt_tokens: the length of the next turn's prompt, as the client path would send it.
    """

    call_ids: list[int]
    suffix_ids: list[int]
    num_prompt_tokens: int


def call_message(calls: Sequence[tuple[str, Mapping[str, Any]]], ids: Sequence[str]) -> Message:
    """An assistant message that makes `calls`, in OpenAI format."""
    made = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(params, ensure_ascii=False)}}
        for (name, params), id_ in zip(calls, ids, strict=True)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def tool_message(tool_call_id: str, text: str) -> Message:
    """A tool's output, in OpenAI format."""
    return {"role": "tool", "tool_call_id": tool_call_id, "content": text}


class ConversationRenderer:
    """Renders how the turns of one request go on.

    Args:
        render: the server's own.
        tokens: the model's.
        template: what tells this request's template from others.
        templates_with_ids: what is known of templates: whether they write tool call ids; shared by requests.
    """

    _IDS = ("chatcmpl-tool-0123456789abcdef", "chatcmpl-tool-fedcba9876543210")
    _HARMLESS = "0"

    def __init__(
        self,
        render: Render,
        tokens: ModelTokens,
        *,
        template: str = "",
        templates_with_ids: MutableMapping[str, bool] | None = None,
    ) -> None:
        self._render = render
        self._tokens = tokens
        # It is whatever the client sent, and is known for longer than its request.
        self._template = hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest()
        self._templates_with_ids = {} if templates_with_ids is None else templates_with_ids
        self._structures: dict[tuple[int, int], list[int]] = {}

    async def writes_ids(self, messages: Sequence[Message], name: str) -> bool:
        """Whether the template writes tool call ids, so that nothing can be rendered before they are known."""
        known = self._templates_with_ids.get(self._template)
        if known is None:
            one, other = [await self._render(_gone_on(messages, name, {}, id_, "0")) for id_ in self._IDS]
            known = self._templates_with_ids[self._template] = one != other
        return known

    async def ahead(
        self, messages: Sequence[Message], prompt_ids: Sequence[int], name: str, params: Mapping[str, Any], text: str
    ) -> Rendered:
        """How a turn goes on that will make this one call and write nothing else.

        Args:
            messages: the conversation up to the turn.
            prompt_ids: as it was rendered for the turn.
            name: the tool.
            params: the call's arguments.
            text: the tool's output.

        Raises:
            RenderingRefusedError: it cannot be rendered before the turn has ended, or not at all.
        """
        self._check_text(json.dumps(params, ensure_ascii=False), "params hold")
        if await self.writes_ids(messages, name):
            raise RenderingRefusedError("the chat template writes tool call ids, which are not known yet")
        call = call_message([(name, params)], self._IDS[:1])
        rendered = await self.after(messages, prompt_ids, call, [text])
        start = max(0, find(rendered.call_ids, self._tokens.start_ids))
        return Rendered(rendered.call_ids[start:], rendered.suffix_ids, rendered.num_prompt_tokens)

    async def after(
        self, messages: Sequence[Message], prompt_ids: Sequence[int], answer: Message, texts: Sequence[str]
    ) -> Rendered:
        """How a turn goes on that has ended with `answer`.

        Args:
            messages: the conversation up to the turn.
            prompt_ids: as it was rendered for the turn.
            answer: the turn's assistant message, with its calls.
            texts: the tools' outputs, in the order of the calls.

        Raises:
            RenderingRefusedError: an output holds a control text, or the template is not one that only appends.
        """
        for text in texts:
            self._check_text(text, "the output holds")
        ids = [call["id"] for call in answer["tool_calls"]]
        rendered = self._cut(await self._render([*messages, answer, *map(tool_message, ids, texts)]), prompt_ids)
        # Whatever the output, the special tokens that follow the turn are the template's own.
        place = (len(prompt_ids), len(ids))
        structure = self._structures.get(place)
        if structure is None:
            harmless = [tool_message(id_, self._HARMLESS) for id_ in ids]
            plain = self._cut(await self._render([*messages, answer, *harmless]), prompt_ids)
            structure = self._tokens.structure_of(plain.suffix_ids)
            of_this_turn = {known: kept for known, kept in self._structures.items() if known[0] == place[0]}
            self._structures = {**of_this_turn, place: structure}
        if self._tokens.structure_of(rendered.suffix_ids) != structure:
            raise RenderingRefusedError("the output is read as control tokens")
        return rendered

    def _check_text(self, text: str, subject: str) -> None:
        control = self._tokens.control_text_in(text)
        if control is not None:
            raise RenderingRefusedError(f"{subject} the control text {control}")

    def _cut(self, token_ids: list[int], prompt_ids: Sequence[int]) -> Rendered:
        start = len(prompt_ids)
        if token_ids[:start] != list(prompt_ids):
            raise RenderingRefusedError("the chat template is not prefix-stable")
        end = next((index for index in range(start, len(token_ids)) if token_ids[index] in self._tokens.stop_ids), -1)
        if end < 0:
            raise RenderingRefusedError("the chat template ends a turn without an end token")
        return Rendered(token_ids[start : end + 1], token_ids[end + 1 :], len(token_ids))


def _gone_on(messages: Sequence[Message], name: str, params: Mapping[str, Any], id_: str, text: str) -> list[Message]:
    return [*messages, call_message([(name, params)], [id_]), tool_message(id_, text)]
