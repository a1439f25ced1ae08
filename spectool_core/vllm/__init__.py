"""The plugin that runs inside vLLM; only this package may import vllm or torch, and its pure modules import neither."""
