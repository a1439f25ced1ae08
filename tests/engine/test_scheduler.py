"""The schedulers with a tool cache, without a model: schedules of requests, posts, aborts and block counts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from spectool_core.errors import ConfigurationError
from spectool_core.vllm.wire import call_key
from tests.engine.scheduling import END, HEADER, RESULT, Engine, make_model_folder, turns_of

NUM_CALLS = 4
MAX_TURNS = 4


class Script:
    """A model whose turns are a function of the sequence before them: calls of `f`, wrong ones, two at once, text."""

    def __init__(self, tokenizer: Any) -> None:
        self.end, self.header, self.result = (tokenizer.convert_tokens_to_ids(text) for text in (END, HEADER, RESULT))
        self._encode = lru_cache(None)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._turns: dict[tuple[int, ...], tuple[int, ...]] = {}

    def prompt(self, number: int, length: int) -> list[int]:
        return [*self._encode(f"question {number} " + "x" * length), self.header]

    def call_text(self, *numbers: int) -> str:
        calls = [json.dumps({"name": "f", "arguments": {"x": number}}) for number in numbers]
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)

    def call_ids(self, *numbers: int) -> tuple[int, ...]:
        return (*self._encode(self.call_text(*numbers)), self.end)

    def suffix(self, *numbers: int) -> tuple[int, ...]:
        outputs = [(self.result, *self._encode(f"output {number} " + "y" * (20 * number))) for number in numbers]
        return (*(token for output in outputs for token in output), self.header)

    def calls(self, context: Sequence[int]) -> tuple[int, ...]:
        """The numbers of the calls of the turn that follows `context`."""
        if list(context).count(self.header) > MAX_TURNS:
            return ()
        seed = zlib.crc32(repr(tuple(context)).encode())
        kind = seed % 8
        if kind < 5:
            return (seed // 8 % NUM_CALLS,)
        return () if kind < 7 else (seed // 8 % NUM_CALLS, seed // 64 % NUM_CALLS)

    def turn(self, context: Sequence[int]) -> tuple[int, ...]:
        key = tuple(context)
        if key not in self._turns:
            calls = self.calls(key)
            text = self.call_text(*calls) if calls else "the answer is " + "z" * (len(key) % 30)
            self._turns[key] = (*self._encode(text), self.end)
        return self._turns[key]

    def __call__(self, sequence: Sequence[int]) -> int:
        start = len(sequence) - list(reversed(sequence)).index(self.header)
        turn, written = self.turn(sequence[:start]), len(sequence) - start
        return turn[written] if written < len(turn) else self.end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def script(folder: Path) -> Script:
    return Script(AutoTokenizer.from_pretrained(folder))


def key(number: int) -> str:
    return call_key("f", {"x": number})


def plan(script: Script, *numbers: int, **more: Any) -> dict[str, Any]:
    return {
        "turn": None,
        "keys": [key(number) for number in numbers],
        "call_ids": list(script.call_ids(*numbers)),
        "suffix_ids": list(script.suffix(*numbers)),
        "max_tokens": 200,
        **more,
    }


def announce(engine: Engine, script: Script, response_id: str) -> None:
    engine.commands.announce(response_id, [script.end])


def post_all(engine: Engine, script: Script, response_id: str) -> None:
    for number in range(NUM_CALLS):
        engine.commands.plan(response_id, plan(script, number))


def check(engine: Engine, script: Script, response_id: str, prompt: Sequence[int], *, max_tokens: int = 200) -> int:
    """Each turn is what a request on the sequence before it would have written; returns how many there were."""
    context = list(prompt)
    turns = list(turns_of(engine.outputs[response_id], script.end))
    for turn in turns:
        calls = script.calls(context)
        whole = list(script.turn(context))
        if turn is turns[-1] and str(engine.finished.get(response_id)) == "length":
            whole = whole[: min(max_tokens, engine.scheduler.max_model_len - len(context))]
        assert turn == whole
        context += [*turn, *script.suffix(*calls)]
    records = engine.commands.turns(response_id)
    if records:
        went_on = [record for record in records if record["outcome"] in ("injected", "resumed")]
        assert len(went_on) == len(turns) - 1
    return len(turns)


MODES = [{}, {"num_draft_tokens": 8}, {"num_draft_tokens": 32, "num_batched_tokens": 48}, {"is_async": True}]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_cached_call_is_injected(folder: Path, script: Script, mode: dict[str, Any]) -> None:
    engine = Engine(folder, script, **mode)
    prompts = {f"r{number}": script.prompt(number, 7 * number) for number in range(6)}
    for response_id, prompt in prompts.items():
        announce(engine, script, response_id)
        post_all(engine, script, response_id)
        engine.add(response_id, prompt, max_tokens=200, end_id=script.end)
    engine.run()
    num_turns = 0
    for response_id, prompt in prompts.items():
        num_turns += check(engine, script, response_id, prompt)
        last = engine.commands.turns(response_id)[-1]
        assert last["outcome"] == "finished"
        assert last["reason"] == ("no_calls" if not last["keys"] else "not_cached")
        assert len(last["keys"]) != 1, "a single cached call was not injected"
    assert num_turns > len(prompts)
    assert engine.commands.statistics()["num_injections"] == num_turns - len(prompts)
    engine.assert_nothing_left()


def test_drafts_save_steps_and_change_nothing(folder: Path, script: Script) -> None:
    engines = [Engine(folder, script), Engine(folder, script, num_draft_tokens=32)]
    for engine in engines:
        for number in range(4):
            announce(engine, script, f"r{number}")
            post_all(engine, script, f"r{number}")
            engine.add(f"r{number}", script.prompt(number, 5), max_tokens=200, end_id=script.end)
        engine.run()
        engine.assert_nothing_left()
    without, with_drafts = engines
    assert with_drafts.outputs == without.outputs
    statistics = with_drafts.commands.statistics()
    assert (
        statistics["num_accepted_tokens"] > 0.5 * statistics["num_draft_tokens"] > 0
    )  # four calls differ in one token
    assert statistics["num_steps"] < 0.6 * without.commands.statistics()["num_steps"]


def test_drafts_beyond_the_end_of_the_turn_leave_no_trace(folder: Path, script: Script) -> None:
    engine = Engine(folder, script, num_draft_tokens=128, num_batched_tokens=256)
    prompt = calling_prompt(script)
    (number,) = script.calls(prompt)
    announce(engine, script, "r0")
    too_long = [*script.call_ids(number), *[script.end] * 20]  # which this model would write too
    engine.commands.plan("r0", plan(script, number, call_ids=too_long))
    engine.add("r0", prompt, max_tokens=200, end_id=script.end)
    engine.run()
    assert check(engine, script, "r0", prompt) == 2
    engine.assert_nothing_left()


def test_without_an_announcement_nothing_differs(folder: Path, script: Script) -> None:
    engine = Engine(folder, script)
    engine.add("r0", script.prompt(0, 3), max_tokens=200, end_id=script.end)
    post_all(engine, script, "r0")
    engine.run()
    assert len(list(turns_of(engine.outputs["r0"], script.end))) == 1
    assert engine.scheduler.tool_responses.get("r0") is None
    engine.assert_nothing_left()


def test_before_anything_is_posted_the_output_is_not_decoded(
    folder: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder, script)
    prompt = calling_prompt(script)
    decoded = []
    read_calls = engine.scheduler._tool_format.read_calls

    def counted(token_ids: Sequence[int], tokenizer: Any) -> Any:
        decoded.append(len(token_ids))
        return read_calls(token_ids, tokenizer)

    monkeypatch.setattr(engine.scheduler._tool_format, "read_calls", counted)
    for response_id in ("unposted", "withdrawn"):
        announce(engine, script, response_id)
        engine.add(response_id, prompt, max_tokens=200, end_id=script.end)
    engine.commands.expect("withdrawn", [key(0)], None)
    engine.commands.expect("withdrawn", [], None)
    engine.run()
    (unposted,) = engine.commands.turns("unposted")
    (withdrawn,) = engine.commands.turns("withdrawn")
    assert (unposted["reason"], list(unposted["keys"])) == ("nothing_cached", [])
    assert (withdrawn["reason"], list(withdrawn["keys"])) == ("not_cached", [key(*script.calls(prompt))])
    assert len(decoded) == 1
    engine.assert_nothing_left()


def test_an_announcement_may_be_overtaken_by_its_request(folder: Path, script: Script) -> None:
    engine = Engine(folder, script)
    prompt = calling_prompt(script)
    engine.add("r0-12345678", prompt, max_tokens=200, end_id=script.end)
    engine.step()
    announce(engine, script, "r0")
    post_all(engine, script, "r0")
    engine.run()
    assert len(list(turns_of(engine.outputs["r0-12345678"], script.end))) == 2
    assert [record["outcome"] for record in engine.commands.turns("r0")] == ["injected", "finished"]
    engine.assert_nothing_left()


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}])
def test_requests_that_cannot_be_extended_are_left_alone(folder: Path, script: Script, params: dict[str, Any]) -> None:
    engine = Engine(folder, script)
    announce(engine, script, "r0")
    post_all(engine, script, "r0")
    engine.add("r0", script.prompt(0, 3), max_tokens=200, end_id=script.end, **params)
    assert engine.commands.turns("r0")[0]["reason"] == "prompt_logprobs"
    engine.abort("r0")
    engine.assert_nothing_left()


def calling_prompt(script: Script, num_calls: int = 1) -> list[int]:
    """A prompt whose first turn makes `num_calls` calls, and whose second turn answers in text."""
    for number in range(10_000):
        prompt = script.prompt(number, 3)
        calls = script.calls(prompt)
        if len(calls) == num_calls:
            following = [*prompt, *script.turn(prompt), *script.suffix(*calls)]
            if not script.calls(following):
                return prompt
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_pending_call_parks_and_resumes(folder: Path, script: Script, mode: dict[str, Any]) -> None:
    engine = Engine(folder, script, **mode)
    prompt = calling_prompt(script)
    (number,) = script.calls(prompt)
    announce(engine, script, "r0")
    engine.commands.expect("r0", [key(number)], None)
    engine.add("r0", prompt, max_tokens=200, end_id=script.end)
    engine.run()
    assert engine.commands.turns("r0")[-1]["outcome"] == "parked"
    assert "r0" not in engine.finished
    assert not engine.commands.resume("r0", 2, script.suffix(number), 200), "another turn"
    assert engine.commands.resume("r0", 1, list(script.suffix(number)), 200)
    assert not engine.commands.resume("r0", 1, list(script.suffix(number)), 200), "no longer parked"
    engine.run()
    assert check(engine, script, "r0", prompt) == 2
    assert [record["outcome"] for record in engine.commands.turns("r0")] == ["resumed", "finished"]
    engine.assert_nothing_left()


def test_a_released_sequence_is_freed(folder: Path, script: Script) -> None:
    engine = Engine(folder, script)
    prompt = calling_prompt(script)
    announce(engine, script, "r0")
    engine.commands.expect("r0", [key(*script.calls(prompt))], None)
    engine.add("r0", prompt, max_tokens=200, end_id=script.end)
    engine.run()
    assert engine.commands.release("r0", 1)
    assert not engine.commands.release("r0", 1)
    assert engine.commands.turns("r0")[-1]["outcome"] == "released"
    engine.commands.plan("r0", plan(script, 0))
    response = engine.scheduler.tool_responses.get("r0")
    assert (response.state, response.plans) == ("finished", {})
    engine.assert_nothing_left()


def test_several_calls_are_injected_by_a_plan_for_all(folder: Path, script: Script) -> None:
    engine = Engine(folder, script)
    prompt = calling_prompt(script, num_calls=2)
    calls = script.calls(prompt)
    announce(engine, script, "r0")
    engine.commands.plan("r0", plan(script, *calls))
    engine.add("r0", prompt, max_tokens=200, end_id=script.end)
    engine.run()
    assert check(engine, script, "r0", prompt) == 2
    engine.assert_nothing_left()


def test_parked_sequences_are_bounded_and_the_rest_finish(folder: Path, script: Script) -> None:
    engine = Engine(folder, script, num_seqs=4, num_blocks=128)
    prompt = calling_prompt(script)
    for number in range(5):
        announce(engine, script, f"r{number}")
        engine.commands.expect(f"r{number}", [key(*script.calls(prompt))], None)
        engine.add(f"r{number}", prompt, max_tokens=200, end_id=script.end)
    engine.run()
    outcomes = sorted(engine.commands.turns(f"r{number}")[-1]["outcome"] for number in range(5))
    assert outcomes == ["finished"] * 3 + ["parked"] * 2
    for number in range(5):
        engine.commands.release(f"r{number}", 1)
    engine.assert_nothing_left()


def test_parked_sequences_give_their_blocks_first(folder: Path, script: Script) -> None:
    engine = Engine(folder, script, num_blocks=16, max_model_len=240, prefix_caching=False)
    prompt = calling_prompt(script)
    (number,) = script.calls(prompt)
    announce(engine, script, "parked")
    engine.commands.expect("parked", [key(number)], None)
    engine.add("parked", prompt, max_tokens=200, end_id=script.end)
    engine.run()
    other = script.prompt(77, 110)
    engine.add("other", other, max_tokens=60, end_id=script.end)
    engine.run()
    statistics = engine.commands.statistics()
    assert statistics["num_yielded"] == 1
    assert engine.outputs["other"] == list(script.turn(other))[:60]
    assert engine.commands.resume("parked", 1, list(script.suffix(number)), 100)
    engine.run()
    assert check(engine, script, "parked", prompt) == 2
    engine.assert_nothing_left()


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_prefix_cache_is_reset_while_sequences_wait(
    folder: Path, script: Script, mode: dict[str, Any], *, is_resumed: bool
) -> None:
    """As when new weights are loaded: no KV from before may stay."""
    engine = Engine(folder, script, **mode)
    prompt = calling_prompt(script)
    (number,) = script.calls(prompt)
    announce(engine, script, "r0")
    engine.commands.expect("r0", [key(number)], None)
    engine.add("r0", prompt, max_tokens=200, end_id=script.end)
    engine.run()
    if is_resumed:
        assert engine.commands.resume("r0", 1, list(script.suffix(number)), 200)
    assert not engine.scheduler.reset_prefix_cache(reset_running_requests=False)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    if not is_resumed:
        assert engine.commands.resume("r0", 1, list(script.suffix(number)), 200)
    engine.run()
    assert check(engine, script, "r0", prompt) == 2
    engine.assert_nothing_left()


@pytest.mark.parametrize("num_blocks", range(16, 24))
def test_sequences_that_go_on_do_not_wait_for_each_other(folder: Path, script: Script, num_blocks: int) -> None:
    engine = Engine(folder, script, num_blocks=num_blocks, max_model_len=240, prefix_caching=False)
    prompt = calling_prompt(script)
    (number,) = script.calls(prompt)
    suffix = [*script.suffix(number)[:-1], *[script.result] * 90, script.header]
    for name in ("r0", "r1"):
        announce(engine, script, name)
        engine.commands.expect(name, [key(number)], None)
        engine.add(name, prompt, max_tokens=100, end_id=script.end)
    engine.run()
    for name in ("r0", "r1"):
        assert engine.commands.resume(name, 1, suffix, 20)
    engine.run()
    for name in ("r0", "r1"):
        first, second = turns_of(engine.outputs[name], script.end)
        assert second == list(script.turn([*prompt, *first, *suffix]))[:20]
    engine.assert_nothing_left()


@pytest.mark.parametrize("length", range(0, 64, 2))
def test_a_preempted_sequence_that_stops_late_is_not_extended(folder: Path, script: Script, length: int) -> None:
    engine = Engine(folder, script, num_blocks=14, max_model_len=200, prefix_caching=False, is_async=True)
    prompts = {"r0": script.prompt(1, length), "r1": calling_prompt(script)}
    for name, prompt in prompts.items():
        announce(engine, script, name)
        for number in range(NUM_CALLS):
            engine.commands.plan(name, plan(script, number, max_tokens=60))
        engine.add(name, prompt, max_tokens=60, end_id=script.end)
    engine.run()
    for name, prompt in prompts.items():
        check(engine, script, name, prompt, max_tokens=60)
    engine.assert_nothing_left()


def test_an_end_token_that_is_a_stop_token_is_not_reported(folder: Path, script: Script) -> None:
    engine = Engine(folder, script)
    prompt = calling_prompt(script)
    announce(engine, script, "r0")
    post_all(engine, script, "r0")
    engine.add("r0", prompt, max_tokens=200, end_id=script.result, stop_token_ids=[script.end])
    engine.run()
    assert check(engine, script, "r0", prompt) == 2
    assert [reason for reason in engine.stop_reasons["r0"] if reason is not None] == [script.end]
    engine.assert_nothing_left()


@pytest.mark.parametrize("settings_", [{"is_async": True, "num_draft_tokens": 8}])
def test_drafts_need_the_plain_scheduler(folder: Path, script: Script, settings_: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="scheduler_cls='AsyncToolScheduler' is not allowed"):
        Engine(folder, script, **settings_)


def test_a_turn_without_room_finishes(folder: Path, script: Script) -> None:
    prompt = calling_prompt(script)
    (number,) = script.calls(prompt)
    room = len(prompt) + len(script.turn(prompt))
    for limits, reason in (
        ({"max_model_len": room + 4}, "max_model_len"),
        ({"max_tokens": len(script.turn(prompt))}, "max_tokens"),
        ({"max_tokens": len(script.turn(prompt)) - 5}, "stopped_otherwise"),
    ):
        max_tokens = limits.pop("max_tokens", 200)
        engine = Engine(folder, script, **limits)
        announce(engine, script, "r0")
        engine.commands.plan("r0", plan(script, number, max_tokens=None))
        engine.add("r0", prompt, max_tokens=min(max_tokens, room + 4 - len(prompt)), end_id=script.end)
        engine.run()
        assert engine.commands.turns("r0")[-1]["reason"] == reason
        assert check(engine, script, "r0", prompt, max_tokens=max_tokens) == 1
        engine.assert_nothing_left()


@dataclass(frozen=True)
class Agent:
    """What a client does with one response: steps count from the engine's start."""

    comes_at: int
    length: int
    cached: frozenset[int]
    cached_later: tuple[tuple[int, int], ...]  # (step, call)
    pending: frozenset[int]
    tool_steps: int
    gives_up: bool
    aborts_at: int | None


CALLS = st.frozensets(st.integers(0, NUM_CALLS - 1))
AGENTS = st.builds(
    Agent,
    comes_at=st.integers(0, 40),
    length=st.integers(0, 60),
    cached=CALLS,
    cached_later=st.lists(st.tuples(st.integers(0, 150), st.integers(0, NUM_CALLS - 1)), max_size=3).map(tuple),
    pending=CALLS,
    tool_steps=st.integers(0, 40),
    gives_up=st.sampled_from([False, False, True]),
    aborts_at=st.one_of(st.none(), st.none(), st.integers(0, 200)),
)


class Client:
    """Follows one `Agent`'s plan beside an engine."""

    def __init__(self, name: str, agent: Agent, engine: Engine, script: Script, number: int) -> None:
        self.name, self.agent, self.engine, self.script = name, agent, engine, script
        self.prompt = script.prompt(number, agent.length)
        self.aborted = False
        self._parked_at: dict[int, int] = {}

    def act(self, step: int) -> None:
        agent, commands, script = self.agent, self.engine.commands, self.script
        if step == agent.comes_at:
            announce(self.engine, script, self.name)
            for number in agent.cached:
                commands.plan(self.name, plan(script, number, max_tokens=100))
            commands.expect(self.name, [key(number) for number in agent.pending | agent.cached], None)
            self.engine.add(self.name, self.prompt, max_tokens=100, end_id=script.end)
        for at, number in agent.cached_later:
            if step == at:
                commands.plan(self.name, plan(script, number, max_tokens=100))
        if step == agent.aborts_at and step > agent.comes_at:
            self.aborted = self.name not in self.engine.finished
            self.engine.abort(self.name)
        self._serve_parked(step)

    def _serve_parked(self, step: int) -> None:
        records = self.engine.commands.turns(self.name)
        if not records or records[-1]["outcome"] != "parked":
            return
        turn = records[-1]["turn"]
        if step - self._parked_at.setdefault(turn, step) < self.agent.tool_steps:
            return
        numbers = [json.loads(known.split("\0")[1])["x"] for known in records[-1]["keys"]]
        suffix = list(self.script.suffix(*numbers))
        if self.agent.gives_up or not self.engine.commands.resume(self.name, turn, suffix, 100):
            assert self.engine.commands.release(self.name, turn)


@settings(
    max_examples=200,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    mode=st.sampled_from(MODES),
    num_blocks=st.sampled_from([24, 24, 32, 48, 160]),
    prefix_caching=st.booleans(),
    agents=st.lists(AGENTS, min_size=2, max_size=6),
)
def test_generated_schedules(
    folder: Path, script: Script, mode: dict[str, Any], num_blocks: int, prefix_caching: bool, agents: list[Agent]
) -> None:
    engine = Engine(folder, script, num_blocks=num_blocks, max_model_len=330, prefix_caching=prefix_caching, **mode)
    clients = [Client(f"r{number}", agent, engine, script, number) for number, agent in enumerate(agents)]
    last_event = max(agent.comes_at for agent in agents)
    num_idle = 0
    for step in range(5000):
        for client in clients:
            client.act(step)
        if step > last_event and not engine.has_work and not engine.scheduler.tool_parked:
            break
        num_idle = 0 if engine.step() or not engine.has_work else num_idle + 1
        assert num_idle < 4, "no progress"
    else:
        raise AssertionError("no end")
    for client in clients:
        if not client.aborted:
            check(engine, script, client.name, client.prompt, max_tokens=100)
    engine.assert_nothing_left()
