"""The Ollama API: chat and generate, and what clients ask before."""
