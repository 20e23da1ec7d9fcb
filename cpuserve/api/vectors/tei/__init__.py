"""The API of text-embeddings-inference (TEI), and other tasks of Hugging Face clients."""
