"""Helpers that every package may use: errors, logs, ids, signals, children and tasks."""
