import pytest

from examples.demo.frameworks import FRAMEWORKS, load
from examples.demo.tasks import TASKS

EVIDENCE = {
    "the last train": ["18 m/s", "30 minutes before", "| 16:10 | 16:26 |", "*17:58*", "a short working"],
    "the speed limit": [
        "restricted to 10 km/h",
        "dynamic brake of railcar 13 has been isolated",
        "gradient of 215 ‰",
        "| more than 200 ‰ | 14 km/h | 9 km/h |",
    ],
    "a failed token": ["first to the signalling inspector", "| Signalling inspector | Ines Corvane | 417 | *47 |"],
    "the worse month": [
        *(f"hours lost: {hours}." for hours in (3.5, 2.0, 6.0, 4.0, 9.5, 1.5)),
        "broke through at km 8.8, by the upper shed",
    ],
}
"""What the tools must have returned for each answer to be known."""


def by_title(task):
    return task.title


async def langgraph_output(tool, arguments):
    assert arguments.keys() <= tool.args.keys()
    return await tool.ainvoke(arguments)


async def llamaindex_output(tool, arguments):
    assert arguments.keys() <= tool.metadata.get_parameters_dict()["properties"].keys()
    return (await tool.acall(**arguments)).content


OUTPUTS = {"langgraph": langgraph_output, "llamaindex": llamaindex_output}


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    return load(request.param)


@pytest.fixture
def output(request, framework, tools):
    """Calls a tool as the framework's agent does."""
    made = dict(zip(tools, framework.tools(list(tools.values())), strict=True))
    output_of = OUTPUTS[request.node.callspec.params["framework"]]
    return lambda call: output_of(made[call.name], dict(call.arguments))


@pytest.mark.parametrize("task", TASKS, ids=by_title)
async def test_every_call_is_valid_and_succeeds(task, framework, output):
    task = task.spelled(framework.spelled)
    predicted = [call for turn in task.turns for call in turn.predicted or ()]
    for call in [*(call for turn in task.turns for call in turn.calls), *predicted, *task.predicted_last]:
        assert not (await output(call)).startswith(("error", "no line", "nothing"))


@pytest.mark.parametrize("task", TASKS, ids=by_title)
async def test_the_answer_stands_in_what_the_tools_return(task, framework, output):
    task = task.spelled(framework.spelled)
    outputs = [await output(call) for turn in task.turns for call in turn.calls]
    seen = " ".join(" ".join(outputs).replace("**", "").split())
    assert [fact for fact in EVIDENCE[task.title] if fact not in seen] == []


def test_questions_tell_the_scripts_apart():
    assert len({task.question for task in TASKS}) == len({task.title for task in TASKS}) == len(TASKS)
