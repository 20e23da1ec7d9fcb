"""What is of pictures only: how files become patches for the towers of pictures."""
