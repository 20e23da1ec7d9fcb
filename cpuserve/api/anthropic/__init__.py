"""The Anthropic dialect: messages and their token counts."""
