"""The vLLM endpoints /tokenize and /detokenize."""
