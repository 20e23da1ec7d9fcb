"""Draft tokens of a step: what they are worth, and those of n-grams."""
