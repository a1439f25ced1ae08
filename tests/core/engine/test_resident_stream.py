"""How one response is cut into turns."""

from __future__ import annotations

import pytest

from spectool_core.engine.chat_body import ChatBody
from spectool_core.engine.endpoint import Address
from spectool_core.engine.resident_stream import ResidentStream
from spectool_core.engine.steps import run_steps
from tests.core.engine.test_idle_streams import Reply


class Cut(Reply):
    """A response that breaks behind what has come."""

    def __init__(self, received: bytes) -> None:
        super().__init__()
        self.received: list[bytes] = [received]

    def read(self) -> bytes:
        if not self.received:
            raise ConnectionError("cut")
        return self.received.pop()

    def close(self) -> None:
        self.num_abandoned += 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_turn_that_is_whole_is_not_lost_with_its_connection(*, is_streamed: bool) -> None:
    reply = Cut(b'data: {"choices": []}\n\nevent: spectool.turn\ndata: {"turn": 1, "finish_reason": "stop"}\n\n')
    body = ChatBody({}, messages=(), roles=(), is_streamed=is_streamed, can_go_on=True)
    cut = ResidentStream(reply, body, Address("", ()), lambda _: None)
    if is_streamed:
        assert run_steps(cut.piece()) == b'data: {"choices": []}\n\n'
        assert run_steps(cut.piece()) == b"data: [DONE]\n\n"
        assert run_steps(cut.piece()) is None
    else:
        assert run_steps(cut.whole()) == b'{"choices": []}'
    assert reply.num_abandoned == 1
