"""What was learned as a file: JSON lines, a header first; replaced as a whole, and checked line by line when read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spectool_core.errors import ConfigurationError
from spectool_core.speculators._history_knowledge import Knowledge, TemplateRates
from spectool_core.speculators._history_rates import Calibration, Rates, Situation
from spectool_core.speculators._history_templates import Source, Template

__all__ = ["read_knowledge", "write_knowledge"]

_FORMAT = "spectool history"
_VERSION = 1

_Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Rate = tuple[_Count, _Count]
_SituationRate = tuple[list[bool | str], _Count, _Count]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Header(_Line):
    format: Literal["spectool history"]
    version: int


class _TenantLine(_Line):
    tenant: str
    calibration: Annotated[list[_Rate], Field(min_length=Calibration.num_bins, max_length=Calibration.num_bins)]


class _ToolLine(_Line):
    tenant: str
    called: str
    rates: list[_SituationRate]


class _SourceEntry(_Line):
    pool: tuple[Literal["output", "text", "call"], str, str]
    pick: int | Literal["next", "following"]
    fields: list[tuple[str, str]]


class _TemplateLine(_Line):
    tenant: str
    tool: str
    sources: list[_SourceEntry]
    constants: list[tuple[str, str]]
    fits: list[_SituationRate]
    follows: list[_SituationRate]


def write_knowledge(path: Path, tenants: Mapping[str, Knowledge]) -> None:
    """Replace the file by one that holds `tenants`; what is at `path` stays as it is until that is whole.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            for line in _lines(tenants):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _lines(tenants: Mapping[str, Knowledge]) -> Iterator[Mapping[str, Any]]:
    yield {"format": _FORMAT, "version": _VERSION}
    for tenant, knowledge in tenants.items():
        yield {"tenant": tenant, "calibration": knowledge.calibration.bins()}
        for name, rates in knowledge.tools():
            yield {"tenant": tenant, "called": name, "rates": _entries(rates)}
        for template, of in knowledge.templates():
            yield {
                "tenant": tenant,
                "tool": template.tool,
                "sources": [source._asdict() for source in template.sources],
                "constants": template.constants,
                "fits": _entries(of.fits),
                "follows": _entries(of.follows),
            }


def _entries(rates: Rates) -> list[tuple[Situation, float, float]]:
    return [(situation, *rate) for situation, rate in rates.items()]


def read_knowledge(path: Path, tools: Collection[str] | None) -> dict[str, Knowledge]:
    """What the file holds of `tools` (None for all), by tenant.

    Raises:
        ConfigurationError: naming the file, the line and what is wrong with it.
        OSError: the file cannot be read.
    """
    tenants: dict[str, Knowledge] = {}
    number = 1
    with path.open("rb") as lines:
        _check_header(path, next(lines, b""))
        for number, line in enumerate(lines, 2):
            try:
                _read_line(line, tenants, tools)
            except (ValueError, KeyError, TypeError, RecursionError) as exc:
                raise _error(path, number, "a line that HistorySpeculator.save has written") from exc
    return tenants


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = _Header.model_validate_json(line)
    except ValidationError as exc:
        raise _error(path, 1, f'the header {{"format":"{_FORMAT}","version":{_VERSION}}}') from exc
    if header.version != _VERSION:
        raise _error(path, 1, f"version {_VERSION}; this file is of version {header.version}")


def _read_line(line: bytes, tenants: dict[str, Knowledge], tools: Collection[str] | None) -> None:
    if not line.endswith(b"\n"):
        raise ValueError("cut off")
    given = json.loads(line)
    if "calibration" in given:
        tenant = _TenantLine.model_validate_json(line)
        tenants[tenant.tenant] = Knowledge(Calibration(tenant.calibration), tools)
    elif "called" in given:
        tool = _ToolLine.model_validate_json(line)
        tenants[tool.tenant].add_tool(tool.called, _rates(tool.rates))
    else:
        entry = _TemplateLine.model_validate_json(line)
        tenants[entry.tenant].add(_template(entry), TemplateRates(_rates(entry.fits), _rates(entry.follows)))


def _template(entry: _TemplateLine) -> Template:
    for _, text in entry.constants:
        json.loads(text)
    sources = tuple(Source(each.pool, each.pick, tuple(each.fields)) for each in entry.sources)
    return Template(entry.tool, sources, tuple(entry.constants))


def _rates(entries: list[_SituationRate]) -> Rates:
    return Rates({tuple(situation): (num_right, num) for situation, num_right, num in entries})


def _error(path: Path, number: int, allowed: str) -> ConfigurationError:
    return ConfigurationError("path", f"{path}, line {number}", allowed)
