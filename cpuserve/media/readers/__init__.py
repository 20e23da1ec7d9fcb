"""The reader of each kind of media (media/kinds.py)."""
