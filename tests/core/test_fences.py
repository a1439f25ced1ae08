from __future__ import annotations

import threading
from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from spectool_core import fences as fences_module
from spectool_core.fences import Fences

DOCS = frozenset({"docs"})
MAIL = frozenset({"mail"})
NOTHING: frozenset[str] = frozenset()


def is_stale_after(
    *, writes: frozenset[str] | None, fenced: Hashable | None, reads: frozenset[str] | None, scope: Hashable = "a"
) -> bool:
    fences = Fences()
    stamp = fences.stamp()
    fences.raise_(scope=fenced, writes=writes)
    return fences.is_stale(stamp, scope=scope, reads=reads)


def test_an_undeclared_write_makes_everything_in_its_scope_stale() -> None:
    assert is_stale_after(writes=None, fenced="a", reads=None)
    assert is_stale_after(writes=None, fenced="a", reads=DOCS)
    assert is_stale_after(writes=None, fenced="a", reads=NOTHING)
    assert not is_stale_after(writes=None, fenced="b", reads=None)


def test_an_undeclared_write_of_unknown_scope_makes_everything_stale() -> None:
    assert is_stale_after(writes=None, fenced=None, reads=None)
    assert is_stale_after(writes=None, fenced=None, reads=DOCS)


def test_a_declared_write_makes_stale_what_reads_it_in_every_scope() -> None:
    assert is_stale_after(writes=DOCS, fenced="b", reads=DOCS)
    assert is_stale_after(writes=DOCS, fenced="b", reads=DOCS | MAIL)
    assert is_stale_after(writes=DOCS, fenced="b", reads=None)
    assert not is_stale_after(writes=DOCS, fenced="a", reads=MAIL)
    assert not is_stale_after(writes=DOCS, fenced="a", reads=NOTHING)


def test_only_what_began_before_the_write_ended_is_stale() -> None:
    fences = Fences()
    before = fences.stamp()
    fences.raise_(scope="a", writes=None)
    after = fences.stamp()
    assert fences.is_stale(before, scope="a", reads=None)
    assert not fences.is_stale(after, scope="a", reads=None)
    fences.raise_(scope="b", writes=None)
    assert not fences.is_stale(after, scope="a", reads=None)


tags = st.none() | st.frozensets(st.sampled_from("xyz"), max_size=2)
scopes = st.sampled_from(["a", "b", "c"])


@settings(max_examples=200, deadline=None)
@given(
    writes=st.lists(st.tuples(st.none() | scopes, tags), max_size=8),
    position=st.integers(0, 8),
    scope=scopes,
    reads=tags,
)
def test_a_run_is_stale_exactly_when_a_later_write_meets_it(
    writes: list[tuple[str | None, frozenset[str] | None]], position: int, scope: str, reads: frozenset[str] | None
) -> None:
    fences = Fences()
    stamp = fences.stamp()
    expected = False
    for number, (fenced, written) in enumerate(writes):
        if number == position:
            stamp, expected = fences.stamp(), False
        fences.raise_(scope=fenced, writes=written)
        if written is None:
            expected |= fenced is None or fenced == scope
        else:
            expected |= reads is None or bool(written & reads)
    assert fences.is_stale(stamp, scope=scope, reads=reads) == expected


def test_a_fence_that_is_forgotten_for_want_of_room_still_fences(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fences_module, "_MAX_SCOPES", 8)
    fences = Fences()
    stamp = fences.stamp()
    for number in range(100):
        fences.raise_(scope=number, writes=None)
        assert len(fences._scopes) <= 8
    late = fences.stamp()
    assert all(fences.is_stale(stamp, scope=number, reads=DOCS) for number in range(100))
    assert not fences.is_stale(late, scope=0, reads=None)
    assert not fences.is_stale(late, scope=99, reads=None)


def test_ten_thousand_runs_are_bounded() -> None:
    fences = Fences()
    stamp = fences.stamp()
    for number in range(10_000):
        fences.raise_(scope=("run", number), writes=None)
    assert len(fences._scopes) == 4096
    assert fences.is_stale(stamp, scope=("run", 0), reads=None)
    assert fences.is_stale(stamp, scope=("run", 9_999), reads=None)


def test_no_fence_of_another_thread_is_lost() -> None:
    fences = Fences()
    stamp = fences.stamp()
    barrier = threading.Barrier(4)

    def write(scope: int) -> None:
        barrier.wait()
        for number in range(500):
            fences.raise_(scope=(scope, number % 7), writes=frozenset({f"{scope}-{number}"}) if number % 2 else None)

    threads = [threading.Thread(target=write, args=(scope,)) for scope in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fences.stamp() == stamp + 2000
    for scope in range(4):
        assert all(fences.is_stale(stamp, scope=(scope, number), reads=NOTHING) for number in range(7))
        assert all(
            fences.is_stale(stamp, scope="other", reads=frozenset({f"{scope}-{number}"})) for number in range(1, 500, 2)
        )
