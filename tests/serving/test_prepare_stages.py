"""prepare() is a line of stages: how a response is read, prompts, parameters, sequences."""

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import cpuserve
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.generation.prepare import prepare
from tests.api.fakes import make_context

SERVING = f"{Path(cpuserve.__file__).parent / 'serving'}/"
# Every stage may run on a thread, reads the model's context, and notes for what it waits.
BESIDE = {"threads.py", "work.py", "models/context.py"}
STAGES = [
    "generation/prepare.py",
    "tools/use.py",
    "prompts/prompts.py",
    "prompts/chat_prompt.py",
    "prompts/encode.py",
    "calls/params.py",
    "generation/fan_out.py",
    "generation/generate.py",
]


def walk(work):
    """The files of serving whose functions `work` calls, in order; it may use other threads."""
    files, frames = [], set()

    def enter(frame, event, _argument):
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if event != "call" or not name.startswith(SERVING) or function.startswith("<"):
            return  # a lambda or a comprehension is a part of its function
        if frame in frames:
            return  # a coroutine that goes on after a wait is no new call
        frames.add(frame)
        file = name.removeprefix(SERVING)
        if file not in BESIDE and (not files or files[-1] != file):
            files.append(file)

    before = sys.getprofile()
    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return files


def test_a_call_passes_the_stages_in_order_and_returns_to_few_files():
    served = SimpleNamespace(context=make_context(), adapter=None)

    def chat():
        call = GenerateCall(
            messages=[{"role": "user", "content": "hi"}], response_format={"type": "json_object"}
        )
        asyncio.run(prepare(served, call, 100))

    chat()  # threads and caches that the first call makes are there
    files = walk(chat)
    firsts = list(dict.fromkeys(files))
    assert [file for file in firsts if file in STAGES] == STAGES
    assert len(files) - len(firsts) <= 10, files
