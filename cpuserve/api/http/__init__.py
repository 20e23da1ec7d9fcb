"""HTTP below the application: the listening socket and uvicorn's protocol."""
