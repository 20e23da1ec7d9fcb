"""Every kind of work gives back all that was reserved for it, however it ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from cpuserve.errors import EngineDead
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import speak
from tests.api.live import live
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
        yield from speak(*asked)


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
