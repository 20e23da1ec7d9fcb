"""The HTTP front end. Its files and folders import only those below them:

lifecycle: start and stop of the server. app.py: the application. http: the HTTP server.
dialects.py: the dialects. shared_paths.py: paths that several of them serve.
vectors: routes of embeddings, scores and labels. openai, anthropic and others: the dialects.
route.py: POST routes. response: streams and bodies. request: the server's state, and bodies.
batches, stored: files and stored responses. errors: errors as responses, and their log.
"""
