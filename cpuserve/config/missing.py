"""Flags and variables of other servers that cpuserve does not have, and what to do instead.

A flag is refused with this advice, and a variable is ignored with a note at the start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """Options of another server that cpuserve lacks.

    listed: the options, separated by spaces. why: the reason, and an alternative if any.
    """

    listed: str
    why: str

    @property
    def names(self) -> tuple[str, ...]:
        """Each option."""
        return tuple(self.listed.split())


_VLLM = (
    Missing(
        "--lora-dtype --lora-extra-vocab-size --fully-sharded-loras --default-mm-loras",
        "LoRA adapters are kept in the type of the model and change linears of its layers only",
    ),
    Missing(
        "--tool-parser-plugin --tool-server",
        "the format of tool calls is found from the chat template or named by --tool-call-parser, "
        "and clients run the tools",
    ),
    Missing(
        "--enable-reasoning --reasoning-parser-plugin",
        "the tags of thoughts are found in the chat template or named by --reasoning-parser",
    ),
    Missing(
        "--guided-decoding-backend --structured-outputs-config",
        "structured output needs no option, and llguidance is its only backend",
    ),
    Missing(
        "--num-lookahead-slots",
        "--draft-max limits the tokens that are guessed for a sequence",
    ),
    Missing(
        "--ssl-ciphers",
        "OpenSSL chooses the ciphers, of TLS 1.2 and newer; its openssl.cnf can change them",
    ),
    Missing("--root-path --api-prefix", "routes begin at /; let the proxy remove the prefix"),
    Missing(
        "--middleware --logits-processors --logits-processor-pattern --worker-cls",
        "the server does not load user code",
    ),
    Missing(
        "--mm-encoder-only --tokens-only --enable-scale-out",
        "a server reads pictures, tokenizes and generates itself",
    ),
    Missing(
        "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
        "--mm-encoder-fp8-scale-save-margin",
        "towers compute in the type of their weights",
    ),
    Missing(
        "--enable-mm-embeds",
        "a picture is sent as its file, and not as an embedding",
    ),
    Missing(
        "--io-processor-plugin --scheduler-cls --worker-extension-cls --model-class-overrides "
        "--additional-config",
        "the server does not load user code",
    ),
    Missing(
        "--numa-bind --numa-bind-nodes --numa-bind-cpus --device-ids",
        "use --omp-threads-bind with the CPUs of each rank",
    ),
    Missing(
        "--prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp",
        "all threads share the attention of a sequence: --tensor-parallel-size",
    ),
    Missing(
        "--data-parallel-start-rank -dpr --data-parallel-hybrid-lb -dph "
        "--data-parallel-external-lb -dpe "
        "--data-parallel-multi-port-external-lb -dpm -dpn -dpl -dpa -dpp -dpb "
        "--data-parallel-supervisor-port --dp-supervisor-probe-interval-s "
        "--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold "
        "--enable-elastic-ep --enable-fault-tolerance --fault-tolerance-config",
        "one server runs on one machine; put a load balancer in front of several (see deploy/)",
    ),
    Missing(
        "-ep",
        "experts are divided among ranks like all weights: --tensor-parallel-size",
    ),
    Missing(
        "--max-num-scheduled-tokens", "use --max-num-batched-tokens to bound the tokens of a step"
    ),
    Missing("--device-memory-utilization", "use --kv-cache-memory to set the size of the KV cache"),
    Missing("--kv-cache-dtype-skip-layers", "--kv-cache-dtype is the type of all layers"),
    Missing("--ignore-patterns", "only the files that a model needs are downloaded"),
    Missing("--model-weights", "the path of the model has its weights"),
    Missing(
        "--lora-target-modules --enable-tower-connector-lora",
        "LoRA adapters change linears of the layers of a model only",
    ),
    Missing("--custom-histogram-buckets", "histograms have fixed buckets, which dashboards know"),
    Missing("--logging-config", "use --log-level, and --access-log-format for lines in JSON"),
    Missing("--enable-trace-replay", "tokens are sampled, and not replayed"),
    Missing("--watermark-config", "texts have no watermark"),
    Missing("--diffusion-config -dc", "texts are generated token by token"),
    Missing("-ac", "kernels are chosen for the CPU automatically"),
    Missing("-sc", "use --speculative-config, its long name"),
    Missing("-asc", "the server runs in one process group; leave it out"),
    Missing("--engram-config", "memories of n-grams are read as the files of the model say"),
    Missing(
        "--ec-transfer-config --ec-manager-config",
        "encoded pictures stay in this server",
    ),
    Missing(
        "--weight-transfer-config --sleep-preserve-parameter-names",
        "weights cannot change while the server runs",
    ),
    Missing(
        "--aux-output-config", "responses have tokens and logprobs, and no internals of a step"
    ),
    Missing("--trust-request-chat-template", "requests cannot bring a chat template"),
    Missing(
        "--reasoning-effort-map --tool-strict-level",
        "the chat template gets reasoning_effort as it is, and tools are strict if they say so",
    ),
    Missing("--grpc --grpc-port", "the server speaks HTTP"),
    Missing("--pooler-config", "--pooling chooses how embeddings are made, or scores"),
    Missing(
        "--hf-overrides --rope-scaling --rope-theta --hf-config-path",
        "change the model's config.json instead",
    ),
    Missing(
        "--tokenizer-revision --code-revision",
        "--revision selects the version of the whole repository, tokenizer included",
    ),
    Missing("--hf-token", "set the environment variable HF_TOKEN"),
    Missing(
        "--download-dir", "set HF_HOME for models from the hub, CPUSERVE_CACHE for built-in ones"
    ),
    Missing("--num-gpu-blocks-override", "use --kv-cache-memory to set the size of the KV cache"),
    Missing("--response-role", "responses always have the role assistant"),
    Missing("--max-logprobs --logprobs-mode", "a request may ask for 20 logprobs at most"),
    Missing("--return-tokens-as-token-ids", "set return_tokens_as_token_ids in the request"),
    Missing("--enable-prompt-embeds --skip-tokenizer-init", "prompts are text or token ids"),
    Missing("--enable-sleep-mode", "stop the server instead; it is ready again in seconds"),
    Missing(
        "--enable-expert-parallel --enable-eplb",
        "experts are divided among ranks like all weights: --tensor-parallel-size",
    ),
    Missing(
        "--data-parallel-rank --data-parallel-size-local --data-parallel-address "
        "--data-parallel-rpc-port --data-parallel-backend --headless --nnodes --node-rank "
        "--master-addr",
        "one server runs on one machine; put a load balancer in front of several (see deploy/)",
    ),
    Missing(
        "--kv-transfer-config",
        "the KV cache stays in this server; --prefix-cache-dir keeps it across restarts",
    ),
    Missing(
        "--collect-detailed-traces",
        "traces always have spans of render, queue, prefill and decode; leave it out",
    ),
    Missing(
        "--disable-access-log-for-endpoints",
        "health checks and metrics have lines only with --access-log all",
    ),
    Missing(
        "--enable-log-requests --log-config-file",
        "use --access-log all to log one line per request, without its text",
    ),
    Missing(
        "--output-tmp-dir",
        "`cpuserve run-batch` appends each result to the output file at once; leave it out",
    ),
    Missing(
        "--enable-metrics",
        "`cpuserve run-batch` has no port; run the file with /v1/batches of a server for metrics",
    ),
    Missing("--default-chat-template-kwargs", "set chat_template_kwargs in the request"),
    Missing("--stream-interval", "set stream_interval in the request"),
    Missing("--enable-force-include-usage", "set stream_options in the request"),
    Missing(
        "--max-num-partial-prefills --max-long-partial-prefills",
        "the token budget of a step is shared by all prompts; leave it out",
    ),
    Missing(
        "--kv-offloading-size --kv-offloading-backend",
        "use --swap-space, or --prefix-cache-dir for blocks on disk",
    ),
    Missing(
        "--offload-group-size --offload-num-in-group --offload-prefetch-step --offload-params",
        "weights are in the memory of the CPU; --weights-on-disk maps them from a file",
    ),
    Missing(
        "--enable-return-routed-experts --return-sampling-mask",
        "responses have tokens and logprobs, and no internals of a step",
    ),
    Missing("--profiler-config", "`cpuserve bench` measures steps; use perf for profiles"),
    Missing("--attention-config", "kernels are chosen for the CPU automatically"),
    Missing(
        "--quantization-config",
        "--quantization chooses how weights are quantized while they are loaded",
    ),
    Missing(
        "--spec-method --spec-model --spec-tokens", "use --speculative-config with these settings"
    ),
    Missing("--reasoning-config", "use --reasoning-budget, or set a budget in the request"),
)

_REQUEST = "set it in the request"
_SAMPLING = f"{_REQUEST}, or its default with --override-generation-config '{{\"%s\": N}}'"


def _sampling(setting: str, names: str) -> Missing:
    return Missing(names, _SAMPLING % setting)


_LLAMA_CPP = (
    # threads and memory
    Missing(
        "--threads --threads-batch -t -tb",
        "use --omp-threads-bind, or OMP_NUM_THREADS with --omp-threads-bind nobind",
    ),
    Missing(
        "--cpu-mask -C --cpu-range -Cr --cpu-strict --cpu-mask-batch -Cb "
        "--cpu-range-batch -Crb --cpu-strict-batch",
        "use --omp-threads-bind with a list of CPUs, such as 0-15",
    ),
    Missing("--prio --prio-batch", "start the server with `nice`, or with CPUWeight of systemd"),
    Missing(
        "--poll --poll-batch",
        "threads wait actively for a bounded time and then sleep; leave it out",
    ),
    Missing("--threads-http", "the front end is one process, on the cores of --num-reserved-cpu"),
    Missing(
        "--n-gpu-layers --gpu-layers -ngl --main-gpu -mg --tensor-split -ts --split-mode "
        "-sm --override-tensor -ot -dev --fit-target -fitt --gpu-layers-draft -ngld -devd",
        "this server runs on CPUs; leave it out",
    ),
    Missing("--batch-size", "use --max-num-batched-tokens (-b) to bound the tokens of a step"),
    Missing("--ubatch-size -ub", "use --max-num-batched-tokens (-b) to bound the tokens of a step"),
    Missing(
        "--cache-type-k -ctk --cache-type-v -ctv",
        "use --kv-cache-dtype, one option for keys and values: int8 for q8_0 (the nearest to q5_0 "
        "and q5_1, too), int8_v4 for q8_0 keys with q4_0 values (the nearest to q4_1, iq4_nl and "
        "q4_0 keys, too), and bfloat16, float16 or float32 for bf16, f16 or f32",
    ),
    Missing("--cache-ram -cram", "use --swap-space, in GiB, for prefixes that leave the KV cache"),
    Missing(
        "--ctx-checkpoints -ctxcp --swa-checkpoints --checkpoint-min-step -cms",
        "recurrent layers keep their states without an option; leave it out",
    ),
    Missing("--swa-full", "sliding windows always free their blocks; leave it out"),
    Missing("--mlock", "switch off swapping instead (`swapoff -a`, or MemorySwapMax=0 of systemd)"),
    Missing(
        "--load-mode -lm --lazy-mode -lzm --direct-io -dio",
        "--weights-on-disk decides if weights are mapped from a file",
    ),
    Missing("--no-repack -nr", "the kernels read packed weights only; leave it out"),
    Missing("--flash-attn -fa", "attention needs no option; leave it out"),
    # contexts and prefixes
    Missing(
        "--predict --n-predict -n",
        "set max_tokens in the request, or its default with --override-generation-config "
        "'{\"max_new_tokens\": N}'",
    ),
    Missing(
        "--context-shift --keep",
        "no token leaves a context: a response ends at --max-model-len, and a longer prompt is "
        "refused",
    ),
    Missing("--no-cache-prompt", "use --no-enable-prefix-caching"),
    Missing(
        "--cache-reuse",
        "only equal prefixes are reused, so that a hit changes no bit; leave it out",
    ),
    Missing("--slot-save-path", "use --prefix-cache-dir, which keeps the prefixes of all requests"),
    Missing(
        "--slot-prompt-similarity -sps",
        "each request finds its longest cached prefix; leave it out",
    ),
    Missing("--no-cont-batching -nocb", "use --max-num-seqs 1 for one request at a time"),
    Missing(
        "--rope-scale --rope-freq-base --rope-freq-scale --override-kv --yarn-orig-ctx "
        "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
        "change the metadata of the GGUF file with `gguf-set-metadata` (of the package gguf)",
    ),
    # models and adapters
    Missing("--hf-file -hff", "name the file after the model: OWNER/MODEL:FILE.gguf"),
    Missing("-hft", "set the environment variable HF_TOKEN"),
    Missing(
        "--model-url -mu --docker-repo -dr",
        "download the file and serve its path, or serve OWNER/MODEL:Q4_K_M of the Hugging Face hub",
    ),
    Missing("--offline", "set HF_HUB_OFFLINE=1, or serve a path: the server then loads nothing"),
    Missing("--alias -a", "use --served-model-name A B, with spaces instead of commas"),
    Missing("--tags", "lists of models have no tags; leave it out"),
    Missing(
        "--lora --lora-scaled --lora-init-without-apply",
        "use --lora-modules NAME=PATH, and NAME as the model of a request",
    ),
    Missing(
        "--control-vector --control-vector-scaled --control-vector-layer-range",
        "control vectors are not supported",
    ),
    Missing(
        "--models-preset --models-max --models-autoload --no-models-autoload",
        "use --models FILE; models are loaded for requests, and unloaded after --keep-alive or "
        "if memory is short",
    ),
    Missing(
        "--spec-type --draft-min --draft-n-min --spec-draft-n-min --lookup-cache-static "
        "-lcs --lookup-cache-dynamic -lcd --draft-p-min --draft-p-split --spec-draft-p-min "
        "--ctx-size-draft -cd",
        "drafts have as many tokens as are expected to pay, at most --draft-max",
    ),
    # chats
    Missing("--chat-template-kwargs", "set chat_template_kwargs in the request"),
    Missing(
        "--reasoning -rea --reasoning-effort",
        "set reasoning_effort or chat_template_kwargs in the request",
    ),
    Missing(
        "--reasoning-format",
        "thoughts are apart from the text, and --reasoning-parser none leaves them in it",
    ),
    Missing("--no-jinja", "chat templates are always rendered with Jinja; leave it out"),
    Missing(
        "--tools --tools-runtime --agent -ag --mcp-servers-config --mcp-servers-json "
        "--ui-mcp-proxy --webui-mcp-proxy",
        "clients run the tools",
    ),
    Missing("--spm-infill", "the model decides the order of fill-in tokens; leave it out"),
    # sampling
    _sampling("temperature", "--temp --temperature"),
    _sampling("top_k", "--top-k"),
    _sampling("top_p", "--top-p"),
    _sampling("min_p", "--min-p"),
    _sampling("repetition_penalty", "--repeat-penalty"),
    Missing(
        "--presence-penalty --frequency-penalty --repeat-last-n --ignore-eos --samplers "
        "--sampler-seq --sampling-seq --logit-bias -l --typical --typical-p --top-nsigma "
        "--top-n-sigma --xtc-probability --xtc-threshold --dynatemp-range --dynatemp-exp "
        "--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n "
        "--dry-sequence-breaker --mirostat --mirostat-lr --mirostat-ent --embd-normalize",
        f"{_REQUEST}: it has no default for all requests",
    ),
    Missing(
        "--grammar --grammar-file --json-schema -j --json-schema-file -jf",
        "set grammar, json_schema or response_format in the request",
    ),
    Missing("--reverse-prompt -r", "set stop in the request"),
    Missing("--special -sp", "set skip_special_tokens to false in the request"),
    Missing("-s", "use --seed"),
    # the server
    Missing("--timeout -to", "use --request-timeout to bound a request"),
    Missing("--reuse-port", "use --data-parallel-size for several engines at one port"),
    Missing("--path", "let a proxy serve static files (see deploy/nginx.conf)"),
    Missing("--no-ui", "use --no-webui"),
    Missing(
        "--ui-config --ui-config-file --webui-config", "the chat page keeps settings in the browser"
    ),
    Missing("--props", "settings cannot change while the server runs"),
    Missing(
        "--cors-origins --cors-methods --cors-headers --cors-credentials",
        "use --allowed-origins, --allowed-methods, --allowed-headers and --allow-credentials",
    ),
    Missing("--log-disable", "use --log-level error"),
    Missing("--log-file", "redirect the log, which is on stderr: 2> FILE"),
    Missing("--verbose -v --verbosity -lv --log-verbose --log-verbosity", "use --log-level debug"),
    Missing(
        "--log-colors --log-prefix --log-timestamps --log-jsonl",
        "lines of the log have one format; leave it out",
    ),
    Missing(
        "--list-devices",
        "run `cpuserve doctor`, which shows the CPU, its memory and its NUMA nodes",
    ),
    Missing("--rpc", "one server runs on one machine; put a load balancer before several"),
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
    "LLAMA_ARG_SLOT_SAVE_PATH": "--slot-save-path",
}

_OLLAMA = (
    Missing("--keepalive", "use --keep-alive"),
    Missing("--insecure", "models are downloaded over HTTPS only"),
    Missing("--nowordwrap", "the terminal wraps long lines; leave it out"),
    Missing("--think --hidethinking", "set think or reasoning_effort in the request"),
)

# Variables of the Ollama server. They are not read,
# because a machine may have them for Ollama itself. OLLAMA_KEEP_ALIVE is an alias of --keep-alive.
_UNREAD_OLLAMA = (
    Missing("OLLAMA_HOST", "use --host and --port"),
    Missing("OLLAMA_MODELS", "use --models-dir, for models that clients create and pull"),
    Missing("OLLAMA_CONTEXT_LENGTH", "use --max-model-len"),
    Missing(
        "OLLAMA_NUM_PARALLEL", "use --max-num-seqs; requests share one KV cache and its memory"
    ),
    Missing("OLLAMA_MAX_QUEUE", "use --max-num-queued-reqs; a full queue returns 429"),
    Missing(
        "OLLAMA_MAX_LOADED_MODELS",
        "models stay in memory until --keep-alive has passed or another model needs it",
    ),
    Missing("OLLAMA_ORIGINS", "use --allowed-origins"),
    Missing("OLLAMA_KV_CACHE_TYPE", "use --kv-cache-dtype (int8 instead of q8_0)"),
    Missing("OLLAMA_FLASH_ATTENTION", "attention needs no option"),
    Missing("OLLAMA_DEBUG", "use --log-level debug"),
    Missing("OLLAMA_LOAD_TIMEOUT", "a load has no limit; /health returns 503 until it ends"),
    Missing("OLLAMA_LLM_LIBRARY", "use --isa for a lower instruction-set level"),
    Missing("OLLAMA_MULTIUSER_CACHE", "all requests share the cached prefixes"),
    Missing("OLLAMA_NOPRUNE", "--models-bytes bounds the files, and nothing is pruned"),
    Missing("OLLAMA_NOHISTORY", "`cpuserve chat` writes no history"),
    Missing("OLLAMA_TMPDIR", "set TMPDIR"),
    Missing(
        "OLLAMA_SCHED_SPREAD OLLAMA_GPU_OVERHEAD OLLAMA_VULKAN OLLAMA_INTEL_GPU OLLAMA_MAX_VRAM",
        "this server runs on CPUs",
    ),
    Missing(
        "OLLAMA_NEW_ENGINE OLLAMA_NEW_ESTIMATES",
        "there is one engine, and `cpuserve config MODEL` shows its memory",
    ),
    Missing("OLLAMA_REMOTES OLLAMA_NO_CLOUD", "the server sends no request to other servers"),
)

VLLM_MISSING = _VLLM
MISSING = (*_VLLM, *_LLAMA_CPP, *_OLLAMA)
_WHY = {name.lstrip("-"): missing.why for missing in MISSING for name in missing.names}
_OF_VARIABLES = (Missing(name, _WHY[flag.lstrip("-")]) for name, flag in _FLAGS.items())
UNREAD = (*_OF_VARIABLES, *_UNREAD_OLLAMA)
_WHY_UNREAD = {name: missing.why for missing in UNREAD for name in missing.names}


def why_missing(name: str) -> str | None:
    """Return why an option of another server is refused; None if `name` is not such an option.

    name: a flag, or a key of a config file.
    """
    key = name.lstrip("-").replace("_", "-")
    return _WHY.get(key) or _WHY.get(key.removeprefix("no-"))


def why_unread(variable: str) -> str | None:
    """Return what to set instead of a variable of another server; None for other variables."""
    return _WHY_UNREAD.get(variable)
