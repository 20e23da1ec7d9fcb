"""Every kind of work gives back all that was reserved for it, however it ends.

The table in docs/design/responses.md lists the kinds.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from cpuserve.base.errors import EngineDead
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import tokenizer
from tests.api.live import live
from tests.api.post_routes import HI, ROUTES, answers, prepare
from tests.api.test_api_beams import BEAMS
from tests.helpers.patience import PATIENCE_S, in_loop, until

KEY = "secret-key-of-alice"
RESPONSES = "/v1/responses"
BACKGROUND = {"input": "hi", "background": True}


class Held:
    """A script whose sequences wait for `go`; then they speak, or raise `error`."""

    def __init__(self):
        self.go = asyncio.Event()
        self.error = None

    def __call__(self, *asked):
        yield self.go
        if self.error is not None:
            yield self.error
        yield from answers(*asked)


@asynccontextmanager
async def served(tmp_path, allowed="parallel=1 tpm=4000 rpm=1000", **options):
    """Serve alice, with these limits; yield the server, her use, a client and the script."""
    path = tmp_path / "keys"
    path.write_text(f"alice {KEY} {allowed}\n")
    path.chmod(0o600)
    script = Held()
    # A client that has gone is noticed when it does not take what is sent.
    limits = ClientLimits(silent_s=0.05)
    async with live(script, limits=limits, api_key_file=str(path), **options) as server:
        context, info = server.context, server.engine.info
        context.max_model_len = info["max_model_len"] = info["kv_tokens"] = 1024
        context.set_ready(tokenizer(), context.chat_template, context.learned_format)
        use = server.state.callers.of_owner("caller-alice").use
        url, headers = f"http://127.0.0.1:{server.port}", {"x-api-key": KEY}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as http:
            yield server, use, http, script


def budgets(server, use):
    """All that work reserves, by its name; 0 = nothing."""
    context, state = server.context, server.state
    running = [entry.id for entry in state.stored._entries.values() if entry.running]
    found = {
        "parallel": use.running,
        "tokens": use.reserved,
        "sequences": context.active_sequences,
        "backlog": context.backlog.requests + context.backlog.tokens,
        "bodies": state.bodies.held,
        "engine": server.engine.running,
        "leases": sum(slot.leases for slot in state.models._all()),
        "stored": len(running),
    }
    return {name: amount for name, amount in found.items() if amount}


@in_loop
async def test_a_background_response_keeps_its_place_and_its_tokens_until_it_ends(tmp_path):
    async with served(tmp_path) as (server, use, http, script):
        begun = (await http.post(RESPONSES, json=BACKGROUND)).json()
        await until(lambda: server.engine.running == 1)
        assert budgets(server, use).keys() >= {"parallel", "tokens", "leases", "sequences"}
        for body in (BACKGROUND, {"input": "hi"}, {**BACKGROUND, "stream": True}):
            refused = await http.post(RESPONSES, json=body)
            assert refused.status_code == 429
            assert "1 requests at the same time" in refused.text
        assert server.engine.running == 1
        script.go.set()
        await until(lambda: not budgets(server, use))
        found = (await http.get(f"{RESPONSES}/{begun['id']}")).json()
        assert found["status"] == "completed"
        assert (await http.post(RESPONSES, json=BACKGROUND)).status_code == 200
        await until(lambda: not budgets(server, use))


@in_loop
async def test_cancelled_background_responses_give_their_tokens_back(tmp_path):
    async with served(tmp_path) as (server, use, http, _):
        for _ in range(3):
            begun = await http.post(RESPONSES, json=BACKGROUND)
            assert begun.status_code == 200
            await until(lambda: server.engine.running == 1)
            assert use.reserved > 0
            # The response has taken the only place, and ending it needs none.
            path = f"{RESPONSES}/{begun.json()['id']}/cancel"
            assert (await http.post(path)).json()["status"] == "cancelled"
            await until(lambda: not budgets(server, use))
        spent = 3 * len(server.engine.asked[0][0])  # prompts whose clients leave count
        shown = await http.post("/tokenize", json={"prompt": "a"})
        assert int(shown.headers["x-ratelimit-remaining-tokens"]) == 4000 - spent


@pytest.mark.parametrize("error", [EngineDead("it was killed"), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_background_responses_that_fail_give_all_back(tmp_path, error, stream):
    async with served(tmp_path) as (server, use, http, script):
        script.error = error
        sent = asyncio.create_task(http.post(RESPONSES, json={**BACKGROUND, "stream": stream}))
        await until(lambda: server.engine.running == 1)
        script.go.set()
        assert (await sent).status_code == 200
        await until(lambda: not budgets(server, use))
        # A client that polls would wait for ever for another status.
        (entry,) = server.state.stored._entries.values()
        found = (await http.get(f"{RESPONSES}/{entry.id}")).json()
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


@in_loop
async def test_the_client_of_a_background_stream_may_leave_and_its_work_keeps_its_place(tmp_path):
    async with served(tmp_path) as (server, use, http, script):
        sent = asyncio.create_task(http.post(RESPONSES, json={**BACKGROUND, "stream": True}))
        await until(lambda: server.engine.running == 1)
        sent.cancel()
        await until(lambda: len(server.server.server_state.tasks) == 0)
        assert use.running == 1
        assert (await http.post(RESPONSES, json={"input": "hi"})).status_code == 429
        script.go.set()
        await until(lambda: not budgets(server, use))


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# What generates texts, vectors or scores, each with its own way through the server:
# the path, what is added to its body of ROUTES, and whether it goes on without its client.
KINDS = {
    "chat": (CHAT, {}),
    "chat, stream": (CHAT, {"stream": True}),
    "chat, choices": (CHAT, {"n": 3}),
    "chat, choices in a stream": (CHAT, {"n": 3, "stream": True}),
    "chat, beams": (CHAT, {**BEAMS, "n": 2}),
    "chats": ("/v1/chat/completions/batch", {"messages": [HI, HI]}),
    "text": (TEXT, {}),
    "texts in a stream": (TEXT, {"prompt": ["a", "b"], "stream": True}),
    "text with logprobs of its prompt": (TEXT, {"n": 2, "prompt_logprobs": 1}),
    "tokens": ("/inference/v1/generate", {}),
    "response": (RESPONSES, {}),
    "response, stream": (RESPONSES, {"stream": True}),
    "response of a conversation": (RESPONSES, {"conversation": True}),
    "background": (RESPONSES, {"background": True}),
    "background, stream": (RESPONSES, {"background": True, "stream": True}),
    "background of a conversation": (RESPONSES, {"background": True, "conversation": True}),
    "compaction": ("/v1/responses/compact", {"input": "hi"}),
    "message": ("/v1/messages", {}),
    "message, stream": ("/v1/messages", {"stream": True}),
    "decision": ("/v1/systemone", {}),
    "Ollama, chat": ("/api/chat", {"stream": True}),
    "Ollama, text": ("/api/generate", {}),
    "Ollama, vectors": ("/api/embed", {}),
    "llama.cpp": ("/completion", {}),
    "llama.cpp, stream": ("/completion", {"stream": True}),
    "llama.cpp, vectors": ("/embedding", {}),
    "TGI": ("/generate", {}),
    "TGI, stream": ("/generate_stream", {}),
    "vectors": ("/v1/embeddings", {"input": ["a", "b"]}),
    "ranks": ("/rerank", {}),
    "scores": ("/score", {}),
    "pooling": ("/pooling", {}),
    "labels": ("/classify", {}),
    "TEI, vectors": ("/embed", {}),
    "TEI, labels": ("/predict", {}),
    "Cohere": ("/v2/embed", {}),
    "similarities": ("/similarity", {}),
}
ENDS = ("finished", "cancelled", "client gone", "engine killed", "server drains")
# A caller of one request at a time, so each further one is refused.
LIMITS = "parallel=1 tpm=100k rpm=1000"


class Started:
    """One piece of work that waits in the engine, and what its caller has of it."""

    def __init__(self, http, kind):
        self._http = http
        self.path, self.more = KINDS[kind]
        self.body = {**ROUTES[self.path].body} if self.path in ROUTES else {}
        self.goes_on = self.more.get("background", False)
        self.sent = None

    async def begin(self, server):
        """Send the request, and return when all of its sequences wait in the engine."""
        body = {"model": "tiny", **self.body, **self.more}
        if body.get("conversation"):
            made = await self._http.post("/v1/conversations", json={})
            body["conversation"] = made.json()["id"]
        self.sent = asyncio.create_task(self._http.post(self.path, json=body))
        await until(lambda: server.engine.running or self.sent.done())
        assert server.engine.running, self.sent.result().text

    async def end(self, how, server, script):
        """End the work in one of five ways."""
        if how == "engine killed":
            script.error = EngineDead("it was killed", ran=True)
        if how == "cancelled":
            assert await self._cancel(server)
        elif how == "client gone" and not self.goes_on:
            self.sent.cancel()
            return
        elif how == "client gone":
            await asyncio.wait((self.sent,), timeout=0 if self.more.get("stream") else None)
            self.sent.cancel()
        elif how == "server drains":
            server.state.draining = server.server.should_exit = True
        script.go.set()
        await asyncio.wait((self.sent,))

    async def _cancel(self, server):
        """Cancel by the endpoint if there is one; else the operator ends the request."""
        if not self.goes_on:
            self.sent.cancel()
            return True
        (entry,) = (each for each in server.state.stored._entries.values() if each.running
                    and each.id.startswith("resp_"))  # fmt: skip
        answer = await self._http.post(f"{RESPONSES}/{entry.id}/cancel")
        return answer.json()["status"] == "cancelled"


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_work_gives_back_all_that_was_reserved(tmp_path, kind, how):
    async with served(tmp_path, LIMITS) as (server, use, http, script):
        route = ROUTES.get(KINDS[kind][0])
        prepare(server.context, route.pooling if route else "none")
        work = Started(http, kind)
        asked = use.requests.total()
        await work.begin(server)
        held = budgets(server, use)
        assert held.keys() >= {"parallel", "tokens", "sequences", "backlog", "engine", "leases"}
        assert held["parallel"] == 1
        used = use.requests.total()
        refused = await http.post(CHAT, json={"messages": HI})
        assert refused.status_code == 429
        assert "1 requests at the same time" in refused.text
        assert use.requests.total() == used > asked
        assert budgets(server, use) == held
        await work.end(how, server, script)
        await until(lambda: not budgets(server, use))
        if how != "server drains":
            script.error = None
            script.go.set()
            prepare(server.context, "none")
            assert (await http.post(CHAT, json={"messages": HI})).status_code == 200
            await until(lambda: not budgets(server, use))


@in_loop
async def test_who_has_the_last_byte_may_send_the_next_request(tmp_path):
    """The place of a request, and its conversation, are free before its last byte is sent."""

    def ask(port, stream, times):
        connection, seen = http.client.HTTPConnection("127.0.0.1", port), []
        made = {"x-api-key": KEY, "content-type": "application/json"}
        connection.request("POST", "/v1/conversations", "{}", made)
        talk = json.loads(connection.getresponse().read())["id"]
        body = json.dumps({"input": "hi", "conversation": talk, "stream": stream,
                           "max_output_tokens": 1})  # fmt: skip
        for _ in range(times):
            connection.request("POST", RESPONSES, body, made)
            answer = connection.getresponse()
            answer.read()
            seen.append(answer.status)
        connection.close()
        return seen

    async with served(tmp_path, LIMITS) as (server, use, _, script):
        script.go.set()
        for stream in (False, True):
            seen = await asyncio.to_thread(ask, server.port, stream, 8)
            assert seen == [200] * 8
        await until(lambda: not budgets(server, use))
