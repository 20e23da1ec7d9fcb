"""Embeddings, scores and class labels, in the formats of all dialects."""
