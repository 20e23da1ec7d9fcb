"""GGUF files: their reader, and what presents them as a Hugging Face model."""
