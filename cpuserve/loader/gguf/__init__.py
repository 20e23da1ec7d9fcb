"""GGUF files: a reader, and classes that present such a file as a Hugging Face model."""
