"""Draft tokens of a second model, a head of the model, or an assistant."""
