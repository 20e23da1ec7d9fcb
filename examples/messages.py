"""Ask a running server with the Anthropic client. usage: messages.py [URL]"""

import sys

from anthropic import Anthropic

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = Anthropic(base_url=url, api_key="none")

with client.messages.stream(
    model=client.models.list().data[0].id,
    max_tokens=64,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
