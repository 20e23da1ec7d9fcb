"""The tables of docs/migrating.md: options of vLLM, llama.cpp and Ollama and their counterparts.

The lists contain the flags and variables that users of these servers need most, by subject. Their
counterparts are looked up in config/fields.py and config/missing.py, as the parser does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cpuserve.cli.listings import markdown
from cpuserve.config.fields import FIELDS, NO_OPS
from cpuserve.config.missing import MISSING, UNREAD


@dataclass(frozen=True, slots=True)
class OtherServer:
    """Another server that users migrate from.

    commands: its commands, each with the cpuserve command or another way to the same result.
    names: its flags and environment variables, by subject.
    remarks: differences in the meaning of an option, by flag.
    """

    title: str
    commands: Mapping[str, str]
    names: Mapping[str, str]
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The flags and environment variables of all subjects."""
        return tuple(name for names in self.names.values() for name in names.split())


VLLM = OtherServer(
    "vLLM",
    {
        "vllm serve MODEL": "`cpuserve serve MODEL`",
        "python -m vllm.entrypoints.openai.api_server": (
            "`python -m cpuserve.entrypoints.openai.api_server`"
        ),
        "vllm chat": "`cpuserve chat --url http://HOST:8000`, or without `--url`",
        "vllm complete": "`cpuserve complete --url http://HOST:8000`, or without `--url`",
        "vllm bench serve": (
            "`cpuserve bench serve --model MODEL`, with the flags and result files of vLLM"
        ),
        "vllm bench latency": "`cpuserve bench latency`",
        "vllm bench throughput": "`cpuserve bench throughput`",
        "vllm run-batch": "`cpuserve run-batch -i FILE -o FILE MODEL`",
        "vllm collect-env": "`cpuserve doctor`",
    },
    {
        "Model": "--model --served-model-name --revision --tokenizer --dtype --quantization "
        "--max-model-len --trust-remote-code --load-format --download-dir --hf-overrides "
        "--generation-config --override-generation-config --enable-lora --lora-modules "
        "--max-loras --max-lora-rank --runner --convert --limit-mm-per-prompt",
        "Memory and batching": "--gpu-memory-utilization --kv-cache-memory-bytes "
        "VLLM_CPU_KVCACHE_SPACE --kv-cache-dtype --block-size --swap-space --cpu-offload-gb "
        "--max-num-seqs --max-num-batched-tokens --enable-prefix-caching "
        "--no-enable-prefix-caching --enable-chunked-prefill --scheduling-policy "
        "--speculative-config --kv-transfer-config --kv-offloading-size",
        "CPU and processes": "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU "
        "VLLM_CPU_SGL_KERNEL --tensor-parallel-size --pipeline-parallel-size "
        "--data-parallel-size --distributed-executor-backend --enforce-eager "
        "--compilation-config --async-scheduling",
        "Server": "--host --port --uds --api-key VLLM_API_KEY --root-path --ssl-keyfile "
        "--ssl-certfile --allowed-origins --allowed-methods --allow-credentials --middleware "
        "--uvicorn-log-level VLLM_LOGGING_LEVEL --disable-log-stats --enable-log-requests "
        "--otlp-traces-endpoint VLLM_SERVER_DEV_MODE --enable-sleep-mode "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "Chats and responses": "--chat-template --default-chat-template-kwargs "
        "--chat-template-content-format --enable-auto-tool-choice --tool-call-parser "
        "--tool-parser-plugin --reasoning-parser --structured-outputs-config --max-logprobs "
        "--response-role --return-tokens-as-token-ids --stream-interval",
    },
    {
        "--host": "the default is 127.0.0.1, not all addresses",
        "--allowed-origins": "origins separated by commas or a JSON list; the default is none, "
        "not all",
        "--quantization": "int8, w8a8, int4 and int4_mixed quantize while loading; the formats of "
        "checkpoints need no flag",
        "--max-num-seqs": "the default is 64",
        "--swap-space": "memory for blocks that leave the KV cache, as for "
        "`--kv-offloading-size` of vLLM",
        "--speculative-config": "the methods ngram and draft_model",
    },
)

LLAMA_CPP = OtherServer(
    "llama.cpp",
    {
        "llama-server -m FILE.gguf": "`cpuserve serve FILE.gguf`",
        "llama-server -hf OWNER/MODEL:Q4_K_M": "`cpuserve serve OWNER/MODEL:Q4_K_M`",
        "llama-cli -m FILE.gguf": "`cpuserve chat FILE.gguf`",
        "llama-bench": "`cpuserve bench throughput FILE.gguf`",
        "llama-batched-bench": "`cpuserve bench step FILE.gguf`",
        "llama-embedding": "`cpuserve serve FILE.gguf`, and `/v1/embeddings`",
        "llama-quantize": "`cpuserve serve MODEL --quantization int8` quantizes while loading; "
        "`cpuserve quantize MODEL DIR` writes safetensors",
        "llama-gguf-split --merge": "not needed: serve the first part of the file",
    },
    {
        "Model": "-m --model -hf -hff --hf-token --model-url --offline --alias --lora "
        "--lora-scaled --mmproj --override-kv --models-dir --models-preset --models-max "
        "--chat-template --chat-template-file --chat-template-kwargs --jinja",
        "Memory and batching": "-c --ctx-size LLAMA_ARG_CTX_SIZE -np -b -ub "
        "--cont-batching --kv-unified --cache-type-k --cache-type-v --flash-attn --mlock "
        "--no-mmap --cache-prompt --cache-reuse --cache-ram --slot-save-path --context-shift "
        "--keep --swa-full --spec-type --draft-max --model-draft",
        "CPU": "-t --threads -tb LLAMA_ARG_THREADS --threads-http --cpu-mask --cpu-range --prio "
        "--poll --numa -ngl --n-gpu-layers --tensor-split --cpu-moe --n-cpu-moe --device "
        "--no-warmup",
        "Server": "--host --port LLAMA_ARG_HOST --api-key --api-key-file --timeout --metrics "
        "--slots --props --embeddings --reranking --pooling --no-webui --path --api-prefix "
        "--ssl-key-file --sse-ping-interval --sleep-idle-seconds --tools --cors-origins "
        "--verbose --log-file --log-disable",
        "Thoughts": "--reasoning-format --reasoning --reasoning-budget --reasoning-budget-message",
        "Sampling": "-n --seed --temp --top-k --top-p --min-p --repeat-penalty --repeat-last-n "
        "--presence-penalty --samplers --mirostat --dry-multiplier --logit-bias --grammar "
        "--json-schema --ignore-eos --reverse-prompt",
    },
    {
        "--port": "the default is 8000",
        "--api-key-file": "a name before each key, and limits after it",
        "--numa": "with other values: auto, tp, replicas, interleave and off",
        "--models-dir": "directory of models that clients create and pull; `--models FILE` lists "
        "models of the disk",
        "--chat-template": "a Jinja file or the template itself; there are no built-in ones",
        "--pooling": "`none` means that the model writes text; `/pooling` returns the vectors of "
        "all tokens",
        "-c": "the context of each request, not of all slots together; 0 means the context of the "
        "model",
        "--ctx-size": "the context of each request, not of all slots together",
        "LLAMA_ARG_CTX_SIZE": "the context of each request, not of all slots together",
        "-np": "that many requests run and share the KV cache, and further ones wait",
        "--sse-ping-interval": "the default is 15 seconds",
    },
)

OLLAMA = OtherServer(
    "Ollama",
    {
        "ollama serve": "`cpuserve serve MODEL`",
        "ollama run MODEL": "`cpuserve run MODEL`",
        "ollama run MODEL TEXT": "`cpuserve run MODEL TEXT`",
        "ollama pull MODEL": "`cpuserve pull MODEL`, from the Hugging Face hub",
        "ollama list": "`cpuserve list`, and `/api/tags` for models of a server",
        "ollama ps": "`cpuserve ps`",
        "ollama show MODEL": "`cpuserve show MODEL`, or `/api/show` of a server",
        "ollama stop MODEL": "`cpuserve stop MODEL`",
        "ollama create": "works against `cpuserve serve --models-dir DIR`",
        "ollama cp": "works against `cpuserve serve --models-dir DIR`",
        "ollama rm": "`cpuserve rm MODEL`, and `/api/delete` with `--models-dir DIR`",
        "ollama push": "not supported: there is no registry",
    },
    {
        "Server": "OLLAMA_HOST OLLAMA_ORIGINS OLLAMA_DEBUG OLLAMA_MAX_QUEUE OLLAMA_REMOTES "
        "OLLAMA_NO_CLOUD OLLAMA_NOHISTORY",
        "Models": "OLLAMA_MODELS OLLAMA_KEEP_ALIVE OLLAMA_MAX_LOADED_MODELS "
        "OLLAMA_LOAD_TIMEOUT OLLAMA_NOPRUNE OLLAMA_TMPDIR",
        "Memory and speed": "OLLAMA_CONTEXT_LENGTH OLLAMA_NUM_PARALLEL OLLAMA_KV_CACHE_TYPE "
        "OLLAMA_FLASH_ATTENTION OLLAMA_MULTIUSER_CACHE OLLAMA_LLM_LIBRARY OLLAMA_SCHED_SPREAD "
        "OLLAMA_GPU_OVERHEAD OLLAMA_VULKAN OLLAMA_NEW_ENGINE",
        "Flags of `ollama run`": "--keepalive --think --hidethinking --nowordwrap --insecure",
    },
    {"OLLAMA_KEEP_ALIVE": "by default, a model stays until another one needs its memory"},
)

SERVERS = (VLLM, LLAMA_CPP, OLLAMA)
OWN, ALIAS, IGNORED, REFUSED = "yes", "as an alias", "without effect", "refused"
UNREAD_VARIABLE = "ignored"


def counterpart(name: str) -> tuple[str, str]:
    """Return how cpuserve accepts a flag or variable of another server, and its counterpart.

    Raises:
        KeyError: cpuserve has no entry for this name.
    """
    for option in FIELDS:
        own = (*option.flags, *(f"--no-{flag[2:]}" for flag in option.flags))
        if name in (*own, option.env):
            return OWN, f"`{name}`"
        for alias in option.aliases:
            if alias.name == name:
                differs = f", {alias.differs}" if alias.differs else ""
                return ALIAS, f"`{option.flag}`{differs}"
    for how, entries in ((IGNORED, NO_OPS), (REFUSED, MISSING), (UNREAD_VARIABLE, UNREAD)):
        for entry in entries:
            if name in entry.names:
                return how, _code(entry.why)
    raise KeyError(name)


def _code(text: str) -> str:
    """Return `text` with its flags in backquotes."""
    if "`" in text or "'" in text:
        return text
    words = (f"`{word}`" if word.startswith("--") else word for word in text.split())
    return " ".join(words).replace(",`", "`,").replace(";`", "`;").replace(":`", "`:")


def tables(server: OtherServer) -> str:
    """Return Markdown with a table of commands, and a table of options for each subject."""
    rows = [[server.title, "cpuserve"], *([f"`{c}`", to] for c, to in server.commands.items())]
    parts = ["\n".join(markdown(rows))]
    for subject, names in server.names.items():
        rows = [[subject, "accepted", "in cpuserve"], *_rows(server, names.split())]
        parts.append("\n".join(markdown(rows)))
    return "\n\n".join(parts)


def _rows(server: OtherServer, names: Sequence[str]) -> Iterator[list[str]]:
    for name in names:
        how, to = counterpart(name)
        remark = server.remarks.get(name)
        if how == OWN:
            yield [f"`{name}`", how, remark or "the option of the same name"]
        else:
            what = f"sets {to}" if how == ALIAS else to
            yield [f"`{name}`", how, f"{what}: {remark}" if remark else what]
