"""Formats that are not the model's own, over HTTP: by its examples it writes calls as its chat template does."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.engine.smollm2 import CHAT_TEMPLATE
from tests.engine.serving import serving
from tests.engine.test_server_turns import STREAMED, goes_on

HERMES_CALL = ("<tool_call>\\n", '"arguments": ', "}\\n</tool_call>")
CALLS = {
    "llama3_json": ("", '"parameters": ', "}"),
    "xlam": ("[", '"arguments": ', "}]"),
}


def template_of(name: str) -> str:
    """The chat template of SmolLM2 with calls as this format writes them."""
    template = CHAT_TEMPLATE
    for hermes, other in zip(HERMES_CALL, CALLS[name], strict=True):
        assert template.count(hermes) == 2  # in the instruction, and in a message
        template = template.replace(hermes, other)
    return template


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "level"), [("llama3_json", "o3"), ("xlam", "o2+o3")])
async def test_the_engine_goes_on_from_calls_in_each_format(
    name: str, level: str, model_folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(template_of(name))
    flags = ("--chat-template", str(template))
    with serving(model_folder, tmp_path / "server.log", level, *flags, tool_format=name) as server:
        async with server.client() as client:
            await goes_on(client, STREAMED)
            await goes_on(client, {})
