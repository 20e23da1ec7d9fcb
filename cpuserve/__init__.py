"""CPU-first LLM inference server with an OpenAI-compatible API."""
