"""OpenAI's dialect: chat completions, completions, responses, embeddings and models."""
