"""A small OpenAI-compatible server on its own thread that streams, counts and refuses requests."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

METRICS = """# TYPE cpuserve:cpu_weight_bytes_read counter
cpuserve:cpu_weight_bytes_read_total{{model_name="m"}} {read}
cpuserve:cpu_busy_seconds_total{{model_name="m"}} 1.5
cpuserve:cpu_roofline_bytes_per_second{{model_name="m"}} 1e9
"""
CPU = {
    "object": "cpu", "isa": "avx2", "machine": {"cpu": "A CPU"}, "placement": {"threads": 2}
}  # fmt: skip


class FakeOpenAI:
    """`asked` collects the requests it gets; prompts in `refuse` are answered with 400."""

    def __init__(self, *, refuse=frozenset(), plain=False, wait_s=0.0):
        self.asked, self.refuse, self.plain, self.wait_s = [], refuse, plain, wait_s
        self.read = self.running = self.most = 0

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        length = [li for li in head.splitlines() if li.lower().startswith("content-length")]
        raw = await reader.readexactly(int(length[0].split(":")[1])) if length else b"{}"
        code, body = await self.answer(path, json.loads(raw))
        writer.write(f"HTTP/1.1 {code} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def answer(self, path, asked):
        if path.endswith("/completions"):
            return await self.complete(path, asked)
        answers = {
            "/v1/models": {"data": [{"id": "m"}]},
            "/tokenize": {"count": len(asked.get("prompt", "").split())},
            "/detokenize": {"prompt": " ".join(map(str, asked.get("tokens", ())))},
        }
        if not self.plain:
            if path == "/metrics":
                return 200, METRICS.format(read=self.read).encode()
            answers["/v1/cpu"] = CPU
        found = answers.get(path)
        return (404, b"{}") if found is None else (200, json.dumps(found).encode())

    async def complete(self, path, asked):
        self.asked.append(asked)
        if len(self.asked) - 1 in self.refuse:
            return 400, b'{"error": "no"}'
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.wait_s)
        self.running -= 1
        self.read += 1000
        return 200, b"".join(self.events(asked, chat="chat" in path))

    def events(self, asked, chat):
        for i in range(asked["max_tokens"]):
            piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
            ids = {} if self.plain else {"token_ids": [900 + i]}
            yield b"data: " + json.dumps({"choices": [{**piece, **ids}]}).encode() + b"\n\n"
        prompt = asked.get("prompt") or asked["messages"][0]["content"].split()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": asked["max_tokens"]}
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    @contextmanager
    def running_at(self):
        """Run the server in this block; gives its port."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self.serve, "127.0.0.1", 0))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
