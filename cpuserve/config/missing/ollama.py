"""Flags and variables of Ollama that cpuserve does not have, and what to do instead."""

from __future__ import annotations

from cpuserve.config.missing.record import Missing

MISSING: tuple[Missing, ...] = (
    Missing(("--keepalive",), "use --keep-alive"),
    Missing(("--insecure",), "models are downloaded over HTTPS only"),
    Missing(("--nowordwrap",), "the terminal wraps long lines; leave it out"),
    Missing(("--think", "--hidethinking"), "set think or reasoning_effort in the request"),
)

# Variables of the Ollama server. They are not read,
# because a machine may have them for Ollama itself. OLLAMA_KEEP_ALIVE is an alias of --keep-alive.
UNREAD: tuple[Missing, ...] = (
    Missing(("OLLAMA_HOST",), "use --host and --port"),
    Missing(("OLLAMA_MODELS",), "use --models-dir, for models that clients create and pull"),
    Missing(("OLLAMA_CONTEXT_LENGTH",), "use --max-model-len"),
    Missing(
        ("OLLAMA_NUM_PARALLEL",), "use --max-num-seqs; requests share one KV cache and its memory"
    ),
    Missing(("OLLAMA_MAX_QUEUE",), "use --max-num-queued-reqs; a full queue returns 429"),
    Missing(
        ("OLLAMA_MAX_LOADED_MODELS",),
        "models stay in memory until --keep-alive has passed or another model needs it",
    ),
    Missing(("OLLAMA_ORIGINS",), "use --allowed-origins"),
    Missing(("OLLAMA_KV_CACHE_TYPE",), "use --kv-cache-dtype (int8 instead of q8_0)"),
    Missing(("OLLAMA_FLASH_ATTENTION",), "attention needs no option"),
    Missing(("OLLAMA_DEBUG",), "use --log-level debug"),
    Missing(("OLLAMA_LOAD_TIMEOUT",), "a load has no limit; /health returns 503 until it ends"),
    Missing(("OLLAMA_LLM_LIBRARY",), "use --isa for a lower instruction-set level"),
    Missing(("OLLAMA_MULTIUSER_CACHE",), "all requests share the cached prefixes"),
    Missing(("OLLAMA_NOPRUNE",), "--models-bytes bounds the files, and nothing is pruned"),
    Missing(("OLLAMA_NOHISTORY",), "`cpuserve chat` writes no history"),
    Missing(("OLLAMA_TMPDIR",), "set TMPDIR"),
    Missing(
        (
            "OLLAMA_SCHED_SPREAD",
            "OLLAMA_GPU_OVERHEAD",
            "OLLAMA_VULKAN",
            "OLLAMA_INTEL_GPU",
            "OLLAMA_MAX_VRAM",
        ),
        "this server runs on CPUs",
    ),
    Missing(
        ("OLLAMA_NEW_ENGINE", "OLLAMA_NEW_ESTIMATES"),
        "there is one engine, and `cpuserve config MODEL` shows its memory",
    ),
    Missing(
        ("OLLAMA_REMOTES", "OLLAMA_NO_CLOUD"),
        "the server sends no request to other servers",
    ),
)
