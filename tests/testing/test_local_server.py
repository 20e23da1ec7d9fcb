"""cpuserve.testing.serve: a real server that starts on a free port and ends with its test."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import openai
import psutil
import pytest

from cpuserve.base.errors import StartupError
from cpuserve.testing import serve
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.tiny import tiny_model


@pytest.fixture(scope="module")
def server():
    options = ("--served-model-name", "tiny", "--max-num-seqs", "4")
    with serve(tiny_model("llama"), *options, api_key="secret") as server:
        yield server


def complete(server, **fields):
    with openai.OpenAI(base_url=server.openai_url, api_key=server.api_key) as client:
        given = client.completions.create(
            model=server.model, prompt="One two", max_tokens=8, logprobs=1, **fields
        )
    return given.choices[0]


def test_it_has_its_name_key_and_output(server):
    assert (server.model, server.api_key) == ("tiny", "secret")
    assert f"is ready: {server.url}/v1" in server.output
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{server.url}/v1/models", timeout=PATIENCE_S)
    assert error.value.code == 401
    error.value.close()


def test_requests_without_a_temperature_take_the_most_likely_tokens(server):
    greedy = complete(server)
    assert greedy.text == complete(server, temperature=0).text
    tops = greedy.logprobs.top_logprobs
    assert [max(top, key=top.get) for top in tops] == greedy.logprobs.tokens
    sampled = {complete(server, temperature=1.5, seed=7).text for _ in range(2)}
    assert len(sampled) == 1
    assert sampled != {greedy.text}


def test_a_model_that_cannot_start_is_an_error_with_the_output(tmp_path):
    words = r"ended with exit code 2; it printed:\n.*missing"
    with pytest.raises(StartupError, match=words) as error, serve(tmp_path / "missing"):
        pass
    assert "Traceback" not in str(error.value)


@pytest.mark.deep
def test_a_server_ends_with_the_process_that_started_it():
    code = (
        "import sys, time\nfrom cpuserve.testing import serve\n"
        f"with serve({str(tiny_model('llama'))!r}) as server:\n"
        "    print(server.pid, flush=True)\n    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **child_options()
    )
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not child.is_running(), "the server did not end")
