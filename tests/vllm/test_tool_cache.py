"""What is posted for responses: bounded, secret, and never changed once the engine may have used it."""

from __future__ import annotations

from typing import Any

import pytest

from spectool_core.vllm.tool_cache import CachedResponse, Limits, ToolCache
from spectool_core.vllm.wire import ToolOutput, WireError, call_key

SECRET = "a-secret-of-a-request"
OTHER = "another-secret-of-one"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> ToolCache:
    return ToolCache(Limits(max_responses=3, max_entries=4, max_output_bytes=100, max_bytes=2000), clock=clock)


@pytest.fixture
def response(cache: ToolCache) -> CachedResponse:
    return cache.begin("chatcmpl-a", SECRET)


def output(name: str = "f", **fields: Any) -> ToolOutput:
    return ToolOutput.model_validate({"name": name, **fields})


def error_of(call: Any, *arguments: Any, **options: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        call(*arguments, **options)
    return caught.value


def refused(call: Any, *arguments: Any, **options: Any) -> int:
    return error_of(call, *arguments, **options).status


def texts(cache: ToolCache, response: CachedResponse, turn: int = 1) -> dict[str, str | None]:
    return {entry.name: entry.text for entry in cache.entries_in(response, turn).values()}


def test_only_who_knows_the_secret_finds_a_response(cache: ToolCache, response: CachedResponse) -> None:
    assert cache.find("chatcmpl-a", SECRET) is response
    errors = []
    for response_id, secret in (
        ("chatcmpl-a", OTHER),
        ("chatcmpl-b", SECRET),
        ("chatcmpl-a", None),
        ("chatcmpl-a", ""),
    ):
        with pytest.raises(WireError) as caught:
            cache.find(response_id, secret)
        errors.append((caught.value.status, caught.value.body()))
    assert all(error == errors[0] for error in errors)
    assert errors[0][0] == 404


def test_a_finished_response_is_told_from_an_unknown_one_only_to_who_knows_its_secret(
    cache: ToolCache, response: CachedResponse, clock: Clock
) -> None:
    cache.end(response)

    assert refused(cache.find, "chatcmpl-a", SECRET) == 409
    assert refused(cache.post, response, [output(output="late")]) == 409
    assert refused(cache.find, "chatcmpl-a", OTHER) == 404
    assert cache.find("chatcmpl-a", SECRET, may_be_finished=True).status(0)["state"] == "finished"
    clock.now_s += 61
    assert refused(cache.find, "chatcmpl-a", SECRET) == 404


def test_an_id_that_runs_cannot_be_taken_again_and_a_short_secret_is_none(
    cache: ToolCache, response: CachedResponse
) -> None:
    assert refused(cache.begin, "chatcmpl-a", SECRET) == 409
    assert refused(cache.check_new, "chatcmpl-a") == 409
    error = error_of(cache.begin, "chatcmpl-b", "short")
    assert (error.status, error.param) == (422, "X-Spectool-Secret")
    assert error.message == "X-Spectool-Secret: 5 characters; allowed: 16 to 256"
    cache.check_new("chatcmpl-b")
    cache.end(response)
    assert cache.begin("chatcmpl-a", OTHER) is not response
    assert refused(cache.find, "chatcmpl-a", SECRET) == 404


def test_responses_are_bounded(cache: ToolCache, response: CachedResponse) -> None:
    cache.begin("chatcmpl-b", SECRET)
    assert not cache.is_full
    cache.begin("chatcmpl-c", SECRET)
    assert cache.is_full
    error = error_of(cache.begin, "chatcmpl-d", SECRET)
    assert (error.status, error.message) == (503, "3 responses with a tool cache are running; allowed: 3")
    cache.end(response)
    cache.begin("chatcmpl-d", SECRET)


def test_an_output_completes_a_pending_entry_and_then_stays(cache: ToolCache, response: CachedResponse) -> None:
    assert cache.post(response, [output(pending=True)]) == 1
    assert texts(cache, response) == {"f": None}
    assert cache.post(response, [output(output="one")]) == 1
    assert cache.post(response, [output(output="two"), output(pending=False), output(pending=True)]) == 0
    assert texts(cache, response) == {"f": "one"}


def test_what_is_withdrawn_is_gone(cache: ToolCache, response: CachedResponse) -> None:
    cache.post(response, [output(pending=True)])

    assert cache.post(response, [output(pending=False)]) == 1
    assert cache.post(response, [output(pending=False)]) == 0
    assert texts(cache, response) == {}


def test_an_entry_for_a_turn_counts_in_that_turn_and_goes_first(cache: ToolCache, response: CachedResponse) -> None:
    cache.post(response, [output(output="any"), output(output="second", turn=2), output("g", output="third", turn=3)])

    assert texts(cache, response, 1) == {"f": "any"}
    assert texts(cache, response, 2) == {"f": "second"}
    assert texts(cache, response, 3) == {"f": "any", "g": "third"}


def test_entries_expire_and_may_then_be_posted_anew(cache: ToolCache, response: CachedResponse, clock: Clock) -> None:
    cache.post(response, [output(output="old", keep_alive=5)])
    clock.now_s += 4.9
    assert texts(cache, response) == {"f": "old"}
    clock.now_s += 0.2
    assert texts(cache, response) == {}
    assert cache.post(response, [output(output="new")]) == 1
    assert texts(cache, response) == {"f": "new"}
    clock.now_s += 59.9
    assert texts(cache, response) == {"f": "new"}
    clock.now_s += 0.2
    assert texts(cache, response) == {}


def test_what_has_expired_is_dropped_and_told(cache: ToolCache, response: CachedResponse, clock: Clock) -> None:
    cache.post(response, [output(output="old", keep_alive=5), output("g", pending=True)])
    told = []
    response.on_change = lambda: told.append(len(response.entries))
    cache.drop_stale(response)
    clock.now_s += 6

    cache.drop_stale(response)
    cache.drop_stale(response)

    assert told == [1]
    assert cache.num_bytes == next(iter(response.entries.values())).num_bytes


def test_entries_of_earlier_turns_make_room(cache: ToolCache, response: CachedResponse) -> None:
    cache.post(response, [output("any", output="kept")])
    for turn in range(1, 20):
        cache.begin_turn(response, turn)
        entries = [output(params={"n": number}, output="x" * 90, turn=turn) for number in range(3)]
        assert cache.post(response, entries) == 3
        assert len(response.entries) == 4
    assert cache.post(response, [output("late", output="x", turn=18)]) == 0
    assert cache.num_bytes == sum(entry.num_bytes for entry in response.entries.values())

    cache.begin_turn(response, 20)

    assert texts(cache, response, 20) == {"any": "kept"}
    assert response.turn == 20


def test_too_large_an_output_is_refused_and_nothing_of_the_post_is_taken(
    cache: ToolCache, response: CachedResponse
) -> None:
    assert refused(cache.post, response, [output("g", output=""), output(output="é" * 51)]) == 413
    assert texts(cache, response) == {}
    assert cache.post(response, [output(output="é" * 50)]) == 1


def test_an_output_that_is_refused_is_waited_for_no_more(cache: ToolCache, response: CachedResponse) -> None:
    cache.post(response, [output("f", pending=True), output("g", pending=True), output("h", output="there")])
    changes: list[None] = []
    response.on_change = lambda: changes.append(None)
    large = "x" * 101
    assert refused(cache.post, response, [output("f", output=large), output("h", output=large)]) == 413
    assert texts(cache, response) == {"g": None, "h": "there"}
    assert len(changes) == 1
    cache.end(response)
    assert cache.num_bytes == 0


def test_entries_and_bytes_are_bounded_and_come_back(cache: ToolCache, response: CachedResponse) -> None:
    for number in range(4):
        cache.post(response, [output(params={"n": number}, output="x" * 90)])
    error = error_of(cache.post, response, [output(params={"n": 4}, output="")])
    assert (error.status, error.message) == (503, "5 entries of one response; allowed: 4")
    others = [cache.begin(f"chatcmpl-{number}", SECRET) for number in range(2)]
    taken = 0
    statuses = set()
    for other in others:
        for number in range(4):
            large = output(params={"n": number, "x": "y" * 200}, output="z" * 90)
            try:
                taken += cache.post(other, [large])
            except WireError as exc:
                statuses.add(exc.status)
    assert statuses == {503}
    assert 0 < taken < 8
    assert cache.num_bytes <= 2000
    for ended in (response, *others):
        cache.end(ended)
    assert (cache.num_bytes, len(cache)) == (0, 0)


def test_a_change_is_told(cache: ToolCache, response: CachedResponse) -> None:
    told = []
    response.on_change = lambda: told.append(len(response.entries))

    cache.post(response, [output(pending=True)])
    cache.post(response, [output(pending=False)])

    assert told == [1, 0]


def test_the_status_says_what_is_there_and_what_was_refused_but_no_output(
    cache: ToolCache, response: CachedResponse
) -> None:
    cache.post(response, [output(params={"x": 1}, output="secret result"), output("g", pending=True, turn=2)])
    response.refuse(1, "not_cached")
    response.refuse(1, "not_cached")
    response.refuse(1, "cannot_render", "the output holds a control text")
    response.refuse(2, "cannot_render", "x" * 1_000_000)

    status = response.status(cache.clock())

    assert status["entries"] == [
        {"name": "f", "params": {"x": 1}, "state": "cached", "turn": None},
        {"name": "g", "params": {}, "state": "pending", "turn": 2},
    ]
    assert len(status["refused"].pop()["detail"]) == 1000
    assert status["refused"] == [
        {"turn": 1, "reason": "not_cached"},
        {"turn": 1, "reason": "cannot_render", "detail": "the output holds a control text"},
    ]
    assert "secret result" not in str(status)
    assert next(iter(response.entries.values())).key == call_key("f", {"x": 1})
