"""The embeddings of the Cohere API; its rerank is in api/scores."""
