"""Flags and variables of llama.cpp that cpuserve does not have, and what to do instead."""

from __future__ import annotations

from cpuserve.config.missing.record import Missing

_REQUEST = "set it in the request"
_SAMPLING = f"{_REQUEST}, or its default with --override-generation-config '{{\"%s\": N}}'"


def _sampling(setting: str, *names: str) -> Missing:
    return Missing(names, _SAMPLING % setting)


MISSING: tuple[Missing, ...] = (
    # threads and memory
    Missing(
        ("--threads", "--threads-batch", "-t", "-tb"),
        "use --omp-threads-bind, or OMP_NUM_THREADS with --omp-threads-bind nobind",
    ),
    Missing(
        (
            "--cpu-mask",
            "-C",
            "--cpu-range",
            "-Cr",
            "--cpu-strict",
            "--cpu-mask-batch",
            "-Cb",
            "--cpu-range-batch",
            "-Crb",
            "--cpu-strict-batch",
        ),
        "use --omp-threads-bind with a list of CPUs, such as 0-15",
    ),
    Missing(
        ("--prio", "--prio-batch"),
        "start the server with `nice`, or with CPUWeight of systemd",
    ),
    Missing(
        ("--poll", "--poll-batch"),
        "threads wait actively for a bounded time and then sleep; leave it out",
    ),
    Missing(
        ("--threads-http",),
        "the front end is one process, on the cores of --num-reserved-cpu",
    ),
    Missing(
        (
            "--n-gpu-layers",
            "--gpu-layers",
            "-ngl",
            "--main-gpu",
            "-mg",
            "--tensor-split",
            "-ts",
            "--split-mode",
            "-sm",
            "--override-tensor",
            "-ot",
            "-dev",
            "--fit-target",
            "-fitt",
        ),
        "this server runs on CPUs; leave it out",
    ),
    Missing(("--batch-size",), "use --max-num-batched-tokens (-b) to bound the tokens of a step"),
    Missing(
        ("--ubatch-size", "-ub"),
        "use --max-num-batched-tokens (-b) to bound the tokens of a step",
    ),
    Missing(
        ("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
        "use --kv-cache-dtype, one type for keys and values, such as int8 instead of q8_0",
    ),
    Missing(
        ("--cache-ram", "-cram"),
        "use --swap-space, in GiB, for prefixes that leave the KV cache",
    ),
    Missing(
        ("--ctx-checkpoints", "-ctxcp", "--swa-checkpoints", "--checkpoint-min-step", "-cms"),
        "recurrent layers keep their states without an option; leave it out",
    ),
    Missing(("--swa-full",), "sliding windows always free their blocks; leave it out"),
    Missing(
        ("--mlock",),
        "switch off swapping instead (`swapoff -a`, or MemorySwapMax=0 of systemd)",
    ),
    Missing(
        ("--load-mode", "-lm", "--lazy-mode", "-lzm", "--direct-io", "-dio"),
        "--weights-on-disk decides if weights are mapped from a file",
    ),
    Missing(
        ("--no-repack", "-nr"),
        "the kernels read packed weights only; leave it out",
    ),
    Missing(
        ("--flash-attn", "-fa"),
        "attention needs no option; leave it out",
    ),
    # contexts and prefixes
    Missing(
        ("--predict", "--n-predict", "-n"),
        "set max_tokens in the request, or its default with --override-generation-config "
        "'{\"max_new_tokens\": N}'",
    ),
    Missing(
        ("--context-shift", "--keep"),
        "no token leaves a context: a response ends at --max-model-len, and a longer prompt is "
        "refused",
    ),
    Missing(("--no-cache-prompt",), "use --no-enable-prefix-caching"),
    Missing(
        ("--cache-reuse",),
        "only equal prefixes are reused, so that a hit changes no bit; leave it out",
    ),
    Missing(
        ("--slot-save-path",),
        "use --prefix-cache-dir, which keeps the prefixes of all requests",
    ),
    Missing(
        ("--slot-prompt-similarity", "-sps"),
        "each request finds its longest cached prefix; leave it out",
    ),
    Missing(("--no-cont-batching", "-nocb"), "use --max-num-seqs 1 for one request at a time"),
    Missing(
        (
            "--rope-scale",
            "--rope-freq-base",
            "--rope-freq-scale",
            "--override-kv",
            "--yarn-orig-ctx",
            "--yarn-ext-factor",
            "--yarn-attn-factor",
            "--yarn-beta-slow",
            "--yarn-beta-fast",
        ),
        "change the metadata of the GGUF file with `gguf-set-metadata` (of the package gguf)",
    ),
    # models and adapters
    Missing(
        ("--hf-file", "-hff"),
        "name the file after the model: OWNER/MODEL:FILE.gguf",
    ),
    Missing(("-hft",), "set the environment variable HF_TOKEN"),
    Missing(
        ("--model-url", "-mu", "--docker-repo", "-dr"),
        "download the file and serve its path, or serve OWNER/MODEL:Q4_K_M of the Hugging Face hub",
    ),
    Missing(("--offline",), "set HF_HUB_OFFLINE=1, or serve a path: the server then loads nothing"),
    Missing(("--alias", "-a"), "use --served-model-name A B, with spaces instead of commas"),
    Missing(("--tags",), "lists of models have no tags; leave it out"),
    Missing(
        ("--lora", "--lora-scaled", "--lora-init-without-apply"),
        "use --lora-modules NAME=PATH, and NAME as the model of a request",
    ),
    Missing(
        ("--control-vector", "--control-vector-scaled", "--control-vector-layer-range"),
        "control vectors are not supported",
    ),
    Missing(
        ("--models-preset", "--models-max", "--models-autoload", "--no-models-autoload"),
        "use --models FILE; models are loaded for requests, and unloaded after --keep-alive or "
        "if memory is short",
    ),
    Missing(
        (
            "--spec-type",
            "--draft",
            "--draft-n",
            "--draft-max",
            "--draft-min",
            "--draft-n-min",
            "--spec-draft-model",
            "--spec-draft-n-max",
            "--spec-draft-n-min",
            "--lookup-cache-static",
            "-lcs",
            "--lookup-cache-dynamic",
            "-lcd",
        ),
        'use --speculative-config \'{"method": "ngram", "num_speculative_tokens": N}\'',
    ),
    # chats
    Missing(
        ("--chat-template-kwargs",),
        "set chat_template_kwargs in the request",
    ),
    Missing(
        ("--reasoning", "-rea", "--reasoning-effort"),
        "set reasoning_effort or chat_template_kwargs in the request",
    ),
    Missing(
        ("--reasoning-format",),
        "thoughts are apart from the text, and --reasoning-parser none leaves them in it",
    ),
    Missing(("--no-jinja",), "chat templates are always rendered with Jinja; leave it out"),
    Missing(
        (
            "--tools",
            "--tools-runtime",
            "--agent",
            "-ag",
            "--mcp-servers-config",
            "--mcp-servers-json",
            "--ui-mcp-proxy",
            "--webui-mcp-proxy",
        ),
        "clients run the tools",
    ),
    Missing(("--spm-infill",), "the model decides the order of fill-in tokens; leave it out"),
    Missing(("--image-min-tokens", "--image-max-tokens", "-mm"), "only text input is supported"),
    # sampling
    _sampling("temperature", "--temp", "--temperature"),
    _sampling("top_k", "--top-k"),
    _sampling("top_p", "--top-p"),
    _sampling("min_p", "--min-p"),
    _sampling("repetition_penalty", "--repeat-penalty"),
    Missing(
        (
            "--presence-penalty",
            "--frequency-penalty",
            "--repeat-last-n",
            "--ignore-eos",
            "--samplers",
            "--sampler-seq",
            "--sampling-seq",
            "--logit-bias",
            "-l",
            "--typical",
            "--typical-p",
            "--top-nsigma",
            "--top-n-sigma",
            "--xtc-probability",
            "--xtc-threshold",
            "--dynatemp-range",
            "--dynatemp-exp",
            "--dry-multiplier",
            "--dry-base",
            "--dry-allowed-length",
            "--dry-penalty-last-n",
            "--dry-sequence-breaker",
            "--mirostat",
            "--mirostat-lr",
            "--mirostat-ent",
            "--embd-normalize",
        ),
        f"{_REQUEST}: it has no default for all requests",
    ),
    Missing(
        ("--grammar", "--grammar-file", "--json-schema", "-j", "--json-schema-file", "-jf"),
        "set grammar, json_schema or response_format in the request",
    ),
    Missing(("--reverse-prompt", "-r"), "set stop in the request"),
    Missing(("--special", "-sp"), "set skip_special_tokens to false in the request"),
    Missing(("-s",), "use --seed"),
    # the server
    Missing(
        ("--api-key-file",),
        "set CPUSERVE_API_KEY to the keys, separated by commas",
    ),
    Missing(("--timeout", "-to"), "use --request-timeout to bound a request"),
    Missing(("--reuse-port",), "use --data-parallel-size for several engines at one port"),
    Missing(("--path",), "let a proxy serve static files (see deploy/nginx.conf)"),
    Missing(("--no-ui",), "use --no-webui"),
    Missing(
        ("--ui-config", "--ui-config-file", "--webui-config"),
        "the chat page keeps settings in the browser",
    ),
    Missing(("--props",), "settings cannot change while the server runs"),
    Missing(
        ("--cors-origins", "--cors-methods", "--cors-headers", "--cors-credentials"),
        "use --allowed-origins, --allowed-methods, --allowed-headers and --allow-credentials",
    ),
    Missing(("--log-disable",), "use --log-level error"),
    Missing(("--log-file",), "redirect the log, which is on stderr: 2> FILE"),
    Missing(
        ("--verbose", "-v", "--verbosity", "-lv", "--log-verbose", "--log-verbosity"),
        "use --log-level debug",
    ),
    Missing(
        ("--log-colors", "--log-prefix", "--log-timestamps", "--log-jsonl"),
        "lines of the log have one format; leave it out",
    ),
    Missing(
        ("--list-devices",),
        "run `cpuserve doctor`, which shows the CPU, its memory and its NUMA nodes",
    ),
    Missing(("--rpc",), "one server runs on one machine; put a load balancer before several"),
)

# Variables of llama-server, each with the flag that it stands for there.
# A variable that has the same meaning as an option of cpuserve is an alias of this option instead.
_FLAGS = {
    "LLAMA_ARG_THREADS": "--threads",
    "LLAMA_ARG_N_GPU_LAYERS": "--n-gpu-layers",
    "LLAMA_ARG_UBATCH": "--ubatch-size",
    "LLAMA_ARG_N_PREDICT": "--n-predict",
    "LLAMA_ARG_FLASH_ATTN": "--flash-attn",
    "LLAMA_ARG_CACHE_TYPE_K": "--cache-type-k",
    "LLAMA_ARG_CACHE_TYPE_V": "--cache-type-v",
    "LLAMA_ARG_CACHE_RAM": "--cache-ram",
    "LLAMA_ARG_MLOCK": "--mlock",
    "LLAMA_ARG_MODEL_URL": "--model-url",
    "LLAMA_ARG_HF_FILE": "--hf-file",
    "LLAMA_ARG_ALIAS": "--alias",
    "LLAMA_ARG_CHAT_TEMPLATE_KWARGS": "--chat-template-kwargs",
    "LLAMA_ARG_TEMPERATURE": "--temp",
    "LLAMA_ARG_TOP_K": "--top-k",
    "LLAMA_ARG_TOP_P": "--top-p",
    "LLAMA_ARG_THREADS_HTTP": "--threads-http",
    "LLAMA_ARG_TIMEOUT": "--timeout",
    "LLAMA_ARG_API_KEY_FILE": "--api-key-file",
    "LLAMA_ARG_SLOT_SAVE_PATH": "--slot-save-path",
}
_WHY = {name: missing.why for missing in MISSING for name in missing.names}
UNREAD: tuple[Missing, ...] = tuple(Missing((name,), _WHY[flag]) for name, flag in _FLAGS.items())
