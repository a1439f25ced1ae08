"""vLLM with the real model in this process: its engine core can be stepped, and its scheduler asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from examples.engine.smollm2 import TOOLS, messages
from spectool_core.vllm.commands import Commands
from spectool_core.vllm.wire import call_key

CITIES = ("London", "Tokyo", "Lima", "Madrid", "Berlin", "Dublin", "Athens", "Vienna")
MAX_STEPS = 2000


@dataclass(frozen=True)
class Written:
    """What the model wrote in a response."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_logprobs: int = 0


class InProcess:
    """The engine of one configuration.

    Args:
        folder: the model, see `examples.engine.smollm2`.
        level: "o3" or "o2+o3".
        options: of vLLM's `LLM`.
    """

    def __init__(self, folder: Path, level: str = "o3", **options: Any) -> None:
        if level == "o2+o3":
            options["speculative_config"] = {
                "method": "custom_class",
                "model": "spectool_core.vllm.proposer.SilentProposer",
                "num_speculative_tokens": 48,
            }
        options = {"max_model_len": 2048, "max_num_seqs": 16, "scheduler_cls": "ToolScheduler", **options}
        options["scheduler_cls"] = f"spectool_core.vllm.scheduler.{options['scheduler_cls']}"
        self.llm = LLM(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            seed=0,
            additional_config={"spectool": {"level": level, "num_draft_tokens": 48}},
            **options,
        )
        self.tokenizer = self.llm.get_tokenizer()
        self.end: int = self.tokenizer.eos_token_id
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.commands = Commands(self.scheduler)
        self.system = "You are a helpful assistant."
        self.num_free = self.num_free_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def prompt(self, city: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages(city, system=self.system), tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def call_ids(self, city: str) -> list[int]:
        call = json.dumps({"name": "get_weather", "arguments": {"city": city}})
        return [*self.tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>", add_special_tokens=False), self.end]

    def suffix(self, city: str) -> list[int]:
        output = json.dumps({"city": city, "weather": f"{len(city) * 3} C, cloudy"})
        text = f"\n<|im_start|>tool\n{output}<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer.encode(text, add_special_tokens=False)

    def announce(self, response_id: str) -> None:
        self.commands.announce(response_id, [self.end])

    def post(self, response_id: str, city: str, *, max_tokens: int | None = 96) -> None:
        self.commands.plan(
            response_id,
            {
                "turn": None,
                "keys": [key(city)],
                "call_ids": self.call_ids(city),
                "suffix_ids": self.suffix(city),
                "max_tokens": max_tokens,
            },
        )

    def add(self, response_id: str, prompt: Sequence[int], *, max_tokens: int = 96, **params: Any) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, skip_special_tokens=False, **params)
        self.engine.add_request(response_id, {"prompt_token_ids": list(prompt)}, sampling)

    def step(self) -> dict[str, Written]:
        """One step; what has finished in it."""
        finished = {}
        for output in self.engine.step():
            if output.finished:
                choice = output.outputs[0]
                finished[output.request_id] = Written(
                    tuple(choice.token_ids), choice.finish_reason, len(choice.logprobs or ())
                )
        return finished

    def run(self) -> dict[str, Written]:
        """Step until nothing is left to do: all has finished, or is parked."""
        finished = {}
        for _ in range(MAX_STEPS):
            if not self.scheduler.get_num_unfinished_requests():
                return finished
            finished.update(self.step())
        raise AssertionError(f"no end after {MAX_STEPS} steps: {list(self.scheduler.requests)}")

    def client_side(self, cities: Sequence[str]) -> dict[str, tuple[Written, Written]]:
        """Both turns as a client asks for them, the second with the first's raw tokens in its prompt."""
        prompts = {city: self.prompt(city) for city in cities}
        for city in cities:
            self.add(f"{city}-first", prompts[city])
        first = self.run()
        for city in cities:
            written = first[f"{city}-first"].token_ids
            self.add(f"{city}-second", [*prompts[city], *written, *self.suffix(city)])
        second = self.run()
        return {city: (first[f"{city}-first"], second[f"{city}-second"]) for city in cities}

    def warm_up(self) -> None:
        """Have what all prompts begin with in the prefix cache, if there is one."""
        if self.scheduler.cache_config.enable_prefix_caching:
            self.add("warm-up", self.prompt("Paris"), max_tokens=1)
            self.run()

    def assert_nothing_left(self) -> None:
        self.engine.step()
        assert not self.scheduler.requests
        assert not self.scheduler.tool_parked
        if not self.scheduler.cache_config.enable_prefix_caching:
            assert self.num_free_blocks == self.num_free
        self.llm.reset_prefix_cache()
        assert self.num_free_blocks == self.num_free


def key(city: str) -> str:
    return call_key("get_weather", {"city": city})
