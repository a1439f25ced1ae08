"""What `spectool serve` sets: `--additional-config '{"spectool": {...}}'`, read by both of vLLM's processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spectool_core.errors import ConfigurationError
from spectool_core.vllm.wire import MAX_ENTRIES, MAX_OUTPUT_BYTES

__all__ = ["EngineSettings", "Level"]

Level = Literal["sessions", "o3", "o2+o3"]

_Count = Annotated[int, Field(ge=1, strict=True)]


class EngineSettings(BaseModel):
    """Limits and choices of one server; every limit is an upper bound.

    Attributes:
        level: "sessions" works with the stock scheduler; "o3" injects in the scheduler; "o2+o3" drafts calls as well.
        tool_format: how the model writes its calls, a name of `formats`.
        hold_s: seconds for which a sequence whose tool still runs is parked.
        max_parked: sequences parked at once, and at most half of `--max-num-seqs`.
        max_responses: responses whose entries are kept.
        max_entries: entries of one response.
        max_output_bytes: bytes of one tool output.
        num_draft_tokens: draft tokens of one step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Level = "o3"
    tool_format: str = "hermes"
    hold_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    max_parked: _Count = 16
    max_responses: _Count = 1024
    max_entries: _Count = MAX_ENTRIES
    max_output_bytes: _Count = MAX_OUTPUT_BYTES
    num_draft_tokens: _Count = 32

    @classmethod
    def of(cls, additional_config: object) -> EngineSettings:
        """Read the part `spectool` of vLLM's `additional_config`.

        Raises:
            ConfigurationError: naming the field, the value and what is allowed.
        """
        part: Any = additional_config.get("spectool", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(part, Mapping):
            raise ConfigurationError("spectool", part, "an object of settings")
        try:
            return cls(**part)
        except ValidationError as exc:
            raise ConfigurationError.of(exc, part, cls.model_fields) from None
