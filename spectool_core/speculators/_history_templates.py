"""Templates: where the arguments of a tool's calls come from."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from spectool_core.speculators._history_conversation import Batch, Conversation, Pool
from spectool_core.speculators._history_values import Record, scalar_key, value_key

__all__ = ["Lookup", "Pick", "Source", "Template", "templates_of"]

Pick: TypeAlias = int | Literal["next", "following"]
"""Which record of a pool: a position in the latest batch, the first there that no call of the tool has used, or the
first of all batches after the last used one."""

_MAX_TEMPLATES = 12
_MAX_POSITION = 2


class Source(NamedTuple):
    """Arguments that come from one record; `fields` are pairs of an argument and a field of the record."""

    pool: Pool
    pick: Pick
    fields: tuple[tuple[str, str], ...]


class Template(NamedTuple):
    """A tool, and where each argument of a call comes from; `constants` are pairs of an argument and its JSON."""

    tool: str
    sources: tuple[Source, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()


@lru_cache(1024)
def _scalar(text: str) -> Any:
    return json.loads(text)


class Lookup:
    """Fills templates at one moment of a conversation; what several of them share is looked up once."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._found: dict[tuple[str, Source], tuple[Record, bool] | None] = {}
        self._used: dict[tuple[str, tuple[str, ...]], set[tuple[Hashable, ...]]] = {}

    def fill(self, template: Template) -> tuple[dict[str, Any], bool] | None:
        """The arguments, and whether any of them came since the last answer; None where something is missing."""
        arguments: dict[str, Any] = {}
        fresh = False
        for source in template.sources:
            key = template.tool, source
            if key not in self._found:
                self._found[key] = self._look_up(template.tool, source)
            found = self._found[key]
            if found is None:
                return None
            record, is_new = found
            fresh |= is_new
            for argument, field in source.fields:
                arguments[argument] = record[field]
        for argument, text in template.constants:
            # What may be changed by whom it is given to is made anew.
            arguments[argument] = json.loads(text) if text.startswith(("[", "{")) else _scalar(text)
        return arguments, fresh

    def _look_up(self, tool: str, source: Source) -> tuple[Record, bool] | None:
        batches = self._conversation.pools.get(source.pool)
        if not batches:
            return None
        found = self._pick(tool, source, batches)
        if found is None or any(field not in found[1] for _, field in source.fields):
            return None
        batch, record = found
        return record, batch.turn == self._conversation.turn

    def _pick(self, tool: str, source: Source, batches: list[Batch]) -> tuple[Batch, Record] | None:
        if isinstance(source.pick, int):
            records = batches[-1].records
            return (batches[-1], records[source.pick]) if -len(records) <= source.pick < len(records) else None
        fields = [field for _, field in source.fields]
        used = self._used_by(tool, tuple(argument for argument, _ in source.fields))
        if source.pick == "next":
            batches = batches[-1:]
        chosen: tuple[Batch, Record] | None = None
        for batch in batches:
            for record in batch.records:
                if tuple(value_key(record.get(field)) for field in fields) in used:
                    chosen = chosen if source.pick == "next" else None
                elif chosen is None:
                    chosen = batch, record
        return chosen

    def _used_by(self, tool: str, arguments: tuple[str, ...]) -> set[tuple[Hashable, ...]]:
        """The values that calls of a tool had for these arguments."""
        if (tool, arguments) not in self._used:
            made = self._conversation.calls_of.get(tool, ())
            self._used[tool, arguments] = {tuple(value_key(each.get(name)) for name in arguments) for each in made}
        return self._used[tool, arguments]


def templates_of(
    tool: str, arguments: Mapping[str, Any], conversation: Conversation, repeated: Collection[str]
) -> list[Template]:
    """The templates that would have led to a call, those that take the most from one record first.

    Args:
        tool: the tool's name.
        arguments: of the call.
        conversation: what was known before the call.
        repeated: the arguments whose values may be taken for constants.
    """
    constants = {argument: json.dumps(arguments[argument], sort_keys=True) for argument in repeated}
    found: dict[Template, None] = {}
    if len(constants) == len(arguments):
        found[Template(tool, (), tuple(sorted(constants.items())))] = None
    groups = _groups(arguments, conversation)
    lookup = Lookup(conversation)
    for first in groups:
        chosen, left = _cover([first, *groups], set(arguments))
        if not left <= constants.keys():
            continue
        ways = [list(_sources(tool, group, arguments, lookup, conversation)) for group in chosen]
        if all(ways):
            rest = tuple(sorted((argument, constants[argument]) for argument in left))
            others = tuple(each[0] for each in ways[1:])
            found |= {Template(tool, (source, *others), rest): None for source in ways[0]}
        if len(found) >= _MAX_TEMPLATES:
            break
    return list(found)[:_MAX_TEMPLATES]


class _Group(NamedTuple):
    """A record that holds arguments of a call: in which field each."""

    pool: Pool
    batch: int
    record: int
    fields: dict[str, str]


def _groups(arguments: Mapping[str, Any], conversation: Conversation) -> list[_Group]:
    """The records that hold arguments, those that hold the most first, then the newest."""
    found: dict[tuple[Pool, int, int], dict[str, str]] = {}
    for argument, value in arguments.items():
        key = scalar_key(value)
        for place in conversation.places.get(key, ()) if key is not None else ():
            fields = found.setdefault((place.pool, place.batch, place.record), {})
            if argument not in fields or place.field == argument:
                fields[argument] = place.field
    groups = [_Group(*where, fields) for where, fields in found.items()]
    pools = conversation.pools
    return sorted(groups, key=lambda group: (-len(group.fields), -pools[group.pool][group.batch].turn))


def _cover(groups: list[_Group], arguments: set[str]) -> tuple[list[_Group], set[str]]:
    """Groups, in their order, for as many arguments as there are in them, and the arguments that are left."""
    chosen: list[_Group] = []
    for group in groups:
        fields = {argument: field for argument, field in group.fields.items() if argument in arguments}
        if fields:
            chosen.append(group._replace(fields=fields))
            arguments = arguments - fields.keys()
    return chosen, arguments


def _sources(
    tool: str, group: _Group, arguments: Mapping[str, Any], lookup: Lookup, conversation: Conversation
) -> Iterator[Source]:
    """The ways to come upon the values of a group at this moment."""
    batches = conversation.pools[group.pool]
    num_records = len(batches[-1].records)
    picks: list[Pick] = ["next"] if num_records > 1 else []
    picks += ["following"] if num_records > 1 or len(batches) > 1 else []
    if group.batch == len(batches) - 1:
        picks += [group.record] if group.record <= _MAX_POSITION else []
        picks += [group.record - num_records] if 0 < group.record >= num_records - _MAX_POSITION else []
    fields = tuple(sorted(group.fields.items()))
    for pick in picks:
        source = Source(group.pool, pick, fields)
        filled = lookup.fill(Template(tool, (source,)))
        if filled is not None and all(value_key(v) == value_key(arguments[a]) for a, v in filled[0].items()):
            yield source
