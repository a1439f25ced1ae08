"""SmolLM2 in other formats than its own: by its examples it writes calls as its chat template does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from examples.engine.smollm2 import CHAT_TEMPLATE

UNUSED_TOKEN, KNOWN_TOKEN = "<empty_output>", "->"
MARKERS = {"llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
"""What vLLM's parser of the format looks for in the vocabulary."""

HERMES_CALL = ("<tool_call>\\n", '"arguments": ', "}\\n</tool_call>")
CALLS = {
    "llama3_json": ("", '"parameters": ', "}"),
    "mistral": ("[TOOL_CALLS][", '"arguments": ', "}]"),
    "xlam": ("[", '"arguments": ', "}]"),
}


def chat_template_of(name: str) -> str:
    """SmolLM2's, with calls as this format writes them."""
    template = CHAT_TEMPLATE
    for hermes, other in zip(HERMES_CALL, CALLS[name], strict=True):
        assert template.count(hermes) == 2  # in the instruction, and in a message
        template = template.replace(hermes, other)
    return template


def model_of(name: str, smollm2: Path, folder: Path) -> Path:
    """SmolLM2 with the format's chat template, and its marker in the place of a token that it was never taught."""
    if name == "hermes":
        return smollm2
    shutil.copytree(smollm2, folder, copy_function=lambda source, copy: Path(copy).symlink_to(Path(source).resolve()))
    _replace(folder / "chat_template.jinja", chat_template_of(name))
    if name in MARKERS:
        known_id, marker_id = (_token_id(folder / "tokenizer.json", text) for text in (KNOWN_TOKEN, UNUSED_TOKEN))
        tokenizer = (folder / "tokenizer.json").read_text()
        _replace(folder / "tokenizer.json", tokenizer.replace(UNUSED_TOKEN, MARKERS[name]))
        if MARKERS[name] in CALLS[name][0]:
            # As likely as a token that it knows, and of two as likely ones the first is taken.
            assert marker_id < known_id
            weights = load_file(folder / "model.safetensors")
            weights["model.embed_tokens.weight"][marker_id] = weights["model.embed_tokens.weight"][known_id]
            (folder / "model.safetensors").unlink()
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _token_id(tokenizer: Path, text: str) -> int:
    return int(json.loads(tokenizer.read_text())["model"]["vocab"][text])


def _replace(file: Path, text: str) -> None:
    """The copy, not what its link leads to."""
    file.unlink()
    file.write_text(text)
