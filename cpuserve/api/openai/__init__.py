"""The OpenAI dialect: chat completions, completions, responses, embeddings and models."""
