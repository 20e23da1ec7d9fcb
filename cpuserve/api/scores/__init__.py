"""Scores of pairs of texts, in the formats of Jina's and Cohere's rerankers and of vLLM."""
