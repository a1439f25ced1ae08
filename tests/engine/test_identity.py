"""Engine mode writes, greedily, the very tokens that the client path writes: real model, one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.engine.in_process import CITIES, InProcess, Written, key

pytestmark = pytest.mark.timeout(400)

Expected: TypeAlias = dict[str, tuple[Written, Written]]
ExpectedOf: TypeAlias = Callable[[InProcess], Expected]

LEVELS: dict[str, dict[str, Any]] = {"o3": {"level": "o3"}, "o2+o3": {"level": "o2+o3"}}
UNDER_PRESSURE: dict[str, dict[str, Any]] = {
    "o2+o3 in chunks, no prefix cache": {
        "level": "o2+o3",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
    },
    "o3 with preemption": {
        "level": "o3",
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 13,  # of which one is vLLM's own
        "max_model_len": 1024,
    },
}


@pytest.fixture(scope="module")
def engines(model_folder: Path) -> Callable[[str], InProcess]:
    """The engine of a configuration, made when it is first asked for."""
    return cache(lambda name: InProcess(model_folder, **{**LEVELS, **UNDER_PRESSURE}[name]))


@pytest.fixture(scope="module")
def expected_of(engines: Callable[[str], InProcess]) -> ExpectedOf:
    """Both turns of each city as a client asks for them: on the plain o3 engine, whatever the configuration."""

    @cache
    def of_prompts(system: str) -> Expected:
        reference = engines("o3")
        before, reference.system = reference.system, system
        reference.warm_up()
        expected = reference.client_side(CITIES)
        reference.system = before
        return expected

    return lambda engine: of_prompts(engine.system)


@pytest.fixture
def engine(engines: Callable[[str], InProcess]) -> InProcess:
    engine = engines("o2+o3")
    engine.warm_up()
    return engine


@pytest.fixture(params=LEVELS)
def each_level(request: pytest.FixtureRequest, engines: Callable[[str], InProcess]) -> InProcess:
    engine = engines(request.param)
    engine.warm_up()
    return engine


@pytest.fixture(params=UNDER_PRESSURE)
def pressed(request: pytest.FixtureRequest, engines: Callable[[str], InProcess]) -> InProcess:
    engine = engines(request.param)
    # The prompt ends shortly before the end of a block, so that each sequence soon needs another one.
    block_size = engine.scheduler.cache_config.block_size
    while len(engine.prompt("London")) % block_size < block_size - 16:
        engine.system += " Be brief."
    return engine


def assert_the_same_tokens(engine: InProcess, expected: Expected, cities: Sequence[str]) -> None:
    engine.commands.statistics(reset=True)
    for city in cities:
        engine.announce(city)
        engine.add(city, engine.prompt(city))
        engine.post(city, city)
    written = engine.run()
    for city in cities:
        first, second = expected[city]
        assert written[city].token_ids == first.token_ids + second.token_ids
        assert written[city].finish_reason == second.finish_reason
        assert [record["outcome"] for record in engine.commands.turns(city)] == ["injected", "finished"]
    assert engine.commands.statistics()["num_injections"] == len(cities)
    engine.assert_nothing_left()


@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_the_same_tokens(each_level: InProcess, expected_of: ExpectedOf, num_requests: int) -> None:
    assert_the_same_tokens(each_level, expected_of(each_level), CITIES[:num_requests])


def test_the_same_tokens_under_pressure(
    pressed: InProcess, expected_of: ExpectedOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_preemptions = 0
    stock = pressed.scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_preemptions
        num_preemptions += 1
        return stock(*args, **kwargs)

    monkeypatch.setattr(pressed.scheduler, "_preempt_request", counted)
    assert_the_same_tokens(pressed, expected_of(pressed), CITIES[:4])
    if pressed.scheduler.cache_config.num_gpu_blocks == 13:
        assert num_preemptions > 0


def test_posted_before_the_request_and_during_it(engine: InProcess, expected_of: ExpectedOf) -> None:
    expected = expected_of(engine)["Lima"]
    both = expected[0].token_ids + expected[1].token_ids
    for num_steps in (0, 1, 20):
        name = f"Lima-{num_steps}"
        engine.announce(name)
        if not num_steps:
            engine.post(name, "Lima")
        engine.add(name, engine.prompt("Lima"))
        written = {}
        for _ in range(num_steps):
            written.update(engine.step())
        engine.post(name, "Lima")
        written.update(engine.run())
        # Drafts may have ended the turn before the post.
        assert written[name].token_ids in (both, expected[0].token_ids)
        assert (written[name].token_ids == both) == (engine.commands.turns(name)[0]["outcome"] == "injected")
    engine.assert_nothing_left()


def test_a_wrong_call_changes_nothing(engine: InProcess, expected_of: ExpectedOf) -> None:
    expected = expected_of(engine)["Tokyo"][0]
    engine.commands.statistics(reset=True)
    engine.announce("wrong")
    engine.post("wrong", "Kyoto")
    engine.add("wrong", engine.prompt("Tokyo"))
    assert engine.run()["wrong"] == expected
    assert engine.commands.turns("wrong")[0]["reason"] == "not_cached"
    statistics = engine.commands.statistics()
    assert 0 < statistics["num_accepted_tokens"] < statistics["num_draft_tokens"]
    engine.assert_nothing_left()


def test_budgets_that_end_in_the_middle(engine: InProcess, expected_of: ExpectedOf) -> None:
    first, second = expected_of(engine)["Dublin"]
    for max_tokens in (len(first.token_ids) - 3, len(first.token_ids), len(first.token_ids) + 3):
        name = f"Dublin-{max_tokens}"
        engine.announce(name)
        engine.post(name, "Dublin", max_tokens=None)
        engine.add(name, engine.prompt("Dublin"), max_tokens=max_tokens)
        written = engine.run()[name]
        assert written.token_ids == (first.token_ids + second.token_ids)[:max_tokens]
        assert written.finish_reason == ("stop" if max_tokens == len(first.token_ids) else "length")
    engine.announce("fresh")
    engine.post("fresh", "Dublin", max_tokens=3)
    engine.add("fresh", engine.prompt("Dublin"))
    assert engine.run()["fresh"].token_ids == first.token_ids + second.token_ids[:3]
    engine.assert_nothing_left()


def test_logprobs_come_for_every_token(engine: InProcess, expected_of: ExpectedOf) -> None:
    first, second = expected_of(engine)["Vienna"]
    engine.announce("logprobs")
    engine.post("logprobs", "Vienna")
    engine.add("logprobs", engine.prompt("Vienna"), logprobs=2)
    written = engine.run()["logprobs"]
    assert written.token_ids == first.token_ids + second.token_ids
    assert written.num_logprobs == len(written.token_ids)
    engine.assert_nothing_left()


def test_aborts_at_every_stage_leave_nothing(each_level: InProcess) -> None:
    engine = each_level
    for stage in ("prefill", "first turn", "injected", "second turn"):
        name = f"abort in {stage}"
        engine.announce(name)
        engine.post(name, "Athens")
        num_injections = engine.commands.statistics()["num_injections"]
        engine.add(name, engine.prompt("Athens"))
        engine.step()
        if stage == "first turn":
            engine.step()
        while stage in ("injected", "second turn") and (
            engine.commands.statistics()["num_injections"] == num_injections
        ):
            engine.step()
        if stage == "second turn":
            engine.step()
            engine.step()
        engine.engine.abort_request([name])
        engine.run()
        engine.assert_nothing_left()


def test_a_call_that_still_runs_parks_the_sequence(each_level: InProcess, expected_of: ExpectedOf) -> None:
    engine = each_level
    first, second = expected_of(engine)["Madrid"]
    for resumed in (True, False):
        name = f"parked, {resumed}"
        engine.announce(name)
        engine.commands.expect(name, [key("Madrid")], None)
        engine.add(name, engine.prompt("Madrid"))
        assert engine.run() == {}
        assert len(engine.scheduler.tool_parked) == 1
        if resumed:
            assert engine.commands.resume(name, 1, engine.suffix("Madrid"), 96)
            assert engine.run()[name].token_ids == first.token_ids + second.token_ids
        else:
            assert engine.commands.release(name, 1)
            engine.engine.abort_request([name])
    engine.assert_nothing_left()


def test_parked_sequences_yield_their_blocks_to_others(pressed: InProcess, expected_of: ExpectedOf) -> None:
    parked, others = CITIES[4:6], CITIES[6:8]
    expected = expected_of(pressed)
    pressed.commands.statistics(reset=True)
    for city in parked:
        pressed.announce(f"{city}-parked")
        pressed.commands.expect(f"{city}-parked", [key(city)], None)
        pressed.add(f"{city}-parked", pressed.prompt(city))
    pressed.run()
    for city in others:
        pressed.add(f"{city}-other", pressed.prompt(city))
    written = pressed.run()
    assert [written[f"{city}-other"] for city in others] == [expected[city][0] for city in others]
    for city in parked:
        assert pressed.commands.resume(f"{city}-parked", 1, pressed.suffix(city), 96)
    written = pressed.run()
    for city in parked:
        first, second = expected[city]
        assert written[f"{city}-parked"].token_ids == first.token_ids + second.token_ids
    if pressed.scheduler.cache_config.num_gpu_blocks == 13:
        assert pressed.commands.statistics()["num_yielded"] > 0
    pressed.assert_nothing_left()
