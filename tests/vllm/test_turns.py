from __future__ import annotations

from spectool_core.vllm.injection import Plan
from spectool_core.vllm.turns import Response, Responses, TurnRecord, keys_of

INTERNAL = "-12345678"


def plan(*keys: str, turn: int | None = None, suffix: int = 0) -> Plan:
    return Plan(keys, (1, 2, 3), (suffix,), turn)


def test_plans_of_the_turn_the_latest_first() -> None:
    response = Response(frozenset({9}))
    for added in (plan("a"), plan("b", turn=1), plan("c", turn=2), plan("a", suffix=5)):
        response.add(added)
    assert list(response.current_plans()) == [plan("a", suffix=5), plan("b", turn=1)]
    response.next_turn()
    assert list(response.current_plans()) == [plan("a", suffix=5), plan("c", turn=2)]
    response.expect(frozenset({"a"}), None)
    response.expect(frozenset(), None)
    assert list(response.current_plans()) == [plan("c", turn=2)]


def test_whether_anything_was_posted_so_far() -> None:
    response = Response(frozenset({9}))
    assert not response.has_posts
    response.add(plan("a"))
    assert response.has_posts
    withdrawn = Response(frozenset({9}))
    withdrawn.expect(frozenset({"a"}), None)
    withdrawn.expect(frozenset(), None)
    assert withdrawn.has_posts


def test_nothing_is_kept_of_turns_that_are_over_or_of_calls_that_are_gone() -> None:
    response = Response(frozenset({9}))
    for turn in range(1, 100):
        response.add(plan("a", turn=turn))
        response.expect(frozenset({"a"}), turn)
        response.next_turn()
        response.add(plan("late", turn=turn))
        response.expect(frozenset({"late"}), turn)
        assert (response.plans, response.expected) == ({}, {})
    for turn in range(100, 200):
        response.expect(frozenset({"a"}), turn)
        response.expect(frozenset(), turn)
    assert response.expected == {}
    assert response.has_posts


def test_what_a_turn_that_is_over_expects_no_longer_leaves_the_plans_of_the_next() -> None:
    response = Response(frozenset({9}))
    response.expect(frozenset({"a"}), 1)
    response.next_turn()
    response.add(plan("a", turn=2))
    response.expect(frozenset(), 1)
    assert list(response.current_plans()) == [plan("a", turn=2)]


def test_what_is_expected_in_a_turn() -> None:
    response = Response(frozenset({9}), expected={None: frozenset({"a"}), 1: frozenset({"b"}), 2: frozenset({"c"})})
    assert response.currently_expected() == {"a", "b"}
    response.next_turn()
    assert response.currently_expected() == {"a", "c"}


def test_drafts_begin_at_the_start_marker_of_each_turn() -> None:
    response = Response(frozenset({9}))
    response.add(Plan(("a",), (5, 6, 1, 2, 9), ()))
    assert response.draft([8, 8, 5], (5, 6), 8) == []
    assert response.draft([8, 8, 5, 6], (5, 6), 8) == [1, 2, 9]
    assert response.draft([8, 8, 5, 6, 1], (5, 6), 1) == [2]
    response.next_turn()
    assert response.draft([5], (5, 6), 8) == []
    assert response.draft([5, 6], (5, 6), 8) == [1, 2, 9]


def test_a_parked_turn_has_one_record() -> None:
    response = Response(frozenset({9}))
    response.record("parked", ("a",), 7)
    response.record("resumed", (), 0)
    response.next_turn()
    response.record("finished", (), 3, "no_calls")
    assert response.records == [TurnRecord(1, "resumed", ("a",), "", 7), TurnRecord(2, "finished", (), "no_calls", 3)]


def test_a_response_is_known_from_its_announcement_to_its_end() -> None:
    responses = Responses(4)
    response = responses.announce("chatcmpl-1", [9])
    assert responses.announce("chatcmpl-1", [8]) is response
    assert responses.begin("chatcmpl-2" + INTERNAL) is None
    assert responses.begin("chatcmpl-1" + INTERNAL) is response
    assert responses.begin("chatcmpl-1" + INTERNAL) is response, "a later chunk of its input"
    assert (response.state, response.request_id) == ("running", "chatcmpl-1" + INTERNAL)
    assert responses.of_request("chatcmpl-1" + INTERNAL) is response
    assert list(responses.running()) == [response]
    response.add(plan("a"))
    responses.end("chatcmpl-1" + INTERNAL)
    responses.end("chatcmpl-1" + INTERNAL)
    assert responses.of_request("chatcmpl-1" + INTERNAL) is None
    assert responses.get("chatcmpl-1") is response
    assert (response.state, response.plans) == ("finished", {})
    again = responses.announce("chatcmpl-1", [9])
    assert (again is response, again.state) == (False, "early")
    assert responses.get("chatcmpl-1") is again


def test_a_response_that_ends_while_it_is_parked_was_aborted() -> None:
    responses = Responses(4)
    response = responses.announce("r", [9])
    responses.begin("r" + INTERNAL)
    response.record("parked", ("a",), 7)
    response.state = "parked"
    responses.end("r" + INTERNAL)
    assert response.records == [TurnRecord(1, "finished", ("a",), "aborted", 7)]


def test_memory_is_bounded_and_running_responses_stay() -> None:
    responses = Responses(3)
    for number in range(10):
        responses.announce(f"running-{number}", [9])
        responses.begin(f"running-{number}{INTERNAL}")
    for number in range(100):
        responses.announce(f"early-{number}", [9])
    assert len(list(responses.running())) == 10
    assert len(responses) == 13
    for number in range(10):
        responses.end(f"running-{number}{INTERNAL}")
    assert len(responses) == 6


def test_calls_without_a_key() -> None:
    assert keys_of([("f", {"x": float("nan")})]) is None
    assert keys_of([]) == ()
