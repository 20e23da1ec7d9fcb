"""The OpenAI embeddings."""
