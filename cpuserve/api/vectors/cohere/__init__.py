"""The embedding endpoints of the Cohere API; its rerank endpoint is in scores."""
