"""The texts of the conversation about a picture that pictures.py measures in all engines."""

FIRST = "What does this picture show, and where is the total? Answer in one sentence."
ANSWER = "It is a page of an invoice, and the total is on the last line."
SECOND = "Which lines are above it?"
