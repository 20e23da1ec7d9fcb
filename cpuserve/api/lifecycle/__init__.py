"""Start and stop of the server. `serve.serve` does these steps in order:

1. `http/listener.py` binds the port, so that a port in use is reported at once.
2. `http/startup_server.py` responds to requests from a thread until the front end can:
   /health is 503.
3. `serving/models/preparation.py` runs the thread that finds or downloads the model
   and resolves the settings.
4. `engines.py` starts the engine processes, which load the model.
5. `front_end.py` imports FastAPI meanwhile: `model_context.py` makes the model's context,
   `app.py` the application, and `http/server.py` its HTTP server.
6. The startup server hands over the port. The front end loads the tokenizer in a thread
   while it waits for the engines, and then is ready.
7. The front end watches the engines and the signals (`signals.py`). The first signal drains
   the server, a second one ends the running requests, and a third one ends the process.

`loaders.py` does steps 3, 4 and 6 for a further model when a request needs this model.
"""
