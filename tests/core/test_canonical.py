from __future__ import annotations

import array
import copy
import datetime as dt
import enum
import gc
import io
import json
import math
import pathlib
import struct
import threading
import uuid
import weakref
import zoneinfo
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field, is_dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.canonical import CallKey, canonicalize
from spectool_core.errors import CanonicalizationError

TZIF = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + struct.pack(">lBB", 0, 0, 0) + b"UTC\0"


def key(value: Any) -> str:
    return canonicalize({"value": value})


def zone(name: str | None) -> zoneinfo.ZoneInfo:
    # From a file in memory, as a machine may have no time zone database.
    return zoneinfo.ZoneInfo.from_file(io.BytesIO(TZIF), key=name)


class Color(enum.Enum):
    RED = 1
    GREEN = "red"


class Size(enum.StrEnum):
    SMALL = "s"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Point:
    x: Any
    y: Any = 0


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Query(pydantic.BaseModel):
    text: Any
    limit: int = 10


class Loose(pydantic.BaseModel, extra="allow"):
    _seen: int = pydantic.PrivateAttr(default=0)


# An oracle that shares nothing with the encoder: equal in type and value, by walking both values.


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, dt.datetime | dt.time):
        bare = a.replace(tzinfo=None) == b.replace(tzinfo=None)
        return bare and a.fold == b.fold and repr(a.tzinfo) == repr(b.tzinfo)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, dict):
        return len(a) == len(b) and all(any(same(k, j) and same(v, w) for j, w in b.items()) for k, v in a.items())
    if is_dataclass(a) or isinstance(a, pydantic.BaseModel):
        return all(same(getattr(a, name), getattr(b, name)) for name in type(a).__annotations__)
    return bool(a == b)


# Few leaves, chosen to be confused with one another and with the encoding's own marks, so that pairs are often equal.
# fmt: off
confusable = st.sampled_from([
    None, True, False, 0, 1, -1, 16, 0.0, -0.0, 1.0, 1e16, 10**16, math.inf, -math.inf, 1j,
    "", "1", "n", "t", "i1;", "s1:1", "1:1", "]", "{", "a\u0301", "\u00e1", "\ud800", "A", "a", " a",
    b"", b"1", bytearray(b"1"), Decimal(1), Decimal("1.0"), Decimal("-0"), Decimal("Infinity"), Fraction(1),
    Color.RED, Color.GREEN, Size.SMALL, Access.READ, Access.READ | Access.WRITE, Access(0),
    dt.date(2024, 1, 1), dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, fold=1), dt.time(1), dt.timedelta(1),
    dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))),
    uuid.UUID(int=1), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a"), IPv4Address(1), IPv6Address(1),
])
# fmt: on
wide = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=4),
    st.decimals(allow_nan=False),
    st.datetimes(timezones=st.none() | st.timedeltas(-dt.timedelta(hours=9), dt.timedelta(hours=9)).map(dt.timezone)),
    st.timedeltas(),
)
leaves = confusable | wide


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


hashables = leaves.filter(is_hashable)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        st.dictionaries(hashables, inner, max_size=3),
        st.sets(hashables, max_size=3),
        st.frozensets(hashables, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Slotted, inner),
        st.builds(Pair, inner, inner),
        st.builds(Query, text=inner),
    )


values = st.recursive(leaves, containers, max_leaves=6)
small_values = st.recursive(confusable, containers, max_leaves=3)


@given(small_values, small_values)
def test_one_key_exactly_when_equal_in_type_and_value(a: Any, b: Any) -> None:
    assert (key(a) == key(b)) == same(a, b)


@given(values, values)
def test_one_key_exactly_when_equal_over_wide_values(a: Any, b: Any) -> None:
    assert (key(a) == key(b)) == same(a, b)


@given(values)
def test_a_copy_has_the_same_key(value: Any) -> None:
    assert key(copy.deepcopy(value)) == key(value)


@given(st.dictionaries(hashables, values, max_size=5), st.randoms())
def test_dict_order_does_not_count(value: dict[Any, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert key(dict(items)) == key(value)


@given(st.lists(st.integers(0, 40).map(lambda n: n * 8), max_size=8), st.randoms())
def test_set_order_does_not_count(items: list[int], random: Any) -> None:
    shuffled = random.sample(items, len(items))
    assert key(set(shuffled)) == key(set(items))
    assert key(frozenset(shuffled)) == key(frozenset(items))


# A reader of the encoding proves that nothing is lost: what can be read back cannot have collided.


def read(text: str, at: int) -> tuple[Any, int]:
    tag = text[at]
    if tag in "ntf":
        return {"n": None, "t": True, "f": False}[tag], at + 1
    if tag in "idb":
        end = text.index(";", at)
        body = text[at + 1 : end]
        return {"i": lambda: int(body, 16), "d": lambda: float(body), "b": lambda: bytes.fromhex(body)}[tag](), end + 1
    if tag == "s":
        colon = text.index(":", at)
        end = colon + 1 + int(text[at + 1 : colon])
        return text[colon + 1 : end], end
    items, at = [], at + 1
    while text[at] not in "])}>":
        item, at = read(text, at)
        items.append(item)
    pairs = dict(zip(items[::2], items[1::2], strict=True)) if tag == "{" else None
    return {"[": list, "(": tuple, "<": set, "^": frozenset, "{": lambda _: pairs}[tag](items), at + 1


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary()
plain_values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(plain, inner, max_size=3),
        st.sets(plain, max_size=3),
        st.frozensets(plain, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters()), plain_values))
def test_plain_arguments_can_be_read_back(arguments: dict[str, Any]) -> None:
    text = canonicalize(arguments)
    restored, end = read(text, 0)
    assert end == len(text)
    assert same(restored, arguments)


# The rows of the list of cases that concern keys.


def test_case_1_bytes_read_as_signed_and_unsigned_arrays() -> None:
    unsigned, signed = array.array("B", b"\xc8"), array.array("b", b"\xc8")
    assert len({key(unsigned), key(signed), key(b"\xc8"), key(bytearray(b"\xc8")), key([200]), key([-56])}) == 6
    assert key(array.array("B", b"\xc8")) == key(unsigned)
    with pytest.raises(CanonicalizationError, match=r"arguments\.value: numpy\.ndarray"):
        key(np.frombuffer(b"\xc8", np.uint8))


@pytest.mark.parametrize("number", [9223372036854775807, 10000000000000001, 2512292042121000001])
def test_case_2_long_numbers_keep_every_digit(number: int) -> None:
    assert len({key(number), key(number - 1), key(number + 1), key(float(number)), key(str(number))}) == 5


def test_case_2_numbers_beyond_the_limit_of_decimal_text() -> None:
    assert key(10**5000) != key(10**5000 + 1)


def test_case_3_dicts_lists_of_dicts_and_sets_have_a_key() -> None:
    assert isinstance(key({"a": [{"b": {1, 2}}], "c": set()}), str)


def test_case_13_an_integer_as_text_int_and_float() -> None:
    class Arguments(pydantic.BaseModel):
        n: int

    received: list[Any] = ["1", 1, 1.0]
    assert len({canonicalize({"n": n}) for n in received}) == 3
    assert len({canonicalize(dict(Arguments.model_validate({"n": n}))) for n in received}) == 1
    assert key(received[1] == 1) not in {key(n) for n in received}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (math.nan, "arguments.value"),
        ([1, {"a": (math.nan,)}], "arguments.value[1].a[0]"),
        ({math.nan}, "arguments.value{...}"),
        ({math.nan: 1}, "arguments.value.(key)"),
        ({"two words": math.nan}, "arguments.value[...]"),
        (Decimal("NaN"), "arguments.value"),
        (Decimal("sNaN"), "arguments.value"),
        (array.array("d", [math.nan]), "arguments.value"),
        (Point(1, math.nan), "arguments.value.y"),
        (Query(text=math.nan), "arguments.value.text"),
        (Loose(a=math.nan), "arguments.value.a"),
        (Pair(1, math.nan), "arguments.value[1]"),
    ],
)
def test_case_14_nan_has_no_key(value: Any, place: str) -> None:
    with pytest.raises(CanonicalizationError) as caught:
        key(value)
    assert str(caught.value).startswith(f"{place}: NaN ")


def test_case_21_white_space_key_order_and_defaults_spelled_out() -> None:
    texts = ['{"text": "x", "limit": 10}', '{ "limit" :10,\n"text":"x" }', '{"text":"x"}']
    assert len({canonicalize(dict(Query.model_validate(json.loads(text)))) for text in texts}) == 1
    assert len({key(Query.model_validate(json.loads(text))) for text in texts}) == 1


def test_case_22_letter_case_and_outer_spaces_count() -> None:
    assert len({key(text) for text in ("Paris", "paris", " Paris", "Paris ")}) == 4


def test_case_23_list_order_counts() -> None:
    assert key(["a", "b"]) != key(["b", "a"])


# Types.


def test_argument_names_count_and_the_kind_of_mapping_does_not() -> None:
    assert canonicalize({"a": 1}) != canonicalize({"b": 1})
    assert canonicalize(MappingProxyType({"a": 1})) == canonicalize({"a": 1})
    assert canonicalize({}) == "{}"


def test_the_tool_sees_the_sign_of_zero_and_the_exponent_of_a_decimal() -> None:
    assert key(0.0) != key(-0.0)
    assert key(Decimal("1.0")) != key(Decimal("1.00"))


def test_lone_surrogates_have_a_key() -> None:
    assert key("\ud800") != key("\udc00")


def test_time_zones_are_told_apart() -> None:
    fixed = dt.timezone(dt.timedelta(hours=1))
    validated = pydantic.TypeAdapter(dt.datetime).validate_python("2024-01-01T00:00:00+01:00").tzinfo
    named = dt.timezone(dt.timedelta(hours=1), "CET")
    zones = [None, zone("Europe/Berlin"), zone("Europe/Rome"), fixed, named, validated]
    assert len({key(dt.datetime(2024, 1, 1, tzinfo=tzinfo)) for tzinfo in zones}) == len(zones)
    assert len({key(dt.time(1, tzinfo=tzinfo)) for tzinfo in zones}) == len(zones)
    assert key(zone("Europe/Rome")) == key(zone("Europe/Rome"))


def test_a_time_zone_that_cannot_be_told_apart_is_refused() -> None:
    class Zone(dt.tzinfo): ...

    with pytest.raises(CanonicalizationError, match=r"arguments\.value\.tzinfo: .*Zone"):
        key(dt.datetime(2024, 1, 1, tzinfo=Zone()))
    with pytest.raises(CanonicalizationError, match="without a key"):
        key(dt.datetime(2024, 1, 1, tzinfo=zone(None)))


def test_addresses_and_urls() -> None:
    assert key(IPv4Address("10.0.0.1")) != key(IPv4Interface("10.0.0.1/8")) != key(IPv4Interface("10.0.0.1/9"))
    urls = ["https://a.example/x", "https://a.example/y"]
    assert len({key(kind(url)) for url in urls for kind in (pydantic.AnyUrl, pydantic.HttpUrl, str)}) == 6
    assert key(pydantic.HttpUrl("https://a.example")) == key(pydantic.HttpUrl("https://a.example/"))


def test_classes_of_one_name_are_told_apart() -> None:
    def kinds() -> list[Any]:
        class Color(enum.Enum):
            RED = 1

        @dataclass
        class Point:
            x: int

        class Model(pydantic.BaseModel):
            x: int

        return [Color.RED, Point(1), Model(x=1), namedtuple("N", "x")(1)]  # noqa: PYI024

    for one, other in zip(kinds(), kinds(), strict=True):
        assert key(one) == key(copy.copy(one)) != key(other)


@pytest.mark.parametrize("slots", [False, True])
def test_a_class_that_is_gone_leaves_nothing_and_its_number_is_not_used_again(slots: bool) -> None:
    def make() -> Any:
        @dataclass(slots=slots)
        class Point:
            x: int

        return Point(1)

    gone = make()
    texts = [key(gone)]
    alive = weakref.ref(type(gone))
    del gone
    gc.collect()
    assert alive() is None
    texts += [key(make()) for _ in range(20)]
    assert len(set(texts)) == len(texts)


def test_threads_that_meet_a_class_together_agree() -> None:
    for _ in range(20):
        point = dataclass(type("P", (), {"__annotations__": {"x": int}, "x": 1}))()
        barrier, texts = threading.Barrier(4), []

        def encode(point: Any = point, barrier: Any = barrier, texts: Any = texts) -> None:
            barrier.wait()
            texts.append(key(point))

        threads = [threading.Thread(target=encode) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(texts)) == 1


def test_all_that_an_instance_holds_counts() -> None:
    class Base:
        __slots__ = ("hidden",)

    @dataclass(slots=True)
    class Child(Base):
        x: int = field(default=1, compare=False)

    empty, none, one = Child(), Child(), Child()
    none.hidden, one.hidden = None, 1
    extended = Point(1)
    extended.z = 1  # type: ignore[attr-defined]
    private = Loose()
    private._seen = 1
    assert len({key(value) for value in (empty, none, one, Child(2))}) == 4
    assert key(Point(1)) != key(extended)
    assert len({key(value) for value in (Loose(), private, Loose(a=1), Loose(a="1"))}) == 4


def test_generic_classes_have_a_key() -> None:
    kind = TypeVar("kind")

    @dataclass
    class Box(Generic[kind]):
        x: kind

    class Model(pydantic.BaseModel, Generic[kind]):
        x: kind

    assert key(Box(1)) == key(Box(1)) != key(Box("1"))
    assert key(Model[int](x=1)) == key(Model[int](x=1)) != key(Model[float](x=1))


def test_an_enum_member_that_was_made_up_is_refused() -> None:
    class Made(enum.Enum):
        A = 1

        @classmethod
        def _missing_(cls, value: object) -> Any:
            made = object.__new__(cls)
            made._name_, made._value_ = "A", value
            return made

    assert isinstance(key(Made.A), str)
    with pytest.raises(CanonicalizationError, match="Made has no canonical form"):
        key(Made(2))


class Text(str): ...  # noqa: SLOT000


class Number(int): ...


@dataclass
class Rows(list):  # type: ignore[type-arg]
    name: str = ""


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda: None,
        int,
        range(3),
        memoryview(b"1"),
        iter([]),
        partial(int, "1"),
        Text("1"),
        Number(1),
        Rows(),
        OrderedDict(a=1),
        defaultdict(list),
        np.int64(1),
        np.str_("1"),
        pydantic.SecretStr("hunter2"),
        Exception("hunter2"),
        threading.Lock(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_by_place_and_type_only(value: Any) -> None:
    with pytest.raises(CanonicalizationError) as caught:
        canonicalize({"filters": ["hunter2", "hunter2", value]})
    message = str(caught.value)
    assert message == f"arguments.filters[2]: {type(value).__module__}.{type(value).__qualname__} has no canonical form"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_containers_that_hold_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop += [loop, loop]
    ring: dict[str, Any] = {}
    ring["ring"] = Point(ring)
    for value in (loop, ring):
        with pytest.raises(CanonicalizationError, match="holds itself"):
            key(value)
        with pytest.raises(CanonicalizationError, match="NaN"):
            key([math.nan, value])


def test_a_value_that_appears_twice_is_not_a_loop() -> None:
    shared = [1]
    assert key([shared, shared]) == key([[1], [1]])


# CallKey.


def test_call_keys_are_told_apart_by_the_tool_object_the_scope_and_the_arguments() -> None:
    class Tool(pydantic.BaseModel):  # equal, unhashable, as LangChain's tools are
        name: str = "search"

    one, other = Tool(), Tool()
    assert one == other
    base = CallKey(one, ("run", 1), "a")
    assert base == CallKey(one, ("run", 1), "a")
    assert hash(base) == hash(CallKey(one, ("run", 1), "a"))
    different = {CallKey(other, ("run", 1), "a"), CallKey(one, ("run", 2), "a"), CallKey(one, ("run", 1), "b")}
    assert len({base, *different}) == 4
    assert base != "a"


def test_a_call_key_does_not_show_arguments() -> None:
    assert "hunter2" not in repr(CallKey(len, None, canonicalize({"password": "hunter2"})))
