"""The HTTP interface of engine mode, as values: headers, bodies, events and errors. No IO; shared with the client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

__all__ = [
    "DONE",
    "DONE_EVENT",
    "ID_PREFIX",
    "INJECTED_EVENT",
    "MAX_ENTRIES",
    "MAX_OUTPUT_BYTES",
    "OUTPUTS_PATH",
    "REPLY_HEADER",
    "REQUEST_ID_HEADER",
    "SECRET_HEADER",
    "TURNS_HEADER",
    "TURN_EVENT",
    "RefusalReason",
    "ToolOutput",
    "WireError",
    "call_key",
    "output_text",
    "read_tool_outputs",
    "refuse_constant",
    "server_sent_event",
]

REQUEST_ID_HEADER = "X-Request-Id"
SECRET_HEADER = "X-Spectool-Secret"  # noqa: S105 - a header's name
TURNS_HEADER = "X-Spectool-Turns"
REPLY_HEADER = "X-Spectool"
"""Of the reply: the plugin is there and has taken the request."""

ID_PREFIX = "chatcmpl-"
"""A response's id is this and the request's `REQUEST_ID_HEADER`."""

OUTPUTS_PATH = "/cache-tool-output/"
"""Followed by a response's id: where tool outputs are posted."""

TURN_EVENT = "spectool.turn"
INJECTED_EVENT = "spectool.injected"
DONE = "[DONE]"
DONE_EVENT = f"data: {DONE}\n\n"

MAX_ENTRIES = 64
"""Outputs that an engine with default settings keeps for one response."""

MAX_OUTPUT_BYTES = 1 << 20
"""Outputs above this are refused by an engine with default settings."""

RefusalReason: TypeAlias = Literal[
    # The chat request is left alone.
    "several_samples",
    "prompt_is_not_text",
    "no_tools",
    "structured_output",
    "prompt_logprobs",
    "stop",
    "continued_message",
    "seeded_sampling",
    "kv_transfer",
    "no_generation",
    # The turn ended otherwise than by calls that were cached or pending.
    "stopped_otherwise",
    "no_calls",
    "nothing_cached",
    "not_cached",
    "other_calls",
    "unplanned",
    # Its outputs could not be gone on from.
    "max_tokens",
    "max_model_len",
    "no_room",
    "cannot_render",
    "next_turn_refused",
    # It was not waited for its tools.
    "too_many_parked",
    "held_too_long",
    "ended",
    "aborted",
    # The engine does not say.
    "engine_error",
    "unknown_to_the_engine",
]
"""Why a turn was not gone on from, or an output not used; told by GET."""


class WireError(Exception):
    """A request that is not served, in OpenAI's form.

    Args:
        status: 401 key, 404 unknown id or wrong secret, 409 finished or in use, 413 too large, 422 with the field,
            503 full, or the engine is gone.
        message: what is wrong and what is allowed.
        code: for programs.
        param: the field, where there is one.
    """

    _TYPES: ClassVar[dict[int, str]] = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        super().__init__(f"{status} {code}: {message}")

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = self._TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ToolOutput(BaseModel):
    """One entry of `POST /cache-tool-output/{response_id}`.

    Attributes:
        name: the tool.
        params: its arguments, as the model would write them.
        output: what the tool returned; text is injected as it is, anything else as compact JSON.
        keep_alive: seconds for which the output may be injected.
        pending: true while the tool runs; false without an output withdraws what was announced as pending.
        turn: the one turn, from 1, in which the output may be injected; None for any.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    params: dict[str, Any] = Field(default_factory=dict)
    output: Any = None
    keep_alive: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    pending: bool = False
    turn: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _has_an_output_or_says_why_not(self) -> ToolOutput:
        given = self.model_fields_set
        if self.pending and "output" in given:
            raise ValueError("output: a pending entry has none yet")
        if not given & {"output", "pending"}:
            raise ValueError("output: required, unless the entry is pending or withdrawn")
        return self

    @property
    def is_withdrawn(self) -> bool:
        """Whether what was announced as pending will not come."""
        return not self.pending and "output" not in self.model_fields_set


_OUTPUTS = TypeAdapter(list[ToolOutput])


def read_tool_outputs(body: bytes) -> list[ToolOutput]:
    """Read the body of a post.

    Raises:
        WireError: 422; `param` is the entry's index and field, such as `0.params`.
    """
    try:
        given = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise WireError(422, f"the body is not JSON: {exc}", "malformed_json") from None
    try:
        outputs = _OUTPUTS.validate_python(given)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False)[0]
        message = str(error["msg"]).removeprefix("Value error, ")
        place = [str(part) for part in error["loc"]]
        if error["type"] == "value_error":
            place.append(message.partition(":")[0])
        param = ".".join(place) or None
        raise WireError(422, f"{param or 'body'}: {message}", "invalid_field", param) from None
    for index, output in enumerate(outputs):
        try:
            call_key(output.name, output.params)
            output_text(output.output).encode()
        except (TypeError, ValueError, RecursionError) as exc:
            raise WireError(422, f"{index}: {exc}", "invalid_field", str(index)) from None
    return outputs


def refuse_constant(name: str) -> NoReturn:
    """For JSON readers: NaN and the infinities, which Python would read, raise ValueError."""
    raise ValueError(f"{name} is not JSON")


def call_key(name: str, params: Mapping[str, Any]) -> str:
    """What must be equal for two calls to be one, in any process: the name, a NUL, and canonical JSON.

    Keys are sorted, integers exact, 1 and 1.0 differ, and nothing is coerced.

    Raises:
        TypeError: a value or key that JSON does not have.
        ValueError: NaN, an infinity, a lone surrogate, or a container that holds itself.
    """
    text = json.dumps(params, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    _refuse_coerced(params)
    text.encode()
    return f"{name}\0{text}"


def output_text(output: Any) -> str:
    """The text by which an output is injected: a string as it is, anything else as compact JSON."""
    if isinstance(output, str):
        return output
    return json.dumps(output, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def server_sent_event(data: Mapping[str, Any], event: str | None = None) -> str:
    """One event of a `text/event-stream`; plain data where `event` is None."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n" if event is None else f"event: {event}\ndata: {text}\n\n"


def _refuse_coerced(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"a key of type {type(key).__name__}; JSON has text only")
            _refuse_coerced(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_coerced(item)
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"a value of type {type(value).__name__}, which JSON does not have")
