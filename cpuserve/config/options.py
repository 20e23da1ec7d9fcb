"""The options of the engine: a record with the type, texts and flags of each option.

The evaluation of annotations is not postponed in this module:
70 postponed annotations would add 6 ms to each command.
"""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from cpuserve.config.checks import (
    amount,
    bytes_as_space,
    length,
    model_names,
    named_paths,
    named_places,
    openvino_type,
    read_modules,
    weight_place,
    zero_as_own,
)
from cpuserve.config.field import GROUPS, Alias, a_path, at_least, fields_of, not_empty, option
from cpuserve.config.generation import check_settings
from cpuserve.config.kv_events import read_kv_events
from cpuserve.config.speculation import MOST_TOKENS, read_speculation
from cpuserve.config.values import parse_bind, parse_nodes, parse_space

_model, _server, _memory, _cpu = (partial(option, group) for group in GROUPS)

DTYPES = {
    "auto": "auto",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
}


class EngineOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The values that flags, environment and config file request; None = cpuserve chooses."""

    # -- model ------------------------------------------------------------------------------------
    model: Annotated[
        str | None,
        _model(
            "Model: a directory, GGUF file, Hugging Face id (of GGUF files: OWNER/MODEL:Q4_K_M) "
            "or built-in name (see `cpuserve models`).",
            default="the built-in model",
            aliases="--model-path -m LLAMA_ARG_MODEL --hf-repo -hfr -hf LLAMA_ARG_HF_REPO",
            check=not_empty,
            metavar="MODEL",
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _model(
            "Model names that the API accepts. `*` accepts any name, as clients of other servers "
            "send it; the response then has the name of the request.",
            default="the model as given",
            check=model_names,
            metavar="NAME",
        ),
    ] = None
    revision: Annotated[
        str | None,
        _model(
            "Branch, tag or commit of a Hugging Face model.",
            default="main",
            check=not_empty,
            metavar="REV",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        _model(
            "Directory or GGUF file that contains the tokenizer.",
            default="the model's own",
            check=not_empty,
            metavar="PATH",
        ),
    ] = None
    mmproj: Annotated[
        str | None,
        _model(
            "GGUF file with the part for pictures of a model in a GGUF file (mmproj); `none` reads "
            "no pictures.",
            default="the mmproj file next to the model, or in its repository",
            aliases="-mm LLAMA_ARG_MMPROJ",
            check=a_path,
            metavar="FILE",
        ),
    ] = None
    language_model_only: Annotated[
        bool | None,
        _model(
            "Load only the part for text, so that pictures are not read.",
            default="off",
            aliases=(
                Alias("--no-mmproj", bare=True),
                Alias("--no-mmproj-auto", bare=True),
                Alias("LLAMA_ARG_NO_MMPROJ"),
            ),
        ),
    ] = None
    image_max_tokens: Annotated[
        int | None,
        _model(
            "Most tokens of a picture, which is scaled down to have at most as many; fewer need "
            "less memory for the step that encodes a picture of any size. 0 = as the model says.",
            default="0",
            aliases="LLAMA_ARG_IMAGE_MAX_TOKENS",
            check=at_least(0, 1 << 20),
            metavar="TOKENS",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _model(
            "Type of weights and activations that are not quantized: auto, bfloat16, float16, "
            "float32.",
            default=(
                "auto: the type of the checkpoint; bfloat16 for an encoder in float32 if the CPU "
                "multiplies bfloat16"
            ),
            choices=("auto", "bfloat16", "float16", "float32"),
            synonyms=DTYPES,
            metavar="DTYPE",
        ),
    ] = None
    activation_bits: Annotated[
        str | None,
        _model(
            "Bits of activations that are multiplied by quantized weights: auto, 8 (int8), 16 "
            "(two int8 terms).",
            default="auto: 16 below 300 million weights, otherwise 8",
            choices=("auto", "8", "16"),
            metavar="BITS",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        _model(
            "Quantize weights while loading: int8, w8a8, int4, or int4_mixed (int4, but value and"
            " down projections int8; models below 300 million weights keep more in int8). With "
            "another name, the start fails unless the checkpoint has that format.",
            default="the checkpoint's",
            flags=("--quantization", "-q"),
            check=not_empty,
            metavar="FORMAT",
        ),
    ] = None
    mm_encoder_quantization: Annotated[
        str | None,
        _model(
            "Quantization of the part that encodes pictures (the tower), whatever --quantization "
            "says: auto, none, int8.",
            default="auto: none, because int8 loses detail of pictures",
            choices=("auto", "none", "int8"),
            metavar="SCHEME",
        ),
    ] = None
    weight_cache_size: Annotated[
        str | None,
        _model(
            "Maximum size of the files of quantized or mapped weights in the cache directory: GiB"
            " (4, 0.5) or 512MiB; 0: none. A start that finds one reads it instead of quantizing.",
            default="32",
            check=amount,
            metavar="SIZE",
        ),
    ] = None
    model_impl: Annotated[
        str | None,
        _model(
            "Model implementation: auto, cpuserve (own kernels), transformers (any architecture, "
            "slow).",
            default="auto: cpuserve for supported architectures, otherwise transformers",
            choices=("auto", "cpuserve", "transformers"),
            synonyms={"vllm": "auto"},
            metavar="IMPL",
        ),
    ] = None
    pooling: Annotated[
        str | None,
        _model(
            "Serve embeddings instead of text: the vector of the last or the first token (cls), "
            "or the mean of all; splade: sparse vectors; rank: scores of a reranker; classify: "
            "labels; none: text.",
            default="auto: as the checkpoint says, if it has embeddings or a head; otherwise none",
            choices=("auto", "none", "last", "mean", "first", "splade", "rank", "classify"),
            synonyms={"cls": "first"},
            metavar="KIND",
        ),
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        _model(
            "LoRA adapters as NAME=PATH, or as JSON objects (vLLM); PATH is a PEFT directory or a "
            "GGUF file. A request uses an adapter if its model is NAME.",
            default="none",
            read=read_modules,
            check=named_paths,
            metavar="NAME=PATH",
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool | None,
        _model(
            "Let clients load adapters from this machine's disk, and unload them, while the "
            "server runs: POST /v1/load_lora_adapter and /v1/unload_lora_adapter.",
            default="off",
            aliases="VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        ),
    ] = None
    max_loras: Annotated[
        int | None,
        _model(
            "How many adapters can be loaded at a time, with --allow-runtime-lora-updating; there"
            " is memory for one more, which replaces another.",
            default="the number of --lora-modules plus 4",
            check=at_least(1, 1024),
            metavar="COUNT",
        ),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        _model(
            "The largest rank of adapters, with --allow-runtime-lora-updating.",
            default="16, or the largest of --lora-modules",
            check=at_least(1, 512),
            metavar="RANK",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _model(
            "Chat template to use instead of the model's: a Jinja file, or the template itself.",
            default="the model's own",
            aliases="--chat-template-file LLAMA_ARG_CHAT_TEMPLATE LLAMA_ARG_CHAT_TEMPLATE_FILE",
            check=not_empty,
            metavar="FILE",
        ),
    ] = None
    control_tokens_in_messages: Annotated[
        bool | None,
        _model(
            "Let the text of a control token in a message, a tool or a result, such as "
            "`<|im_end|>`, become this token, as vLLM does. Whoever writes such a text can then "
            "write turns of any role. Otherwise it is text like any other.",
            default="false",
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        _model(
            "How the model writes tool calls. `auto` finds it from the chat template and the "
            "tokenizer, and `none` refuses requests with tools. The values are vLLM's.",
            choices=("auto", "none"),
            more_choices="cpuserve.serving.tools.families:names",
            metavar="NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        _model(
            "The tags between which the model thinks. `auto` finds them in the chat template, and "
            "`none` reads thoughts as text. The values are vLLM's.",
            choices=("auto", "none"),
            more_choices="cpuserve.serving.tools.thoughts:names",
            metavar="NAME",
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        _model(
            "Maximum tokens of one request, prompt and response together (8k = 8000, 8K = 8192).",
            default=(
                "the model's maximum (with LongRoPE or dynamic NTK, its original context), or what "
                "the KV cache holds"
            ),
            aliases=(
                Alias("--ctx-size", zero_as_own),
                Alias("-c", zero_as_own),
                Alias("LLAMA_ARG_CTX_SIZE", zero_as_own),
            ),
            check=length,
            metavar="TOKENS",
        ),
    ] = None
    allow_long_model_len: Annotated[
        bool | None,
        _model(
            "Allow --max-model-len to exceed the length that the model was trained for.",
            default="off",
            flags=("--allow-long-max-model-len",),
            aliases="VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        ),
    ] = None
    disable_sliding_window: Annotated[
        bool | None,
        _model(
            "Limit the context length to the model's sliding window, so that the window never "
            "slides.",
            default="off",
        ),
    ] = None
    seed: Annotated[
        int | None,
        _model(
            "Sampling seed of requests that do not set one.",
            default="0",
            check=at_least(0),
            metavar="N",
        ),
    ] = None
    generation_config: Annotated[
        str | None,
        _model(
            "Source of the default sampling parameters: auto, cpuserve (defaults of OpenAI), or a "
            "directory.",
            default="auto: the model's generation_config.json; built-in models have their own",
            synonyms={"auto": "auto", "cpuserve": "cpuserve", "vllm": "cpuserve"},
            check=not_empty,
            metavar="PATH",
        ),
    ] = None
    override_generation_config: Annotated[
        dict[str, Any] | None,
        _model(
            "Default sampling parameters as a JSON object; they override the model's, and null "
            "removes one.",
            default="none",
            check=check_settings,
            metavar="JSON",
        ),
    ] = None
    # -- server -----------------------------------------------------------------------------------
    disable_log_stats: Annotated[
        bool | None,
        _server(
            "Accepted for compatibility: throughput is on /metrics, not in the log.",
            default="no effect",
        ),
    ] = None
    # -- memory and batching ----------------------------------------------------------------------
    weights_on_disk: Annotated[
        str | None,
        _memory(
            "Map the weights from a file and keep as much of them in memory as fits: auto, "
            "always, never; or the memory for the weights of a mixture, such as 16 (GiB): the "
            "experts used most stay in it, and the others are read from the disk.",
            default="auto: a mixture of experts that does not fit in memory",
            check=weight_place,
            metavar="WHEN|SIZE",
        ),
    ] = None
    kv_cache_space: Annotated[
        str | None,
        _memory(
            "Size of the KV cache: GiB (4, 0.5), 512MiB, a share of memory (30%), or 0 = "
            "automatic.",
            default=(
                "a quarter of free memory, or the size that max-num-seqs requests of full length "
                "can use if that is less"
            ),
            flags=("--kv-cache-memory", "--kv-cache-space"),
            env="CPUSERVE_KVCACHE_SPACE",
            aliases=(
                Alias("--kv-cache-memory-bytes", bytes_as_space),
                Alias("VLLM_CPU_KVCACHE_SPACE", differs="for all ranks of an engine together"),
                Alias("VLLM_OPENVINO_KVCACHE_SPACE"),
            ),
            check=parse_space,
            metavar="SIZE",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _memory(
            "Type of the KV cache: auto, bfloat16, float16, float32, int8, fp8_e4m3 (fp8), "
            "fp8_e5m2 (as int8), int8_v4 (int8 keys and 4-bit values).",
            default="auto: the same as --dtype",
            aliases=(Alias("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", openvino_type),),
            choices=(
                *("auto", "bfloat16", "float16", "float32"),
                *("int8", "fp8_e4m3", "fp8_e5m2", "int8_v4"),
            ),
            synonyms={**DTYPES, "fp8": "fp8_e4m3"},
            metavar="DTYPE",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        _memory(
            "Tokens per KV block; the kernels always use 32, another size is reported and ignored.",
            default="32",
            check=at_least(1),
            metavar="TOKENS",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        _memory(
            "Maximum requests that run at the same time; further ones wait in the queue.",
            default="64",
            aliases="--parallel -np LLAMA_ARG_N_PARALLEL",
            check=at_least(1, 4096),
            metavar="N",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _memory(
            "Maximum tokens per step, decode rows and prompt chunks together; activation memory "
            "grows with it.",
            default="2048",
            aliases="-b LLAMA_ARG_BATCH",
            check=at_least(1, 1 << 20),
            metavar="TOKENS",
        ),
    ] = None
    itl_target_ms: Annotated[
        int | None,
        _memory(
            "Target time between two tokens of a running stream; prompt chunks are sized to meet "
            "it. A step may always take 1.67 times, and never more than 2.5 times, a step without"
            " prompts. 0 = no target.",
            default="50 (0 in `LLM`, which does not stream)",
            check=at_least(0, 60_000),
            metavar="MS",
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        int | None,
        _memory(
            "Maximum tokens of one prompt per step; 0 = no limit. Short prompts overtake long "
            "ones even without a limit.",
            default="0",
            check=at_least(0, 1 << 20),
            metavar="TOKENS",
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        _memory(
            "Order of requests: fcfs (first come, first served) or priority (lower `priority` "
            "first).",
            default="fcfs",
            choices=("fcfs", "priority"),
            metavar="POLICY",
        ),
    ] = None
    speculate: Annotated[
        str | None,
        _memory(
            "Guess tokens and verify them in one step, where this is expected to pay: auto (tokens "
            "after an earlier occurrence of the last tokens, and tokens that a grammar determines) "
            "or off. It changes no token.",
            default="auto",
            choices=("auto", "off"),
            metavar="WHEN",
        ),
    ] = None
    speculative_config: Annotated[
        dict[str, Any] | None,
        _memory(
            "How --speculate guesses tokens: a JSON object with method (ngram: guess "
            "the tokens after an earlier occurrence of the last tokens; draft_model: a second "
            "model guesses as well; mtp: a head of the model for multi-token prediction guesses as "
            "well, or the assistant of a Gemma 4 that `model` names; "
            "eagle3: an EAGLE-3 head guesses as well), model (the draft model, assistant or head), "
            "num_speculative_tokens (5), prompt_lookup_max (4) and prompt_lookup_min (2).",
            default="as --speculate auto decides",
            check=read_speculation,
            metavar="JSON",
        ),
    ] = None
    model_draft: Annotated[
        str | None,
        _memory(
            "Draft model: a small model with the same vocabulary, which guesses tokens where that "
            "is expected to pay. Its name is like a --model.",
            default="none",
            aliases=(
                "-md --spec-draft-model --speculative-model LLAMA_ARG_MODEL_DRAFT "
                "LLAMA_ARG_SPEC_DRAFT_MODEL"
            ),
            check=not_empty,
            metavar="MODEL",
        ),
    ] = None
    draft_max: Annotated[
        int | None,
        _memory(
            "Most tokens that are guessed for a sequence in a step.",
            default="7, or 5 with a draft model",
            aliases=(
                "--draft --draft-n --spec-draft-n-max --num-speculative-tokens LLAMA_ARG_DRAFT_MAX "
                "LLAMA_ARG_SPEC_DRAFT_N_MAX"
            ),
            check=at_least(1, MOST_TOKENS),
            metavar="N",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        _memory(
            "Reuse the KV cache of equal prompt prefixes; disable with --no-enable-prefix-caching.",
            default="on",
        ),
    ] = None
    prefix_cache_dir: Annotated[
        str | None,
        _memory(
            "Keep cached prefixes on disk across restarts, in DIR/cpuserve-prefix-cache.",
            default="none",
            check=a_path,
            metavar="DIR",
        ),
    ] = None
    prefix_cache_size: Annotated[
        str | None,
        _memory(
            "Maximum size of the files in --prefix-cache-dir: GiB (4, 0.5) or 512MiB; the least "
            "recently used blocks are deleted first.",
            default="4",
            check=amount,
            metavar="SIZE",
        ),
    ] = None
    swap_space: Annotated[
        str | None,
        _memory(
            "Additional memory for blocks that are evicted from the KV cache: GiB (4, 0.5) or "
            "512MiB.",
            default="0",
            check=amount,
            metavar="SIZE",
        ),
    ] = None
    shared_prefix_space: Annotated[
        str | None,
        _memory(
            "Memory in /dev/shm for cached prefixes that several engines (--data-parallel-size) "
            "read from each other: GiB (4, 0.5) or 512MiB; 0 = none.",
            default="as much as the KV cache of each engine, at most half of the rest; 0 with "
            "--prefix-cache-dir, which the engines share",
            check=amount,
            metavar="SIZE",
        ),
    ] = None
    kv_tiers: Annotated[
        list[str] | None,
        _memory(
            "More offload tiers for blocks of the KV cache, as NAME=PLACE (docs/serving.md).",
            default="none",
            check=named_places,
            metavar="NAME=PLACE",
        ),
    ] = None
    kv_events_config: Annotated[
        dict[str, Any] | None,
        _memory(
            "Publish changes of the prefix cache for routers such as llm-d: a JSON object with the "
            "keys of vLLM (enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, "
            "hwm, max_queue_size). It needs pyzmq, and subscribers see the tokens of prompts.",
            default="off",
            check=read_kv_events,
            metavar="JSON",
        ),
    ] = None
    # -- CPU and threads --------------------------------------------------------------------------
    isa: Annotated[
        str | None,
        _cpu(
            "Instruction-set level of the kernels, one that this CPU supports (see `cpuserve "
            "doctor`).",
            default="the highest that this CPU supports",
            synonyms={"native": "auto"},
            check=not_empty,
            metavar="LEVEL",
        ),
    ] = None
    omp_threads_bind: Annotated[
        str | None,
        _cpu(
            "CPUs of the compute threads: auto, nobind, or a list such as 0-31, 0,2 or 0-62:2; "
            "`|` separates the lists of ranks.",
            default=(
                "auto: one thread per physical core in the affinity mask; under a CPU quota for "
                "fewer CPUs, as many threads as the quota covers, without pinning"
            ),
            flags=("--omp-threads-bind", "--cpu-omp-threads-bind"),
            aliases="VLLM_CPU_OMP_THREADS_BIND",
            check=parse_bind,
            metavar="CPUS",
        ),
    ] = None
    num_reserved_cpu: Annotated[
        int | None,
        _cpu(
            "Total number of cores that automatic binding leaves to the front end: the last cores "
            "of each node.",
            default=(
                "0 with up to 4 allowed cores or a CPU quota for fewer CPUs, otherwise one per "
                "NUMA node in use"
            ),
            flags=("--num-reserved-cpu", "--num-of-reserved-cpu"),
            env="CPUSERVE_NUM_OF_RESERVED_CPU",
            aliases=(Alias("VLLM_CPU_NUM_OF_RESERVED_CPU", differs="for all ranks together"),),
            check=at_least(0),
            metavar="N",
        ),
    ] = None
    visible_memory_nodes: Annotated[
        str | None,
        _cpu(
            "NUMA nodes that automatic binding may use, such as 0 or 1,0, in the order of the "
            "ranks.",
            default="all nodes with allowed CPUs",
            aliases="CPU_VISIBLE_MEMORY_NODES",
            check=parse_nodes,
            metavar="NODES",
        ),
    ] = None
    omp_num_threads: Annotated[
        int | None,
        _cpu(
            "Number of threads with nobind; otherwise the list of CPUs determines it.",
            default="one per physical core that the affinity mask and the CPU quota allow",
            flags=(),
            env="OMP_NUM_THREADS",
            check=at_least(1, 4096),
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int | Literal["auto"] | None,
        _cpu(
            "Number of ranks that the model is split over, or auto. A rank is a group of threads,"
            " usually on one NUMA node.",
            default="1, or on several sockets as --numa chooses",
            words=("auto",),
            flags=("--tensor-parallel-size", "-tp"),
            check=at_least(1, 1024),
            metavar="N",
        ),
    ] = None
    data_parallel_size: Annotated[
        int | None,
        _cpu(
            "Number of engine processes at one endpoint, each with its own cores, weights and"
            " KV cache.",
            default="1, or on several sockets as --numa chooses",
            flags=("--data-parallel-size", "-dp"),
            check=at_least(1, 1024),
            metavar="N",
        ),
    ] = None
    numa: Annotated[
        str | None,
        _cpu(
            "How to use several NUMA nodes: auto (ranks or engines on sockets), tp (a rank on "
            "each), replicas (an engine on each), interleave (pages), off (one group of threads).",
            default="auto; off under a CPU quota for fewer CPUs, and with --omp-threads-bind",
            choices=("auto", "tp", "replicas", "interleave", "off"),
            metavar="MODE",
        ),
    ] = None
    executor: Annotated[
        str | None,
        _cpu(
            "Executor of the steps: auto, native (C++ kernels), torch (slow).",
            default="auto: native, or torch if the C++ extension cannot run here",
            choices=("auto", "native", "torch"),
            metavar="KIND",
        ),
    ] = None
    platform: Annotated[
        str | None,
        _cpu(
            "Name of the platform; plug-ins register platforms under the entry point "
            "cpuserve.platforms.",
            default="cpu, unless a plug-in provides a platform that can run here",
            check=not_empty,
            metavar="NAME",
        ),
    ] = None
    enforce_eager: Annotated[
        bool | None,
        _cpu(
            "Accepted for compatibility: cpuserve compiles no graphs.",
            default="no effect",
        ),
    ] = None

    @property
    def wanted_mmproj(self) -> str | None:
        """The mmproj file to read, "none", or None = the one that is found."""
        return "none" if self.language_model_only else self.mmproj


FIELDS = fields_of(EngineOptions)
