"""Anthropic's dialect: messages and their token counts."""
