"""vLLM's real schedulers over a worker without a model, which checks that each position's KV matches its token."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm.platforms
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if vllm.platforms.current_platform.device_type == "":  # a build for GPUs on a machine that has none
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()

# What follows takes the platform as it is when it is imported.
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from spectool_core.vllm.commands import Commands
from spectool_core.vllm.scheduler import AsyncToolScheduler, ToolScheduler

BLOCK_SIZE = 16
END = "<|im_end|>"
HEADER = "<|assistant|>"
RESULT = "<|tool|>"


def make_model_folder(folder: Path) -> Path:
    """A folder with the configuration and the tokenizer of a model that has no weights: one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, HEADER, RESULT)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "vocab_size": 300,
        "eos_token_id": len(alphabet),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


Model = Callable[[Sequence[int]], int]
"""The next token of a sequence: what the real model would compute from its KV, as a function of the tokens."""


@dataclass
class Worker:
    """Does what a V1 worker can do with a scheduler's output, and keeps which token each KV position was made of."""

    model: Model
    tokens: dict[str, list[int]] = field(default_factory=dict)
    kv: dict[str, dict[int, int]] = field(default_factory=dict)

    def step(self, output: Any) -> ModelRunnerOutput:
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.kv.setdefault(new.req_id, {})
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            computed[request_id] = num_computed
            if request_id in cached.resumed_req_ids and request_id in cached.all_token_ids:
                self.tokens[request_id] = list(cached.all_token_ids[request_id])
        sampled = [
            self._run(request_id, computed[request_id], num, output.scheduled_spec_decode_tokens.get(request_id, []))
            for request_id, num in output.num_scheduled_tokens.items()
        ]
        request_ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _run(self, request_id: str, num_computed: int, num_scheduled: int, drafts: list[int]) -> list[int]:
        tokens, kv = self.tokens[request_id], self.kv[request_id]
        num_known = num_scheduled - len(drafts)
        assert num_computed + num_known <= len(tokens), "the worker lacks tokens"
        for position in range(num_computed):  # what is absent came out of the prefix cache
            assert kv.get(position, tokens[position]) == tokens[position], f"stale KV at {position} of {request_id}"
        for offset in range(num_known):
            kv[num_computed + offset] = tokens[num_computed + offset]
        for offset, token in enumerate(drafts):
            kv[num_computed + num_known + offset] = token
        if num_computed + num_known < len(tokens):
            return []  # a part of the prompt
        sampled: list[int] = []
        for token in [*drafts, None]:
            sampled.append(self.model(tokens))
            tokens.append(sampled[-1])
            if sampled[-1] != token:
                break
        return sampled


class Engine:
    """A scheduler, a worker and the outputs, with `depth` steps in flight as the engine core has them."""

    def __init__(
        self,
        folder: Path,
        model: Model,
        *,
        num_blocks: int = 64,
        num_batched_tokens: int = 64,
        num_seqs: int = 8,
        max_model_len: int = 1024,
        num_draft_tokens: int = 0,
        is_async: bool = False,
        prefix_caching: bool = True,
    ) -> None:
        settings: dict[str, Any] = {}
        if num_draft_tokens:
            settings["speculative_config"] = {
                "method": "custom_class",
                "model": "spectool_core.vllm.proposer.SilentProposer",
                "num_speculative_tokens": num_draft_tokens,
            }
        config = EngineArgs(
            model=str(folder),
            dtype="float32",
            max_model_len=max_model_len,
            enforce_eager=True,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=prefix_caching,
            additional_config={
                "spectool": {"level": "o2+o3", "num_draft_tokens": num_draft_tokens} if num_draft_tokens else {}
            },
            **settings,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = BLOCK_SIZE
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        init_none_hash(sha256)
        self.scheduler = (AsyncToolScheduler if is_async else ToolScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )
        self.commands = Commands(self.scheduler)
        self.worker = Worker(model)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.stop_reasons: dict[str, list[Any]] = {}
        self.num_steps = 0
        self._depth = 2 if is_async else 1
        self._in_flight: deque[Any] = deque()
        self._num_free = self.num_free_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, request_id: str, prompt: Sequence[int], *, max_tokens: int, end_id: int, **params: Any) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
        sampling.update_from_generation_config({}, end_id)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.outputs[request_id] = []
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """Schedule a step and take in the oldest in flight; False where there was neither."""
        self.num_steps += 1
        output = self.scheduler.schedule()
        scheduled = bool(output.total_num_scheduled_tokens)
        if scheduled:
            self._in_flight.append((output, self.worker.step(output)))
        if self._in_flight and (len(self._in_flight) >= self._depth or not scheduled):
            for outputs in self.scheduler.update_from_output(*self._in_flight.popleft()).values():
                for part in outputs.outputs:
                    self.outputs[part.request_id] += part.new_token_ids
                    self.stop_reasons.setdefault(part.request_id, []).append(part.stop_reason)
                    if part.finish_reason is not None:
                        self.finished[part.request_id] = part.finish_reason
            return True
        return scheduled

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.get_num_unfinished_requests() > 0

    def run(self, max_steps: int = 4000) -> None:
        """Step until nothing but parked sequences is left; AssertionError if that never comes."""
        idle = 0
        for _ in range(max_steps):
            if not self.has_work:
                return
            idle = 0 if self.step() else idle + 1
            assert idle < 4, "no progress"
        raise AssertionError("no end")

    def assert_nothing_left(self) -> None:
        self.step()  # what was freed is announced to the worker in one more step
        assert not self.scheduler.requests
        assert self.num_free_blocks == self._num_free
        assert not self.scheduler.tool_parked
        assert self.scheduler.num_waiting_for_streaming_input == 0


def turns_of(output: Sequence[int], end_id: int) -> Iterator[list[int]]:
    """Split a response's tokens after each end token."""
    turn: list[int] = []
    for token in output:
        turn.append(token)
        if token == end_id:
            yield turn
            turn = []
    if turn:
        yield turn
