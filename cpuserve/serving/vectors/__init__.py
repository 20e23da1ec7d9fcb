"""Embeddings, scores and class labels from the vectors that a model returns."""
