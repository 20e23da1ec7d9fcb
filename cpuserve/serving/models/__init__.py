"""The served models: their contexts, how they are loaded, and the last prompts of each."""
