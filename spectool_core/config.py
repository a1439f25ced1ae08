"""How much speculation may do: one frozen, validated model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from spectool_core.errors import ConfigurationError

__all__ = ["Mode", "SpeculationConfig", "validated_config"]

Mode = Literal["client", "shadow", "off"]

_Count = Annotated[int, Field(ge=1, strict=True)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class SpeculationConfig(BaseModel):
    """Settings of one `Speculation`; every limit is an upper bound.

    Attributes:
        mode: "client" speculates; "shadow" predicts and counts but runs nothing; "off" does nothing at all.
        ttl_s: seconds for which a finished result may be served, unless the tool's mark says otherwise.
        timeout_s: seconds after which a speculative run that nobody has joined is cancelled; None for no limit.
        max_runs_per_turn: speculative runs started in one turn.
        max_runs_per_tool: speculative runs of one tool started in one turn.
        max_runs: speculative runs started over the life of the `Speculation`; None for no limit.
        max_concurrency: speculative runs in flight at once on one event loop (all sync runs share one), and threads.
        max_concurrency_per_tool: the same for one tool, unless the tool's mark says otherwise.
        max_results: finished results kept on one event loop.
        max_runs_per_minute: speculative runs started in any minute; None for no limit, as for the next two.
        max_tokens_per_minute: tokens that speculators have used in any minute, beyond which none is asked.
        max_cost_per_minute: what runs (`ToolPolicy.cost`) and speculators have cost in any minute.
        min_probability: how likely a speculator that says so must hold a call for it to be run early.
        value_per_s: what a second saved is worth, in the currency of costs: a run that is worth less than it costs is
            not started. None leaves costs to `max_cost_per_minute`.
        adaptive: False asks every speculator in each turn, whether that pays or not.
        engine: "vllm" where the main model is served by vLLM with spectool's plugin; None for any other server.
        engine_url: the URL of that server as OpenAI clients take it, `/v1` included.
        engine_api_key: for the tool outputs that are posted there; None takes the main model's own credentials.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = "client"
    ttl_s: _Seconds = 60.0
    timeout_s: _Seconds | None = None
    max_runs_per_turn: _Count = 8
    max_runs_per_tool: _Count = 4
    max_runs: Annotated[int, Field(ge=0, strict=True)] | None = None
    max_concurrency: _Count = 32
    max_concurrency_per_tool: _Count = 4
    max_results: _Count = 1024
    max_runs_per_minute: _Count | None = None
    max_tokens_per_minute: _Count | None = None
    max_cost_per_minute: _Amount | None = None
    min_probability: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.5
    value_per_s: _Amount | None = None
    adaptive: Annotated[bool, Field(strict=True)] = True
    engine: Literal["vllm"] | None = None
    engine_url: Annotated[str, Field(strict=True)] | None = Field(default=None, validate_default=True)
    engine_api_key: SecretStr | None = Field(default=None, validate_default=True)

    @field_validator("engine_url")
    @classmethod
    def _is_url_of_engine(cls, url: str | None, info: ValidationInfo) -> str | None:
        engine = info.data.get("engine")
        if (url is None) != (engine is None):
            allowed = "the URL of the engine, with /v1" if url is None else "None without engine='vllm'"
            raise PydanticCustomError("engine_url", allowed)
        parts = urlsplit(url or "")
        if url is not None and not (parts.scheme in ("http", "https") and parts.hostname and parts.path.strip("/")):
            raise PydanticCustomError("engine_url", "an http or https URL, with /v1")
        if "@" in parts.netloc:
            raise PydanticCustomError("engine_url", "a URL without a user or password; a key goes into engine_api_key")
        return url

    @field_validator("engine_api_key")
    @classmethod
    def _is_key_of_engine(cls, key: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if key is not None and (info.data.get("engine") is None or not key.get_secret_value()):
            raise PydanticCustomError("engine_api_key", "a key that is not empty, with engine='vllm'")
        return key


def validated_config(**settings: Any) -> SpeculationConfig:
    """Build the config, or raise ConfigurationError naming the field, the value and what is allowed."""
    try:
        return SpeculationConfig(**settings)
    except ValidationError as exc:
        # Messages are logged: of a key they tell the type alone, of a URL no password.
        shown = dict(settings)
        if (key := shown.get("engine_api_key")) is not None:
            shown["engine_api_key"] = type(key).__name__
        if isinstance(url := shown.get("engine_url"), str):
            shown["engine_url"] = re.sub("//.*@", "//***@", url, flags=re.DOTALL)
        raise ConfigurationError.of(exc, shown, SpeculationConfig.model_fields) from None
