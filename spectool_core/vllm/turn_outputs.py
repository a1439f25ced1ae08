"""One turn of a resident sequence, as vLLM's chat handler would read it from a request of its own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from spectool_core.vllm.rendering import ModelTokens
from spectool_core.vllm.sequences import EngineSequence
from spectool_core.vllm.splitting import Piece, split

__all__ = ["TurnReader", "TurnText"]


class TurnText:
    """The text of one turn, made by vLLM's own detokenizer (vllm/v1/engine/detokenizer.py).

    Args:
        tokenizer: the model's.
        prompt_ids: the turn's prompt.
        params: the sampling parameters of the turn's own request.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], params: SamplingParams) -> None:
        request = SimpleNamespace(
            request_id="turn", prompt_token_ids=prompt_ids, sampling_params=params, prompt_embeds=None
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer if params.detokenize else None, request)
        self._is_delta = params.output_kind == RequestOutputKind.DELTA

    def add(self, token_ids: Sequence[int], *, is_stopped: bool, is_over: bool) -> str:
        """The text by which `token_ids` go on, or the turn's whole text; an end token is not shown."""
        self._detokenizer.update(list(token_ids), is_stopped)
        return str(self._detokenizer.get_next_output_text(is_over, self._is_delta))


class TurnReader:
    """Reads a sequence turn by turn.

    Args:
        sequence: the engine's.
        tokens: the model's.
        tokenizer: the model's.

    Attributes:
        end_id: the end token of the last turn, if the sequence is still in the engine.
        num_written: tokens that the model has written in all turns.
    """

    def __init__(self, sequence: EngineSequence, tokens: ModelTokens, tokenizer: Any) -> None:
        self._outputs = aiter(sequence)
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._pieces: deque[tuple[RequestOutput, Piece, bool]] = deque()
        self.end_id: int | None = None
        self.num_written = 0

    async def _next(self) -> tuple[RequestOutput, Piece, bool] | None:
        if not self._pieces:
            output = await anext(self._outputs, None)
            if output is None:
                return None
            cut = list(split(output.outputs[0].token_ids, self._tokens.stop_ids))
            self._pieces.extend((output, piece, piece is cut[-1]) for piece in cut)
        return self._pieces.popleft()

    async def read(
        self, prompt_ids: list[int], params: SamplingParams, num_cached: int | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of the next turn, of the kind that its parameters ask for.

        Args:
            prompt_ids: what the client path would have sent.
            params: of the turn's own request.
            num_cached: prompt tokens that were not computed again; None for the engine's own count.
        """
        self.end_id = None
        text = TurnText(self._tokenizer, prompt_ids, params)
        is_delta = params.output_kind == RequestOutputKind.DELTA
        so_far: CompletionOutput | None = None
        while (read := await self._next()) is not None:
            output, piece, is_last = read
            whole = output.outputs[0]
            finish = whole.finish_reason if is_last else None
            is_over = piece.ends_turn or finish is not None
            token_ids = list(whole.token_ids[piece.start : piece.stop])
            self.num_written += len(token_ids)
            completion = copy.copy(whole)
            completion.token_ids = token_ids
            completion.text = text.add(token_ids, is_stopped=piece.ends_turn, is_over=is_over)
            if whole.logprobs is not None:
                completion.logprobs = whole.logprobs[piece.start : piece.stop]
            completion.finish_reason = "stop" if piece.ends_turn else finish
            completion.stop_reason = self._stop_reason(token_ids[-1]) if piece.ends_turn else whole.stop_reason
            if piece.ends_turn and not (is_last and output.finished):
                self.end_id = token_ids[-1]
            if not is_delta:
                so_far = completion = _added(so_far, completion)
            if is_delta or is_over:
                yield _turn_output(output, completion, prompt_ids, num_cached, is_over=is_over)
            if is_over:
                return

    def _stop_reason(self, end_id: int) -> int | None:
        return None if end_id == self._tokens.eos_id else end_id


def _turn_output(
    output: RequestOutput, completion: CompletionOutput, prompt_ids: list[int], num_cached: int | None, *, is_over: bool
) -> RequestOutput:
    turn = copy.copy(output)
    turn.prompt_token_ids = prompt_ids
    turn.outputs = [completion]
    turn.finished = is_over
    if num_cached is not None:
        turn.num_cached_tokens = num_cached
    return turn


def _added(so_far: CompletionOutput | None, new: CompletionOutput) -> CompletionOutput:
    """Tokens and logprobs of both; the text of `new` is whole already."""
    if so_far is not None:
        new.token_ids = [*so_far.token_ids, *new.token_ids]
        if new.logprobs is not None and so_far.logprobs is not None:
            logprobs = so_far.logprobs
            logprobs.extend(new.logprobs)  # type: ignore[arg-type, unused-ignore]
            new.logprobs = logprobs
    return new
