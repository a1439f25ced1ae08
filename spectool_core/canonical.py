"""The canonical key: two calls share a result exactly when the tool would receive equal arguments.

Arguments are written out in full, never hashed. Every value becomes a type tag and a body that shows where it ends, so
no two different values, however nested, give one text:

    None n    True t    False f    int i<hex>;    float d<repr>;    str s<length>:<text>    bytes b<hex>;
    list [...]    tuple (...)    dict {key value ...} sorted    set <...> sorted    frozenset ^...> sorted
    other listed types T<name>;(parts)    enum members, dataclasses, pydantic models, named tuples o<number>;(parts)
"""

from __future__ import annotations

import array
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import itertools
import pathlib
import uuid
import weakref
import zoneinfo
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MemberDescriptorType
from typing import Any, Generic, TypeAlias

import pydantic
import pydantic_core

from spectool_core.errors import CanonicalizationError

__all__ = ["CallKey", "canonicalize"]

Encoder: TypeAlias = Callable[[Any], str]


@dataclass(frozen=True, slots=True, eq=False)
class CallKey:
    """What must be equal for two calls to share one result.

    Args:
        tool: the tool object itself, compared by identity: two tools of one name never share. The key keeps it alive.
        scope: who may share a result, for instance a run and its thread.
        arguments: what the tool would receive, as `canonicalize` writes it.
    """

    tool: object
    scope: Hashable
    arguments: str = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CallKey)
            and self.tool is other.tool
            and self.arguments == other.arguments
            and self.scope == other.scope
        )

    def __hash__(self) -> int:
        return hash((id(self.tool), self.scope, self.arguments))


def canonicalize(arguments: Mapping[str, Any]) -> str:
    """The canonical text of a call's arguments: equal exactly when they are equal in type and value.

    The order of dicts and sets does not count; the order of lists, letter case, white space, Unicode form, the sign of
    a zero and the exponent of a Decimal do. The text is valid in this process only, as classes are told apart by
    identity.

    Raises CanonicalizationError, which gives the place and type of a value but never the value, for NaN, for types
    that are not listed here (subclasses of plain types too) and for containers that hold themselves.
    """
    try:
        return _pairs(arguments.items())
    except _NoCanonicalFormError as error:
        raise CanonicalizationError(f"{_place(arguments, error.value)}: {error.reason}") from None
    except RecursionError:
        raise CanonicalizationError("arguments: nested too deeply, or a container holds itself") from None


class _NoCanonicalFormError(Exception):
    def __init__(self, value: object, reason: str) -> None:
        self.value = value
        self.reason = reason


def _refuse(value: object) -> str:
    cls = type(value)
    raise _NoCanonicalFormError(value, f"{cls.__module__}.{cls.__qualname__} has no canonical form")


class _Encoders(dict[type, Encoder]):
    """The encoder of each exact type; those of users' classes are made when first met and go with their class."""

    def __init__(self) -> None:
        super().__init__()
        self._of_classes: weakref.WeakKeyDictionary[type, Encoder] = weakref.WeakKeyDictionary()

    def __missing__(self, cls: type) -> Encoder:
        encoder = self._of_classes.get(cls)
        if encoder is None:
            # setdefault: two threads that meet a class together must agree on its number.
            encoder = self._of_classes.setdefault(cls, _encoder_of_class(cls))
        return encoder


_encoders = _Encoders()


# Plain values. The test for str, by far the most common type, saves the look-up and call.


def _str(value: str) -> str:
    return f"s{len(value)}:{value}"


def _int(value: int) -> str:
    # Hexadecimal, as decimal digits are quadratic and limited (sys.set_int_max_str_digits).
    return f"i{value:x};"


def _float(value: float) -> str:
    if value != value:
        raise _NoCanonicalFormError(value, "NaN equals nothing, so it has no canonical form")
    return f"d{value!r};"


def _pairs(items: Iterable[tuple[Any, Any]]) -> str:
    parts = [
        (f"s{len(key)}:{key}" if type(key) is str else _encoders[type(key)](key))
        + (f"s{len(value)}:{value}" if type(value) is str else _encoders[type(value)](value))
        for key, value in items
    ]
    parts.sort()
    return f"{{{''.join(parts)}}}"


def _dict(value: dict[Any, Any]) -> str:
    return _pairs(value.items())


def _each(values: Iterable[Any]) -> list[str]:
    return [f"s{len(value)}:{value}" if type(value) is str else _encoders[type(value)](value) for value in values]


def _list(value: list[Any]) -> str:
    return f"[{''.join(_each(value))}]"


def _tuple(value: tuple[Any, ...]) -> str:
    return f"({''.join(_each(value))})"


def _set(value: set[Any]) -> str:
    return f"<{''.join(sorted(_each(value)))}>"


def _frozenset(value: frozenset[Any]) -> str:
    return f"^{''.join(sorted(_each(value)))}>"


_encoders.update(
    {
        type(None): lambda _: "n",
        bool: lambda value: "t" if value else "f",
        int: _int,
        float: _float,
        str: _str,
        bytes: lambda value: f"b{value.hex()};",
        list: _list,
        tuple: _tuple,
        dict: _dict,
        set: _set,
        frozenset: _frozenset,
    }
)


# Other exact types, each by parts that tell any two of its values apart.


def _array(value: array.array[Any]) -> tuple[Any, ...]:
    if value.typecode in "fd" and any(item != item for item in value):
        raise _NoCanonicalFormError(value, "NaN equals nothing, so it has no canonical form")
    return (value.typecode, value.tobytes())


def _decimal(value: decimal.Decimal) -> tuple[Any, ...]:
    if value.is_nan():
        raise _NoCanonicalFormError(value, "NaN equals nothing, so it has no canonical form")
    return tuple(value.as_tuple())


def _datetime(value: datetime.datetime) -> tuple[Any, ...]:
    return (value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo)


def _time(value: datetime.time) -> tuple[Any, ...]:
    return (value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo)


def _zone(value: zoneinfo.ZoneInfo) -> tuple[Any, ...]:
    if value.key is None:
        raise _NoCanonicalFormError(value, "a time zone without a key has no canonical form")
    return (value.key,)


def _text(value: object) -> tuple[Any, ...]:
    return (str(value),)


_PARTS: Mapping[type, Callable[[Any], tuple[Any, ...]]] = {
    complex: lambda value: (value.real, value.imag),
    bytearray: lambda value: (bytes(value),),
    array.array: _array,
    decimal.Decimal: _decimal,
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    datetime.datetime: _datetime,
    datetime.date: lambda value: (value.toordinal(),),
    datetime.time: _time,
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    datetime.timezone: lambda value: (value.utcoffset(None), value.tzname(None)),
    zoneinfo.ZoneInfo: _zone,
    pydantic_core.TzInfo: lambda value: (value.utcoffset(None),),
    uuid.UUID: lambda value: (value.int,),
    pathlib.PosixPath: _text,
    pathlib.WindowsPath: _text,
    pathlib.PurePosixPath: _text,
    pathlib.PureWindowsPath: _text,
    ipaddress.IPv4Address: _text,
    ipaddress.IPv6Address: _text,
    ipaddress.IPv4Network: _text,
    ipaddress.IPv6Network: _text,
    ipaddress.IPv4Interface: _text,
    ipaddress.IPv6Interface: _text,
    pydantic_core.Url: _text,
}


def _by_parts(prefix: str, parts: Callable[[Any], tuple[Any, ...]]) -> Encoder:
    return lambda value: prefix + _tuple(parts(value))


for _cls, _parts in _PARTS.items():
    _encoders[_cls] = _by_parts(f"T{_cls.__module__}.{_cls.__qualname__};", _parts)


# Users' classes. Two classes may share module and name (made in a loop), and an id is used again once its class is
# gone; a number that is never given twice is sound for both. No encoder refers to its class, or neither would ever go.

_class_numbers = itertools.count()


def _enum_parts(value: enum.Enum) -> tuple[Any, ...]:
    if isinstance(value, enum.Flag):
        return (value.value,)
    # A member that a `_missing_` method makes up is not known by its name.
    if type(value).__members__.get(value.name) is not value:
        _refuse(value)
    return (value.name,)


def _model_parts(value: pydantic.BaseModel) -> tuple[Any, ...]:
    # Which fields were set is left out: a default spelled out is the same argument.
    return (vars(value), value.__pydantic_extra__, value.__pydantic_private__)


def _instance_parts(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """All that an instance holds: a named tuple's items, its `__dict__`, and the slots of its class and bases."""
    slots = [
        (depth, name)
        for depth, base in enumerate(cls.__mro__)
        for name, attribute in vars(base).items()
        if isinstance(attribute, MemberDescriptorType)
    ]

    def parts(value: Any) -> tuple[Any, ...]:
        items = tuple(value) if isinstance(value, tuple) else ()
        return (items, getattr(value, "__dict__", None), *(_slot(value, depth, name) for depth, name in slots))

    return parts


def _slot(value: object, depth: int, name: str) -> list[Any]:
    try:
        return [vars(type(value).__mro__[depth])[name].__get__(value)]
    except AttributeError:  # an empty slot, which is not one that holds None
        return []


def _encoder_of_class(cls: type) -> Encoder:
    # Built-in bases are immutable types and may keep state that no attribute shows; these two keep none.
    stateless = (object, Generic)
    built_in = [base for base in cls.__mro__ if base.__flags__ & _IMMUTABLE_TYPE and base not in stateless]
    if issubclass(cls, enum.Enum):
        parts: Callable[[Any], tuple[Any, ...]] = _enum_parts
    elif issubclass(cls, pydantic.AnyUrl):
        parts = _text
    elif issubclass(cls, pydantic.BaseModel) and not built_in:
        parts = _model_parts
    elif (dataclasses.is_dataclass(cls) and not built_in) or (hasattr(cls, "_fields") and built_in == [tuple]):
        parts = _instance_parts(cls)
    else:
        return _refuse
    return _by_parts(f"o{next(_class_numbers)};", parts)


_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, CPython's Include/object.h


# Where a value without a canonical form is; looked for only once it is known to be there.


def _place(arguments: Mapping[str, Any], target: object) -> str:
    try:
        return next(_paths(arguments, target, "arguments"), "arguments")
    except RecursionError:
        return "arguments"


def _paths(value: Any, target: object, path: str) -> Iterator[str]:
    if value is target:
        yield path
        return
    for step, child in _children(value):
        yield from _paths(child, target, path + step)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield ".(key)", key
            yield (f".{key}" if isinstance(key, str) and key.isidentifier() else "[...]"), item
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from (("{...}", item) for item in value)
    elif isinstance(value, datetime.datetime | datetime.time):
        yield ".tzinfo", value.tzinfo
    elif isinstance(value, pydantic.BaseModel):
        for part in _model_parts(value):
            yield from _children(part)
    elif dataclasses.is_dataclass(value):
        names = value.__dataclass_fields__
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
