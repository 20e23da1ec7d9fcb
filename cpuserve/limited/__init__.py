"""Processes with limits on memory and time, which fork for each connection.

Chat templates (tokenizer/rendering) and pictures (media/decoding) run in such processes.
"""
