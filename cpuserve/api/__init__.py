"""The HTTP front end: start and stop, requests, responses, and a folder for each dialect."""
