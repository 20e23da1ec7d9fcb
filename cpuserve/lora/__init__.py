"""LoRA adapters that requests of `LLM` select, in the modules of vLLM."""
