"""An engine process that computes nothing: every request gets the tokens of one text.

It takes the place of cpuserve.engine.child (scripted_server.py). Each step sends one token
to every running request, in one message, as the engine does. A step takes --itl-target-ms. The text
has thoughts, sentences and tool calls in turn; with --tool-call-parser=none it has sentences only.
"""

import argparse
import itertools
import socket
import time

from cpuserve.engine.child import SocketChannel
from cpuserve.engine.ipc import (
    Abort,
    AddRequest,
    Ask,
    Output,
    Ready,
    Reply,
    Shutdown,
    Stats,
    StepOutput,
)
from cpuserve.tokenizer.load import load_tokenizer

THOUGHT = """<think>
The fixture opens a file that nobody closes, so the third test finds it locked.
</think>

"""
TEXT = """The fixture never closes its file: I add a context manager, see `tests/conftest.py`.
"""
CALL = """<tool_call>
{"name": "write_file", "arguments": {"path": "conftest.py", "content": "def log(tmp_path):\\n\
    with open(tmp_path / \\"log\\") as file:\\n        yield file\\n"}}
</tool_call>
"""
ROUNDS = 64  # how often a response repeats the text before it ends


def script_of(config):
    """Return the token ids of a response; the last one ends it."""
    tokenizer, _ = load_tokenizer(config.tokenizer_path, None)
    plain = config.tool_call_parser == "none"
    parts = [TEXT] if plain else [THOUGHT, TEXT, CALL]
    ids = tokenizer.encode("".join(parts), add_special_tokens=False)
    return [*ids * ROUNDS, 0], tokenizer.vocab_size


class ScriptedEngine:
    """The loop of the engine: it reads messages, then runs a step."""

    def __init__(self, channel, script, step_s, context):
        """context: the most tokens of a prompt and its response."""
        self.channel = channel
        self.context = context
        self.script = script
        self.step_s = step_s
        self.running = {}  # {id of a request: its position in the script}
        self.ends = {}  # {id of a request: the position of its last token}
        self.stats = Stats()

    def run(self):
        """Serve until Shutdown; EOFError if the front end ends."""
        due = 0.0
        while True:
            for message in self.channel.receive(block=not self.running):
                if isinstance(message, Shutdown):
                    return
                self.handle(message)
            now = time.monotonic()
            due = max(due, now)
            time.sleep(due - now)
            due += self.step_s
            if self.running:
                self.channel.send(StepOutput(self.step(), self.stats))

    def handle(self, message):
        if isinstance(message, AddRequest):
            self.running[message.id] = 0
            # A request that may fill the context has no end of its own: small models have little.
            room = self.context - len(message.prompt) // 4
            most = message.params.max_tokens or room
            self.ends[message.id] = min(most if most < room else 2**31, len(self.script)) - 1
        elif isinstance(message, Abort):
            for number in message.ids:
                self.running.pop(number, None)
        elif isinstance(message, Ask):
            self.channel.send(Reply(message.id, {"ok": True}))

    def step(self):
        """Return the next token of each running request."""
        stats, outputs = self.stats, []
        for number, at in list(self.running.items()):
            finish = None
            if at == self.ends[number]:
                finish = "stop" if at == len(self.script) - 1 else "length"
                del self.running[number]
            else:
                self.running[number] = at + 1
            outputs.append(Output(number, [self.script[at]], finish))
        stats.steps += 1
        stats.step_s = self.step_s
        stats.running = len(self.running)
        stats.generation_tokens += len(outputs)
        return outputs


def info_of(config, vocab):
    """Return the facts about the model that the engine sends in its first message, Ready."""
    return {
        "model": config.model,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "vocab_size": vocab,
        "eos_ids": [0],
        "block_size": config.block_size,
        "kv_blocks": config.kv_blocks,
        "kv_tokens": config.kv_blocks * config.block_size,
        "max_top": 20,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log-level")
    args = parser.parse_args(argv)
    channel = SocketChannel(socket.socket(fileno=args.fd))
    moves = itertools.count()
    try:
        config = channel.receive_config()
        channel.listen()
        channel.answer_pings(lambda: next(moves))
        script, vocab = script_of(config)
        channel.send(Ready(info_of(config, vocab)))
        step_s = config.itl_target_ms / 1e3
        ScriptedEngine(channel, script, step_s, config.max_model_len).run()
    except EOFError:  # the front end has ended
        pass
    return 0
