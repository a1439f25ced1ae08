"""The analytic model: what speculation gains in theory.

Equation numbers are those of Nichols et al., "Optimizing Agentic Language Model Inference via Speculative Tool Calls"
(2025). Pure functions; every time is in seconds. A time that is negative or not finite, a share outside [0, 1] or a
negative count raises ConfigurationError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from spectool_core.errors import ConfigurationError

__all__ = [
    "EngineCosts",
    "EngineTurn",
    "cached_engine_time",
    "cycle_time",
    "max_speedup",
    "max_speedup_bound",
    "pays",
    "run_standard_time",
    "run_time",
    "speculative_engine_time",
    "speculative_time",
    "speedup",
    "standard_time",
    "vanilla_engine_time",
]


def standard_time(num_turns: float, *, generation_s: float, tool_s: float) -> float:
    """The time of `num_turns` turns that generate and then run a tool: N (G + T)."""
    _check_not_negative(num_turns=num_turns, generation_s=generation_s, tool_s=tool_s)
    return num_turns * (generation_s + tool_s)


def speculative_time(
    num_turns: float, alpha: float, *, generation_s: float, speculator_s: float, tool_s: float
) -> float:
    """Equation (1): the time of `num_turns` turns of which a share `alpha` is predicted.

    The paper assumes g <= G. A late speculator (g > G) is never waited for, so it changes nothing.
    """
    _check_not_negative(num_turns=num_turns, generation_s=generation_s, speculator_s=speculator_s, tool_s=tool_s)
    _check_share(alpha)
    hit_s = _hit_time(generation_s, speculator_s, tool_s)
    return num_turns * (alpha * hit_s + (1 - alpha) * (generation_s + tool_s))


def cycle_time(num_agents: int, *, cpu_s: float, wait_s: float) -> float:
    """The mean time of a turn where `num_agents` share one event loop, which each turn uses for `cpu_s`.

    Exact mean value analysis of a closed network with one queue (Reiser and Lavenberg, 1980). `wait_s` is the rest of a
    turn: model and tools. With one agent it is their sum; where the loop is saturated, `num_agents` times `cpu_s`.
    """
    _check_not_negative(num_agents=num_agents, cpu_s=cpu_s, wait_s=wait_s)
    queued = 0.0
    residence_s = cpu_s
    for agents in range(1, num_agents + 1):
        residence_s = cpu_s * (1 + queued)
        cycle_s = residence_s + wait_s
        queued = agents * residence_s / cycle_s if cycle_s > 0 else 0.0
    return residence_s + wait_s


def speedup(alpha: float, *, generation_s: float, speculator_s: float, tool_s: float) -> float:
    """Equation (2): standard time over speculative time, S_spec(alpha); 1 where no time passes at all."""
    standard_s = standard_time(1, generation_s=generation_s, tool_s=tool_s)
    speculative_s = speculative_time(1, alpha, generation_s=generation_s, speculator_s=speculator_s, tool_s=tool_s)
    return standard_s / speculative_s if speculative_s > 0 else 1.0


def pays(alpha: float, *, generation_s: float, speculator_s: float, tool_s: float) -> bool:
    """Equation (3): whether S_spec(alpha) > 1, that is alpha > 0, g < G and T > 0."""
    _check_not_negative(generation_s=generation_s, speculator_s=speculator_s, tool_s=tool_s)
    _check_share(alpha)
    return alpha > 0 and speculator_s < generation_s and tool_s > 0


def max_speedup(*, generation_s: float, speculator_s: float, tool_s: float) -> float:
    """Lemma 1: the speedup when every call is predicted, (G + T) / max(G, g + T)."""
    return speedup(1.0, generation_s=generation_s, speculator_s=speculator_s, tool_s=tool_s)


def max_speedup_bound(*, generation_s: float, speculator_s: float, tool_s: float) -> float:
    """Lemma 1: 2 - 2g / (G + g + T), which no speedup exceeds; below 2 unless the speculator takes no time.

    A late speculator (g > G) counts as g = G, as in `speculative_time`.
    """
    _check_not_negative(generation_s=generation_s, speculator_s=speculator_s, tool_s=tool_s)
    in_time_s = min(speculator_s, generation_s)
    total_s = generation_s + in_time_s + tool_s
    return 2 - 2 * in_time_s / total_s if total_s > 0 else 2.0


def run_standard_time(num_tool_turns: int, *, generation_s: float, tool_s: float) -> float:
    """The time of a whole run: `num_tool_turns` turns with a tool, then a final one that only generates."""
    return standard_time(num_tool_turns, generation_s=generation_s, tool_s=tool_s) + generation_s


def run_time(num_tool_turns: int, num_hits: int, *, generation_s: float, speculator_s: float, tool_s: float) -> float:
    """The time of a whole run of which `num_hits` tool turns were hits: (1) with N = K and alpha K = hits, plus one G.

    The final turn has no call, so it cannot gain.
    """
    _check_not_negative(num_tool_turns=num_tool_turns)
    if not 0 <= num_hits <= num_tool_turns:
        raise ConfigurationError("num_hits", num_hits, f"0 to num_tool_turns, which is {num_tool_turns}")
    times = {"generation_s": generation_s, "speculator_s": speculator_s, "tool_s": tool_s}
    hits_s = speculative_time(num_hits, 1.0, **times)
    misses_s = speculative_time(num_tool_turns - num_hits, 0.0, **times)
    return hits_s + misses_s + generation_s


@dataclass(frozen=True, slots=True)
class EngineTurn:
    """One turn inside the engine.

    Args:
        num_reasoning_tokens: R_i, what the model writes before its call.
        num_call_tokens: t_i, the call itself.
        num_output_tokens: t_o,i, the tool's output.
        tool_s: T_i, the time of the tool.
    """

    num_reasoning_tokens: int
    num_call_tokens: int
    num_output_tokens: int
    tool_s: float

    def __post_init__(self) -> None:
        _check_not_negative(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What an engine charges.

    Args:
        prefill_s: phi, seconds per token of prefill.
        decode_s: delta, seconds per token of decode.
        overhead_s: o, one trip through the API and into the running batch.
    """

    prefill_s: float
    decode_s: float
    overhead_s: float

    def __post_init__(self) -> None:
        _check_not_negative(**{field.name: getattr(self, field.name) for field in fields(self)})


def vanilla_engine_time(num_prompt_tokens: int, turns: Sequence[EngineTurn], costs: EngineCosts) -> float:
    """Equation (4): each turn leaves the engine, comes back, and prefills the whole history again."""
    _check_not_negative(num_prompt_tokens=num_prompt_tokens)
    num_history_tokens = num_prompt_tokens
    num_prefilled_tokens = 0
    for turn in turns:
        num_prefilled_tokens += num_history_tokens
        num_history_tokens += turn.num_call_tokens + turn.num_output_tokens
    return (
        2 * len(turns) * costs.overhead_s
        + costs.prefill_s * num_prefilled_tokens
        + costs.decode_s * sum(turn.num_reasoning_tokens + turn.num_call_tokens for turn in turns)
        + sum(turn.tool_s for turn in turns)
    )


def cached_engine_time(num_prompt_tokens: int, turns: Sequence[EngineTurn], costs: EngineCosts) -> float:
    """Equation (5): as (4) with a prefix cache, so that each token is prefilled once."""
    return speculative_engine_time(num_prompt_tokens, turns, costs, alpha=0.0)


def speculative_engine_time(
    num_prompt_tokens: int, turns: Sequence[EngineTurn], costs: EngineCosts, *, alpha: float
) -> float:
    """Equation (6): a predicted call is decoded in one step and its output appended without leaving the engine.

    It hides all of T_i, which holds only where T_i < delta R_i: it is optimistic for slow tools.
    """
    _check_not_negative(num_prompt_tokens=num_prompt_tokens)
    _check_share(alpha)
    num_calls = len(turns)
    num_call_tokens = sum(turn.num_call_tokens for turn in turns)
    num_output_tokens = sum(turn.num_output_tokens for turn in turns)
    num_reasoning_tokens = sum(turn.num_reasoning_tokens for turn in turns)
    return (
        (1 - alpha) * 2 * num_calls * costs.overhead_s
        + costs.prefill_s * (num_prompt_tokens + num_call_tokens + num_output_tokens)
        + costs.decode_s * (alpha * num_calls + num_reasoning_tokens + (1 - alpha) * num_call_tokens)
        + (1 - alpha) * sum(turn.tool_s for turn in turns)
    )


def _hit_time(generation_s: float, speculator_s: float, tool_s: float) -> float:
    return max(generation_s, min(speculator_s, generation_s) + tool_s)


def _check_not_negative(**values: float) -> None:
    for field, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigurationError(field, value, "a finite number of at least 0")


def _check_share(alpha: float) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ConfigurationError("alpha", alpha, "a number from 0 to 1")
