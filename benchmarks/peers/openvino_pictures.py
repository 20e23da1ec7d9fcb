"""Times of OpenVINO GenAI's pipeline of pictures on a converted directory; see pictures.py.

usage: openvino_pictures.py MODEL PICTURES

Run it in the virtual environment that install.sh made. PICTURES has the files 0.jpg (not counted),
1.jpg, and one for each caller. It prints one JSON object in seconds. "second turn" gives the whole
conversation and the picture again, as a server does; "second turn, kept" goes on with the object
of the conversation, which keeps the features of the picture.
"""

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from PIL import Image
from questions import ANSWER, FIRST, SECOND

ROLES = "user", "assistant"
GREEDY = genai.GenerationConfig(max_new_tokens=1, do_sample=False, ignore_eos=True)


def pixels(path):
    return ov.Tensor(np.asarray(Image.open(path).convert("RGB"))[None])


def seconds(work):
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def messages_of(*texts):
    return [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(texts)]


def history_of(*texts):
    return genai.ChatHistory(messages_of(*texts))


def conversation(path):
    """Return the times of one picture."""
    pipe = genai.VLMPipeline(str(path[0]), "CPU")

    def ask(history, *images):
        given = list(map(pixels, images))
        return seconds(lambda: pipe.generate(history, images=given, generation_config=GREEDY))

    ask(history_of(FIRST), path[1] / "0.jpg")
    kept = history_of(FIRST)
    first, result = ask(kept, path[1] / "1.jpg")
    found = {"first": first, "prompt tokens": result.perf_metrics.get_num_input_tokens()}
    for message in messages_of(FIRST, ANSWER, SECOND)[1:]:
        kept.append(message)
    found["second turn, kept"], _ = ask(kept)
    found["second turn"], _ = ask(history_of(FIRST, ANSWER, SECOND), path[1] / "1.jpg")
    return found


def callers(path):
    """Return the time until all callers have a token, in one batch of the pipeline for many."""
    pipe = genai.ContinuousBatchingPipeline(str(path[0]), genai.SchedulerConfig(), "CPU")

    def ask(files):
        images = [[pixels(file)] for file in files]
        return pipe.generate([FIRST] * len(files), images, [GREEDY] * len(files))

    ask([path[1] / "0.jpg"])
    files = sorted(path[1].glob("*.jpg"))[2:]
    return seconds(lambda: ask(files))[0]


def main():
    path = Path(sys.argv[1]), Path(sys.argv[2])
    found = conversation(path)
    gc.collect()
    print(json.dumps({**found, "callers": callers(path)}))


main()
