"""The llama-server dialect: its endpoints, except those that it shares with OpenAI."""
