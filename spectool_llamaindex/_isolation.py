"""Where speculators and early runs live: the user's context variables are there, the workflow and observers are not."""

from __future__ import annotations

from contextvars import Context, copy_context
from typing import Any

from llama_index_instrumentation.dispatcher import active_instrument_tags
from llama_index_instrumentation.span import active_span_id
from workflows.runtime.types.results import InternalContextVar

from spectool_core.early import check_reusable, copied
from spectool_core.runs import NotReplayable
from spectool_llamaindex._observers import ROOT_SPAN, Emission, Emissions, hear_instead

__all__ = ["Recorded", "Recorder", "run_tags", "unseen"]

# Tags of the step that runs, which a tool would not see: it runs in another one.
_STEP_TAGS = "llamaindex.step."


class Recorded:
    """The value that a tool's own code returned, and what it said to observers on the way."""

    __slots__ = ("emissions", "value")

    def __init__(self, value: Any, emissions: tuple[Emission, ...]) -> None:
        self.value = value
        self.emissions = emissions


class Recorder:
    """One early run's surroundings; what cannot be repeated on a hit is refused."""

    def __init__(self) -> None:
        self._obstacle: str | None = None
        self._emissions: Emissions | None = None

    def enter(self) -> None:
        """Set up the current context, which nothing but the early run may use."""
        _detach()
        InternalContextVar.set(self._refuse_context)  # type: ignore[arg-type]
        self._emissions = Emissions(keep=True)
        hear_instead(self._emissions)

    def close(self) -> None:
        """The tool's own code has ended; what it left behind, a client's worker say, lives as if started by stock."""
        if self._emissions is not None:
            self._emissions.close()

    def recorded(self, value: Any) -> Recorded:
        """What to keep of a run that returned `value`. Raises NotReplayable."""
        if self._emissions is not None and self._emissions.obstacle is not None:
            raise NotReplayable(self._emissions.obstacle)
        if self._obstacle is not None:
            raise NotReplayable(self._obstacle)
        for part in [value, *value] if isinstance(value, tuple | list) else [value]:
            check_reusable(part)
        return Recorded(copied(value), self._emissions.so_far() if self._emissions is not None else ())

    def _refuse_context(self) -> None:
        # Called by `Context.get_step_context`. What it would be used for is not known before the step runs.
        if self._emissions is not None and self._emissions.is_closed:
            return
        self._obstacle = "the tool asked for the workflow's context"
        raise NotReplayable(self._obstacle)


def unseen() -> Context:
    """A copy of the context in which no workflow is known and no observer of the run hears anything."""
    context = copy_context()
    context.run(_leave)
    return context


def run_tags() -> dict[str, Any]:
    """The instrument tags of the agent run, without those of its current step."""
    return {name: tag for name, tag in active_instrument_tags.get().items() if not name.startswith(_STEP_TAGS)}


def _detach() -> None:
    active_span_id.set(ROOT_SPAN)
    active_instrument_tags.set(run_tags())


def _no_context() -> None:
    """Stands for a weak reference to a workflow's context that is gone."""


def _leave() -> None:
    _detach()
    InternalContextVar.set(_no_context)  # type: ignore[arg-type]
    hear_instead(Emissions(keep=False))
