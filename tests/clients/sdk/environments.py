"""The clients, each with the packages of its environment and the servers that its flows need.

A client's flows are in test_sdk_NAME.py. To take newer versions, change them here.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTEST = "pytest==9.2.0"


@dataclass(frozen=True, slots=True)
class Environment:
    """packages: pinned, the client first. servers: see servers.py.

    hub: the client sends its requests with huggingface_hub, which HF_HUB_OFFLINE would forbid.
    in_extra: the packages are in the extra `test`, so the flows are a part of the default suite.
    """

    packages: tuple[str, ...]
    servers: tuple[str, ...] = ("scripted",)
    in_extra: bool = False
    hub: bool = False

    @property
    def client(self) -> str:
        """The name of the first package, without its extras and version."""
        return self.packages[0].partition("=")[0].partition("[")[0]


_OPENAI, _ANTHROPIC = "openai==3.57.0", "anthropic==2.14.0"
VECTORS = ("scripted", "vectors")
ENVIRONMENTS = {
    "openai": Environment((_OPENAI,), VECTORS, in_extra=True),
    "anthropic": Environment((_ANTHROPIC,), in_extra=True),
    "ollama": Environment(("ollama==0.6.3",), VECTORS, in_extra=True),
    "huggingface_hub": Environment(
        ("huggingface-hub==2.4.0", "aiohttp==3.14.5"), ("scripted", "tiny"), in_extra=True, hub=True
    ),
    "langchain_huggingface": Environment(
        ("langchain-huggingface==1.2.3", "huggingface-hub==1.33.0", "aiohttp==3.14.5"), hub=True
    ),
    # Newer versions of huggingface-hub lack an argument that distilabel gives.
    "distilabel": Environment(
        (
            "distilabel[hf-inference-endpoints]==1.5.3",
            "huggingface-hub==0.36.2",
            "datasets==4.5.0",
            "requests==2.34.2",
        ),
        hub=True,
    ),
    "voyageai": Environment(("voyageai==0.5.0", "mixedbread==0.54.0"), VECTORS),
    "mem0": Environment(("mem0ai==2.2.1",), ("pair",)),
    "litellm": Environment(("litellm==1.110.2",), VECTORS),
    "langchain": Environment(
        (
            "langchain-core==1.8.3",
            "langchain-openai==1.7.4",
            "langchain-anthropic==1.7.10",
            "langchain-ollama==1.1.0",
        ),
        VECTORS,
    ),
    "llama_index": Environment(("llama-index-llms-openai-like==0.8.1",)),
    "instructor": Environment(("instructor==1.17.0", _ANTHROPIC), ("scripted", "smollm2")),
    "pydantic_ai": Environment(("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    "openai_agents": Environment(("openai-agents==0.24.0",)),
    "llm": Environment(("llm==0.36",)),
    "lm_eval": Environment(("lm-eval[api]==0.4.13", "transformers==5.24.0"), ("scripted", "tiny")),
    "inspect_ai": Environment(("inspect-ai==0.3.285", _OPENAI, _ANTHROPIC)),
    "dspy": Environment(("dspy==3.4.1",)),
    "haystack": Environment(("haystack-ai==3.4.1",), VECTORS),
}
