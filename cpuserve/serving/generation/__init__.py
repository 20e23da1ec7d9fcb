"""Run the sequences of a call, and turn their outputs into events."""
