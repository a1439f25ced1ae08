"""`python -m examples.demo`: one agent on real tools, run stock and speculative; models are played back by default."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial

from openai import OpenAIError

from examples.demo.agent import Setup, run_agent
from examples.demo.archive import Archive
from examples.demo.comparison import Comparison
from examples.demo.frameworks import FRAMEWORKS, Framework, load
from examples.demo.models import Endpoint, Models, playback
from examples.demo.pages import serve_pages
from examples.demo.report import Prices, table
from examples.demo.screen import Screen, terminal_style
from examples.demo.tasks import TASKS, Task
from examples.demo.timeline import timeline
from spectool_core.errors import SpectoolError

_DIFFERENT = 1
_UNUSABLE = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration and give the exit code: 0 where speculation changed nothing but the time."""
    options = _parse(arguments)
    framework: Framework = options.framework
    try:
        return asyncio.run(_demonstrate(options, Screen(terminal_style())))
    except (OpenAIError, SpectoolError, framework.endless_error) as error:
        print(f"stopped by {type(error).__name__}: {error}", file=sys.stderr)
        return _UNUSABLE
    except KeyboardInterrupt:
        return _INTERRUPTED


async def _demonstrate(options: argparse.Namespace, screen: Screen) -> int:
    framework: Framework = options.framework
    tasks = [task.spelled(framework.spelled) for task in TASKS]
    async with _setup(framework, tasks, options, screen) as setup:
        comparisons = [await _compare(number, task, setup, screen) for number, task in enumerate(tasks, 1)]
    shown = max(comparisons, key=lambda comparison: comparison.num_early_runs)
    screen.draw(f"\nTime line of the task: {shown.title}\n\n{timeline(shown.charts(), screen.style)}\n")
    measurements = [comparison.measurement() for comparison in comparisons]
    screen.draw(table(measurements, Prices(options.price_in, options.price_out)) + "\n")
    _explain(options, screen)
    return _judge(comparisons, framework.compared, screen, is_real=options.models is not None)


@asynccontextmanager
async def _setup(
    framework: Framework, tasks: Sequence[Task], options: argparse.Namespace, screen: Screen
) -> AsyncIterator[Setup]:
    screen.say(f"One {framework.title} on {len(tasks)} tasks, each run twice: stock, then speculative.")
    with closing(Archive()) as archive:
        async with (
            _models(tasks, options, screen) as models,
            models.ready(framework) as (main_model, speculator),
            serve_pages(archive) as site,
        ):
            screen.say(
                f"The tools work on the papers of an invented railway; their pages are served from {site}. Each tool "
                f"call waits for a declared network delay of {options.tool_delay:g} s before it does its work. A line "
                "below is one call; its times are those of the turn: the main model's and the tools'."
            )
            yield Setup(framework, main_model, speculator, site, options.tool_delay)


@asynccontextmanager
async def _models(tasks: Sequence[Task], options: argparse.Namespace, screen: Screen) -> AsyncIterator[Models]:
    if options.models is not None:
        models: Models = options.models
        screen.say(f"Main model: {models.main.model}. Speculator: {models.speculator.model}. Both are real.")
        yield models
        return
    async with playback(tasks, main_s=options.main_delay, speculator_s=options.speculator_delay) as played:
        screen.say(
            f"The models are PLAYED BACK: a server at {played.main.base_url} says what a script says, the main model "
            f"after {options.main_delay:g} s, the speculator after {options.speculator_delay:g} s and once after twice "
            "that. The agent, the library, the HTTP requests and the tools are real. (Real models: see --help.)"
        )
        yield played


async def _compare(number: int, task: Task, setup: Setup, screen: Screen) -> Comparison:
    screen.draw(f"\nTask {number} of {len(TASKS)}: {task.title}")
    screen.say(task.question, indent="  ")
    runs = []
    for kind in ("stock", "speculative"):
        on_turn = partial(screen.turn, kind)
        runs.append(await run_agent(task.question, setup, is_speculative=kind == "speculative", on_turn=on_turn))
        screen.run(kind, runs[-1])
    screen.say(runs[-1].answer, indent="  > ")
    return Comparison(task.title, *runs)


def _explain(options: argparse.Namespace, screen: Screen) -> None:
    screen.say(
        "hits: calls of marked tools that an early run served; their share is alpha here. wasted runs: early "
        "runs that served no call. by the paper: what its equation (1) saves with these hits and the measured mean "
        "times of models and tools, counting the final turn, which cannot gain."
    )
    screen.say(
        "spec. tokens: read and written by the speculator, on top of the main model's; requests that were cut off "
        "report none. Their price is an assumption, "
        f"like gpt-5-nano's list price: ${options.price_in:.2f} for a million read, ${options.price_out:.2f} for a "
        "million written."
    )


def _judge(comparisons: Sequence[Comparison], compared: str, screen: Screen, *, is_real: bool) -> int:
    """Say whether speculation changed anything, and give the exit code."""
    num_early_writes = sum(comparison.num_early_writes for comparison in comparisons)
    num_predicted = sum(comparison.num_predicted_writes for comparison in comparisons)
    screen.say(
        "save_note writes, so it is not marked and never runs early. Calls of it that the speculator predicted: "
        f"{num_predicted}; early runs: {num_early_writes}."
    )
    different = [comparison.title for comparison in comparisons if not comparison.is_same_run]
    if not different:
        screen.say(f"Stock and speculative transcripts are equal in every task: {compared}.")
    elif is_real:
        screen.say(
            f"Real models are sampled anew in each run, so transcripts may differ; here: {', '.join(different)}."
        )
    else:
        screen.say(f"TRANSCRIPTS DIFFER: {', '.join(different)}.")
    return _DIFFERENT if num_early_writes or (different and not is_real) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, default=FRAMEWORKS[0], help="what the agent is built with (%(default)s)"
    )
    real = parser.add_argument_group("real models, instead of the playback")
    real.add_argument("--model", help="the main model's name")
    real.add_argument("--speculator", help="the speculator's name")
    real.add_argument("--base-url", help="the OpenAI-compatible endpoint of both; OpenAI if not given")
    real.add_argument("--speculator-base-url", help="the speculator's endpoint, where it is another")
    real.add_argument("--api-key", help="OPENAI_API_KEY if not given; a local server without keys takes any text")
    declared = parser.add_argument_group("declared times, in seconds")
    declared.add_argument(
        "--tool-delay", type=_seconds, default=0.5, help="network delay of each tool call (%(default)s)"
    )
    declared.add_argument("--main-delay", type=_seconds, default=0.75, help="main model, played back (%(default)s)")
    declared.add_argument(
        "--speculator-delay", type=_seconds, default=0.15, help="speculator, played back (%(default)s)"
    )
    prices = parser.add_argument_group("the speculator's price in dollars for a million tokens")
    prices.add_argument("--price-in", type=_dollars, default=0.05, help="tokens read (%(default)s)")
    prices.add_argument("--price-out", type=_dollars, default=0.4, help="tokens written (%(default)s)")
    options = parser.parse_args(arguments)
    options.models = _real_models(parser, options)
    try:
        options.framework = load(options.framework)
    except ImportError as error:
        parser.error(f"--framework {options.framework}: {error}")
    return options


def _real_models(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Models | None:
    if not (options.model or options.speculator or options.base_url or options.speculator_base_url):
        return None
    if not (options.model and options.speculator):
        parser.error("real models need both --model and --speculator")
    api_key = options.api_key or os.environ.get("OPENAI_API_KEY")
    if not api_key:
        parser.error("real models need --api-key or OPENAI_API_KEY; a local server without keys takes any text")
    return Models(
        Endpoint(options.model, options.base_url, api_key),
        Endpoint(options.speculator, options.speculator_base_url or options.base_url, api_key),
    )


def _seconds(text: str) -> float:
    return _number(text, most=60, unit="seconds")


def _dollars(text: str) -> float:
    return _number(text, most=1000, unit="dollars")


def _number(text: str, *, most: float, unit: str) -> float:
    allowed = argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 0 to {most:g} {unit}")
    try:
        number = float(text)
    except ValueError:
        raise allowed from None
    if not 0 <= number <= most:
        raise allowed
    return number


if __name__ == "__main__":
    sys.exit(main())
