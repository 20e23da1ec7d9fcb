"""vLLM's endpoints that load and unload LoRA adapters."""
