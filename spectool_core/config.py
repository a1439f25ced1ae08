"""How much speculation may do: one frozen, validated model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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


def validated_config(**settings: Any) -> SpeculationConfig:
    """Build the config, or raise ConfigurationError naming the field, the value and what is allowed."""
    try:
        return SpeculationConfig(**settings)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        field = str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            allowed = "one of the settings " + ", ".join(SpeculationConfig.model_fields)
        else:
            allowed = error["msg"].removeprefix("Input should be ")
        raise ConfigurationError(field, settings.get(field), allowed) from None
