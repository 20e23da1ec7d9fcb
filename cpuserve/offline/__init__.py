"""The parts of `LLM`: its tokenizer, adapters, metrics and control, with the interface of vLLM."""
