"""The architectures of GGUF files by family; table.py lists them all."""
