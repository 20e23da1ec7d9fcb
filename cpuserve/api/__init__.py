"""The HTTP front end: the server, what all dialects share, and a folder for each dialect."""
