"""The Ollama API: chat, generate, embeddings, and the endpoints about models."""
