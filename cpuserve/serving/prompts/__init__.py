"""The prompts of a call as token ids: chat templates, texts, pairs of texts, questions."""
