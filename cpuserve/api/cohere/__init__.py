"""The embeddings of Cohere's API; its rerank is in api/scores."""
