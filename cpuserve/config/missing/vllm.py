"""Flags of vLLM that cpuserve does not have, and what to do instead."""

from __future__ import annotations

from cpuserve.config.missing.record import Missing

MISSING: tuple[Missing, ...] = (
    Missing(
        (
            "--lora-dtype",
            "--lora-extra-vocab-size",
            "--fully-sharded-loras",
            "--default-mm-loras",
        ),
        "LoRA adapters are kept in the type of the model and change linears of its layers only",
    ),
    Missing(
        ("--tool-parser-plugin", "--tool-server"),
        "the format of tool calls is found from the chat template or named by --tool-call-parser, "
        "and clients run the tools",
    ),
    Missing(
        ("--enable-reasoning", "--reasoning-parser-plugin"),
        "the tags of thoughts are found in the chat template or named by --reasoning-parser",
    ),
    Missing(
        ("--guided-decoding-backend", "--structured-outputs-config"),
        "structured output needs no option, and llguidance is its only backend",
    ),
    Missing(
        (
            "--speculative-model",
            "--num-speculative-tokens",
            "--num-lookahead-slots",
            "--model-draft",
            "-md",
        ),
        "draft models are not supported yet; --speculative-config guesses tokens by n-grams",
    ),
    Missing(
        (
            "--ssl-keyfile",
            "--ssl-certfile",
            "--ssl-ca-certs",
            "--ssl-cert-reqs",
            "--ssl-ciphers",
            "--enable-ssl-refresh",
            "--ssl-key-file",
            "--ssl-cert-file",
        ),
        "this server speaks plain HTTP; put a proxy that handles TLS before it (see "
        "deploy/nginx.conf)",
    ),
    Missing(
        ("--root-path", "--api-prefix"),
        "routes begin at /; let the proxy remove the prefix",
    ),
    Missing(
        ("--middleware", "--logits-processors", "--logits-processor-pattern", "--worker-cls"),
        "the server does not load user code",
    ),
    Missing(
        (
            "--limit-mm-per-prompt",
            "--mm-processor-kwargs",
            "--media-io-kwargs",
            "--allowed-local-media-path",
            "--allowed-media-domains",
            "--mmproj",
        ),
        "only text input is supported",
    ),
    Missing(
        ("--pooler-config",),
        "--pooling chooses how embeddings are made, or scores",
    ),
    Missing(
        ("--hf-overrides", "--rope-scaling", "--rope-theta", "--hf-config-path"),
        "change the model's config.json instead",
    ),
    Missing(
        ("--tokenizer-revision", "--code-revision"),
        "--revision selects the version of the whole repository, tokenizer included",
    ),
    Missing(("--hf-token",), "set the environment variable HF_TOKEN"),
    Missing(
        ("--download-dir",),
        "set HF_HOME for models from the hub, CPUSERVE_CACHE for built-in ones",
    ),
    Missing(
        ("--num-gpu-blocks-override",), "use --kv-cache-memory to set the size of the KV cache"
    ),
    Missing(("--response-role",), "responses always have the role assistant"),
    Missing(
        ("--max-logprobs", "--logprobs-mode"),
        "a request may ask for 20 logprobs at most",
    ),
    Missing(
        ("--return-tokens-as-token-ids",),
        "set return_tokens_as_token_ids in the request",
    ),
    Missing(("--enable-prompt-embeds", "--skip-tokenizer-init"), "prompts are text or token ids"),
    Missing(("--enable-sleep-mode",), "stop the server instead; it is ready again in seconds"),
    Missing(
        ("--enable-expert-parallel", "--enable-eplb"),
        "experts are divided among ranks like all weights: --tensor-parallel-size",
    ),
    Missing(
        (
            "--data-parallel-rank",
            "--data-parallel-size-local",
            "--data-parallel-address",
            "--data-parallel-rpc-port",
            "--data-parallel-backend",
            "--headless",
            "--nnodes",
            "--node-rank",
            "--master-addr",
        ),
        "one server runs on one machine; put a load balancer in front of several (see deploy/)",
    ),
    Missing(
        ("--kv-transfer-config",),
        "the KV cache stays in this server; --prefix-cache-dir keeps it across restarts",
    ),
    Missing(
        ("--otlp-traces-endpoint", "--collect-detailed-traces"),
        "traces are not supported yet; /metrics has timings",
    ),
    Missing(
        ("--enable-log-requests", "--log-config-file"),
        "use --log-level debug to log one line per request, without its text",
    ),
    Missing(
        ("--output-tmp-dir",),
        "`cpuserve run-batch` appends each result to the output file at once; leave it out",
    ),
    Missing(
        ("--enable-metrics",),
        "`cpuserve run-batch` has no port; run the file with /v1/batches of a server for metrics",
    ),
    Missing(
        ("--default-chat-template-kwargs",),
        "set chat_template_kwargs in the request",
    ),
    Missing(("--stream-interval",), "set stream_interval in the request"),
    Missing(("--enable-force-include-usage",), "set stream_options in the request"),
    Missing(
        ("--max-num-partial-prefills", "--max-long-partial-prefills"),
        "the token budget of a step is shared by all prompts; leave it out",
    ),
    Missing(
        ("--kv-offloading-size", "--kv-offloading-backend"),
        "use --swap-space, or --prefix-cache-dir for blocks on disk",
    ),
    Missing(
        (
            "--offload-group-size",
            "--offload-num-in-group",
            "--offload-prefetch-step",
            "--offload-params",
        ),
        "weights are in the memory of the CPU; --weights-on-disk maps them from a file",
    ),
    Missing(
        ("--enable-return-routed-experts", "--return-sampling-mask"),
        "responses have tokens and logprobs, and no internals of a step",
    ),
    Missing(("--profiler-config",), "`cpuserve bench` measures steps; use perf for profiles"),
    Missing(("--attention-config",), "kernels are chosen for the CPU automatically"),
    Missing(
        ("--quantization-config",),
        "--quantization chooses how weights are quantized while they are loaded",
    ),
    Missing(
        ("--spec-method", "--spec-model", "--spec-tokens"),
        "--speculative-config guesses tokens by n-grams",
    ),
    Missing(("--reasoning-config",), "use --reasoning-budget, or set a budget in the request"),
)
