from __future__ import annotations

import asyncio

import pytest

from spectool_core.engine.steps import Steps, arun_steps, run_steps


def doubled(*, fails: bool) -> Steps[list[int]]:
    def step(value: int) -> int:
        if fails:
            raise ValueError(value)
        return 2 * value

    got = []
    for value in (1, 2):
        try:
            got.append((yield lambda value=value: step(value)))
        except ValueError as error:
            got.append(-int(str(error)))
    return got


def awaited(*, fails: bool) -> Steps[list[int]]:
    """The same steps as coroutines."""
    steps = doubled(fails=fails)

    async def later(step: object) -> int:
        await asyncio.sleep(0)
        return step()  # type: ignore[operator,no-any-return]

    try:
        step = next(steps)
        while True:
            try:
                got = yield lambda step=step: later(step)
            except ValueError as error:
                step = steps.throw(error)
            else:
                step = steps.send(got)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


@pytest.mark.parametrize(("fails", "expected"), [(False, [2, 4]), (True, [-1, -2])])
async def test_both_drivers_do_the_same(*, fails: bool, expected: list[int]) -> None:
    assert run_steps(doubled(fails=fails)) == expected
    assert await arun_steps(awaited(fails=fails)) == expected


async def test_what_is_not_caught_is_raised() -> None:
    def broken() -> Steps[None]:
        yield lambda: 1 / 0

    with pytest.raises(ZeroDivisionError):
        run_steps(broken())


async def test_a_cancellation_reaches_the_steps_which_may_clean_up() -> None:
    cleaned = []

    def steps() -> Steps[None]:
        try:
            yield asyncio.get_running_loop().create_future  # waits for ever
        except asyncio.CancelledError:
            yield lambda: asyncio.sleep(0, cleaned.append("up"))
            raise

    task = asyncio.create_task(arun_steps(steps()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["up"]
