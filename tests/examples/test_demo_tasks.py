import pytest

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


@pytest.mark.parametrize("task", TASKS, ids=by_title)
async def test_every_call_is_valid_and_succeeds(task, tools):
    predicted = [call for turn in task.turns for call in turn.predicted or ()]
    for call in [*(call for turn in task.turns for call in turn.calls), *predicted, *task.predicted_last]:
        tool = tools[call.name]
        assert call.arguments.keys() <= tool.args.keys()
        assert not (await tool.ainvoke(dict(call.arguments))).startswith(("error", "no line", "nothing"))


@pytest.mark.parametrize("task", TASKS, ids=by_title)
async def test_the_answer_stands_in_what_the_tools_return(task, tools):
    outputs = [await tools[call.name].ainvoke(dict(call.arguments)) for turn in task.turns for call in turn.calls]
    seen = " ".join(" ".join(outputs).replace("**", "").split())
    assert [fact for fact in EVIDENCE[task.title] if fact not in seen] == []


def test_questions_tell_the_scripts_apart():
    assert len({task.question for task in TASKS}) == len({task.title for task in TASKS}) == len(TASKS)
