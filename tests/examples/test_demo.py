"""The whole demonstration with hardly any waiting: played back, and against endpoints that it takes for real ones."""

import re
from dataclasses import replace

import pytest

from examples.demo.__main__ import main
from examples.demo.agent import AgentRun
from examples.demo.comparison import Comparison
from examples.demo.frameworks import FRAMEWORKS
from examples.demo.tasks import TASKS
from examples.demo.tools import ToolRun
from examples.demo.turns import Turn
from spectool_core.testing import Answer, ModelServer, ScriptedCall

TITLES = {"langgraph": "One LangGraph agent ", "llamaindex": "One LlamaIndex FunctionAgent, "}

QUICK = ["--tool-delay", "0.01", "--main-delay", "0.02", "--speculator-delay", "0"]


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def only(monkeypatch):
    """Leaves the demonstration only the tasks of these titles."""

    def leave(*titles):
        monkeypatch.setattr("examples.demo.__main__.TASKS", [task for task in TASKS if task.title in titles])

    return leave


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    return ["--framework", request.param]


def test_played_back(capsys, only, framework):
    only("the speed limit", "a failed token")
    assert main(["--tool-delay", "0.02", "--main-delay", "0.2", "--speculator-delay", "0.01", *framework]) == 0
    output = capsys.readouterr().out
    assert "PLAYED BACK" in output
    assert re.search(r"predicted:\s+1;\s+early\s+runs:\s+0\.", output)
    assert re.search(r"transcripts\s+are\s+equal\s+in\s+every\s+task", output)
    assert TITLES[framework[1]] in output.splitlines()[0]
    assert re.search(r"^all +6 +5/6 +0\.83 +3 ", output, re.MULTILINE)


def test_real_endpoints(capsys, only, framework):
    only("the last train")

    def main_model(request):
        if not request.tools or request.turn:
            return Answer("1911")
        return Answer(tool_calls=[ScriptedCall("read_file", {"path": "history.md"})], generation_s=0.5)

    def speculator(request):
        return replace(main_model(request), generation_s=None)

    with ModelServer({"large": main_model, "small": speculator}) as server:
        arguments = ["--base-url", server.base_url, "--model", "large", "--speculator", "small", "--api-key", "x"]
        assert main([*QUICK, *arguments, *framework]) == 0
    output = capsys.readouterr().out
    assert "PLAYED BACK" not in output
    assert re.search(r"^all +1 +1/1 +1\.00 +0 ", output, re.MULTILINE)


def test_real_endpoints_that_answer_differently_are_no_failure(capsys, only):
    only("the last train")
    answers = iter(range(1000))

    def unsteady(request):
        return Answer(f"answer {next(answers)}")

    with ModelServer({"large": unsteady, "small": Answer("-")}) as server:
        arguments = ["--base-url", server.base_url, "--model", "large", "--speculator", "small", "--api-key", "x"]
        assert main([*QUICK, *arguments]) == 0
    assert "sampled anew" in capsys.readouterr().out


@pytest.mark.parametrize("models", [("large", "absent"), ("absent", "small")])
def test_a_model_that_is_not_there_stops_the_demonstration_at_once(models, capsys, framework):
    with ModelServer({"large": Answer("-"), "small": Answer("-")}) as server:
        arguments = ["--base-url", server.base_url, "--api-key", "x", "--model", models[0], "--speculator", models[1]]
        assert main([*arguments, *framework]) == 2
    assert "'absent'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "large"], "--speculator"),
        (["--base-url", "http://localhost:1/v1"], "--model"),
        (["--model", "large", "--speculator", "small"], "OPENAI_API_KEY"),
        (["--tool-delay", "-1"], "0 to 60"),
        (["--tool-delay", "nan"], "0 to 60"),
        (["--tool-delay", "soon"], "'soon' is not allowed"),
        (["--price-in", "-1"], "0 to 1000 dollars"),
        (["--framework", "autogen"], "'autogen'"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def turn_with(*runs, calls=()):
    return Turn(1, started_s=0.0, answered_s=1.0, ended_s=2.0, calls=calls, tool_runs=runs)


def run_of(turn, *messages, notes=()):
    return AgentRun("", messages, [turn], notes, [], num_prompt_tokens=0, num_completion_tokens=0)


WANTED = ("grep", {"pattern": "x", "under": ""})


@pytest.mark.parametrize(
    ("run", "early"),
    [
        (ToolRun(*WANTED, 0.2, 0.9, is_cancelled=False), "hit"),
        (ToolRun(*WANTED, 0.2, 1.1, is_cancelled=False), "join"),
        (ToolRun(*WANTED, 0.2, 1.0, is_cancelled=True), "wasted"),
        (ToolRun("grep", {"pattern": "y", "under": ""}, 0.2, 0.9, is_cancelled=False), "wasted"),
        (ToolRun(*WANTED, 1.1, 1.9, is_cancelled=False), None),
    ],
)
def test_what_became_of_a_run(run, early):
    turn = turn_with(run, calls=[WANTED])
    assert turn.early(run) == early
    assert turn.served(WANTED) == (early if early != "wasted" else None)


def test_an_early_run_whose_call_ran_again_is_wasted():
    early, again = ToolRun(*WANTED, 0.2, 0.9, is_cancelled=False), ToolRun(*WANTED, 1.1, 1.9, is_cancelled=False)
    turn = turn_with(early, again, calls=[WANTED])
    assert (turn.early(early), turn.early(again), turn.served(WANTED)) == ("wasted", None, None)


def test_a_bad_url_stops_the_demonstration_at_once(capsys):
    assert main(["--base-url", "nowhere", "--model", "large", "--speculator", "small", "--api-key", "x"]) == 2
    assert "base_url" in capsys.readouterr().err


def test_two_runs_are_one_only_with_equal_transcripts_and_notes():
    stock = run_of(turn_with(), {"text": "a"}, notes=[("t", "x")])
    assert Comparison("t", stock, replace(stock)).is_same_run
    assert not Comparison("t", stock, replace(stock, transcript=[{"text": "b"}])).is_same_run
    assert not Comparison("t", stock, replace(stock, notes=())).is_same_run


def test_an_early_write_is_counted():
    write = ToolRun("save_note", {}, 0.5, 0.9, is_cancelled=False)
    assert Comparison("t", run_of(turn_with()), run_of(turn_with(write))).num_early_writes == 1


def test_a_changed_transcript_fails_the_demonstration(capsys, monkeypatch, only):
    only("the worse month")
    monkeypatch.setattr(Comparison, "is_same_run", property(lambda _: False))
    assert main(QUICK) == 1
    assert "TRANSCRIPTS DIFFER" in capsys.readouterr().out
