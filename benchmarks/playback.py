"""What the models of the benchmarks say: each agent asks `search` once a turn, then answers."""

from __future__ import annotations

from spectool_core.testing import Answer, ChatRequest, ScriptedCall, ScriptedModel

__all__ = ["MAIN", "models"]

MAIN = "gpt-4o-mini"
"""The main model's name: one that LlamaIndex's client knows."""


def say(request: ChatRequest, *, num_turns: int) -> Answer:
    """The main model's answer: a search while there are turns left."""
    if request.turn >= num_turns:
        return Answer(f"All about {request.task}.")
    query = f"{request.task}, part {request.turn}"
    return Answer(tool_calls=[ScriptedCall("search", {"query": query})], completion_tokens=40)


class Script:
    """`say` for a number of turns; a class, so that it can be sent to the server's process."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    def __call__(self, request: ChatRequest) -> Answer:
        """Answer one request."""
        return say(request, num_turns=self._num_turns)


def models(
    *, num_turns: int, generation_s: float, speculator_s: float, acceptance_rates: tuple[float, ...] = (1.0,)
) -> dict[str, ScriptedModel]:
    """A main model, and a speculator `small-ALPHA` for each acceptance rate."""
    script = Script(num_turns)
    small = {
        f"small-{alpha}": ScriptedModel(script, generation_s=speculator_s, acceptance_rate=alpha)
        for alpha in acceptance_rates
    }
    return {MAIN: ScriptedModel(script, generation_s=generation_s), **small}
