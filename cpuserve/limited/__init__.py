"""Processes with limits on memory and time, which fork for each connection.

Chat templates (tokenizer/rendering), pictures (media/decoding) and tokenizers that are not plain
(tokenizer/limited) run in such processes.
"""
