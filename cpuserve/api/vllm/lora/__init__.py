"""The vLLM endpoints that load and unload LoRA adapters."""
