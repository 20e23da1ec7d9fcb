"""GGUF files: a reader, and classes that present a file as a Hugging Face model."""
