"""Decisions: typed questions with probabilities of their options, in the System One format."""
