"""Relevance scores for pairs of texts, in the formats of Jina, Cohere and vLLM."""
