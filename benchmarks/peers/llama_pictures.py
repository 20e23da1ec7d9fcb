"""Times of llama.cpp's library of pictures (mtmd) on two GGUF files; see pictures.py.

usage: llama_pictures.py MODEL.gguf MMPROJ.gguf PICTURES THREADS

Run it in the virtual environment that install.sh made. PICTURES has the files 0.jpg (not counted),
1.jpg, and one for each caller. It prints one JSON object in seconds. The pictures go through
llama-cpp-python's handler of conversations, which starts each turn from an empty cache.
"second turn, kept" continues the cache of the first turn with the library itself.
"""

import base64
import json
import sys
import time
from pathlib import Path

import llama_cpp
from llama_cpp.llama_chat_format import MTMDChatHandler
from questions import ANSWER, FIRST, SECOND

CONTEXT = 4096


def message(text, path):
    url = f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


class Engine:
    """A model with its handler of pictures."""

    def __init__(self, model, mmproj, threads):
        self.handler = MTMDChatHandler(mmproj, verbose=False, use_gpu=False)
        self.model = llama_cpp.Llama(
            model,
            chat_handler=self.handler,
            n_ctx=CONTEXT,
            n_batch=2048,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        # Random weights prefer tokens that end within a character, and the library counts them
        # only when the character is whole.
        self.whole = {self.model.tokenize(b"a", add_bos=False)[0]: 1000.0}

    def seconds(self, *messages):
        """Return the seconds until the first token of an answer."""
        started = time.perf_counter()
        reply = self.model.create_chat_completion(
            list(messages), temperature=0, max_tokens=1, logit_bias=self.whole
        )
        self.prompt_tokens = reply["usage"]["prompt_tokens"]
        return time.perf_counter() - started

    def seconds_kept(self):
        """Return the seconds of a second question, if the cache keeps the tokens of the first."""
        text = f"{ANSWER}<|im_end|>\n<|im_start|>user\n{SECOND}<|im_end|>\n<|im_start|>assistant\n"
        started = time.perf_counter()
        ids = self.model.tokenize(text.encode(), add_bos=False, special=True)
        self.model.eval(ids)
        self.model.sample(temp=0)
        return time.perf_counter() - started


def main():
    model, mmproj, pictures, threads = sys.argv[1:]
    engine, folder = Engine(model, mmproj, int(threads)), Path(pictures)
    engine.seconds(message(FIRST, folder / "0.jpg"))
    asked = message(FIRST, folder / "1.jpg")
    found = {"first": engine.seconds(asked)}
    found["prompt tokens"] = engine.prompt_tokens
    found["second turn, kept"] = engine.seconds_kept()
    answer = {"role": "assistant", "content": ANSWER}
    found["second turn"] = engine.seconds(asked, answer, {"role": "user", "content": SECOND})
    files = sorted(folder.glob("*.jpg"))[2:]
    found["callers"] = sum(engine.seconds(message(FIRST, file)) for file in files)
    print(json.dumps(found))


main()
