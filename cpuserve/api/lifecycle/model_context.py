"""Make a ModelContext from the settings of the engines that serve a model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.status.cpu_view import CpuView
from cpuserve.base.log import get_logger
from cpuserve.config.checks import ANY_NAME
from cpuserve.engine.fingerprint import fingerprint, tokenizer_fingerprint
from cpuserve.metrics.server import ServerMetrics
from cpuserve.models.families import FAMILIES
from cpuserve.serving.generation.fan_out import MAX_SEQUENCES_PER_REQUEST
from cpuserve.serving.media.reader import MediaRules
from cpuserve.serving.models.context import ModelContext
from cpuserve.serving.models.details import ModelDetails
from cpuserve.serving.models.kept_responses import KeptResponses
from cpuserve.serving.models.limits import LEAST_HELD_BYTES, ClientLimits, default_body_bytes
from cpuserve.serving.models.tasks import default_task, tasks_of
from cpuserve.serving.threads import TOKENIZING
from cpuserve.serving.tools.learn import NO_TEMPLATE, learn_format, parsers_of
from cpuserve.serving.tools.thoughts import ThoughtUse
from cpuserve.tokenizer.load import load_tokenizer
from cpuserve.tokenizer.rendering.client import limited_learning_time
from cpuserve.tokenizer.unlocked import yield_to_streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.config.engine import EngineConfig
    from cpuserve.config.server import ServerOptions
    from cpuserve.engine.client import EngineClient
    from cpuserve.platforms import Platform
    from cpuserve.serving.tools.learn import LearnedFormat
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer

log = get_logger("serve")
# The default limit on the body of a request, if it may have media in base64.
MEDIA_BODY_BYTES = 64 << 20
# The tokens of responses may take this part of the bytes that the prefix cache may take.
_SHARE_OF_RESPONSES = 16

# Settings that can change a response, besides SETTINGS in engine/fingerprint.py.
_SETTINGS = (
    "model",
    "max_model_len",
    "seed",
    "default_sampling",
    "control_tokens_in_messages",
    "tool_call_parser",
    "reasoning_parser",
    "pooling",
    "adapters",
)


def make_context(
    client: EngineClient,
    configs: Sequence[EngineConfig],
    options: ServerOptions,
    platform: Platform,
    kv_bytes: int,
    details: ModelDetails | None = None,
) -> tuple[ModelContext, CpuView]:
    """Return the context of the model that `client` serves, and the view of its CPUs.

    configs: one EngineConfig for each engine of `client`.
    kv_bytes: the size of the KV caches of all engines in bytes.
    details: facts about the model's files; None = the API shows none.
    """
    config, tasks = configs[0], tasks_of(configs[0])
    cpu = CpuView(platform, configs)
    most_body = options.max_body_size or _body_bytes(config, details)
    metrics = ServerMetrics(
        model_name=config.served_model_names[0],
        max_model_len=config.max_model_len,
        stats=lambda: client.stats,
        cache=_cache_facts(config),
        cpu=lambda: cpu.sample(client.stats, client.info),
        replicas=lambda: client.replicas,
        several=len(configs) > 1,
        tiers=_tiers(config),
        drafts=config.speculation is not None,
        media=config.media_rows > 0,
        experts=config.weight_memory_bytes > 0,
    )
    context = ModelContext(
        client,
        metrics,
        tuple(name for name in config.served_model_names if name != ANY_NAME),
        config.max_model_len,
        ClientLimits(
            max_body_bytes=most_body,
            max_held_bytes=max(LEAST_HELD_BYTES, 4 * most_body),
            max_sequences=_most_sequences(configs, options),
            silent_s=options.sse_ping_interval,
            slots=sum(config.max_num_seqs for config in configs),
            max_queued_requests=options.max_num_queued_reqs * len(configs),
            max_queued_tokens=options.max_num_queued_tokens * len(configs),
            longest_s=options.request_timeout or None,
        ),
        default_sampling=config.default_sampling,
        build=_build(config),
        kv_bytes=kv_bytes,
        pooling=config.pooling,
        adapters=dict(config.adapters),
        default_adapter=default_task(tasks),
        tasks=tasks,
        adapters_change=config.adapter_slots > 0,
        any_name=ANY_NAME in config.served_model_names,
        details=details or ModelDetails(),
        media_rules=MediaRules.of(options, config.media_tokens),
        thoughts=_thought_use(options),
    )
    return context, cpu


def _thought_use(options: ServerOptions) -> ThoughtUse:
    budget = options.reasoning_budget
    return ThoughtUse(
        budget=budget if budget >= 0 else None, last_words=options.reasoning_budget_message
    )


def _body_bytes(config: EngineConfig, details: ModelDetails | None) -> int:
    """Return the default limit on the bytes of a request body."""
    most = default_body_bytes(config.max_model_len)
    reads = details is not None and details.family in FAMILIES.media
    return max(most, MEDIA_BODY_BYTES) if reads else most


def load_texts(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate, LearnedFormat]:
    """Return the tokenizer, the chat template, and the format of responses learned from it.

    If the template is broken, this only logs a warning, because the model can still complete
    prompts. The command line has already checked a template from --chat-template.

    Raises:
      ModelError: see load_tokenizer.
    """
    yield_to_streams(TOKENIZING)
    parses = config.control_tokens_in_messages
    tokenizer, template = load_tokenizer(config.tokenizer_path, config.chat_template, parses)
    with tokenizer.unloaded_on_error(), limited_learning_time():
        fault = template.fault() if config.pooling == "none" else None
        if fault is not None:
            log.warning("%s: %s", config.served_model_names[0], fault)
        generates = config.pooling == "none" and fault is None
        if not generates:
            return tokenizer, template, NO_TEMPLATE
        return tokenizer, template, learn_format(template, *parsers_of(config))


def files_fingerprint(config: EngineConfig) -> str:
    """Return 64 hexadecimal digits that differ if the files or the settings of a model differ.

    This reads samples of the model's files. Where and how fast the model computes does not count.

    Raises:
      ModelError: a file of the model cannot be read.
    """
    template = config.chat_template
    facts = {
        "engine": fingerprint(config, ()).hex(),
        "tokenizer": tokenizer_fingerprint(config.tokenizer_path).hex(),
        "template": Path(template).read_text(encoding="utf-8", errors="replace")
        if template is not None and Path(template).is_file()
        else template,
        "adapters": [msgspec.to_builtins(file) for file in config.sources if config.adapters],
        **{name: getattr(config, name) for name in _SETTINGS},
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()


def kept_responses(config: EngineConfig) -> KeptResponses | None:
    """Return the kept responses of a model, in the directory of its prefix cache; None = no files.

    This reads samples of the files of the model and its tokenizer.

    Raises:
      ConfigError: the directory has files of another program.
      ModelError: a file of the model cannot be read.
    """
    if config.prefix_cache_dir is None or config.pooling != "none":
        return None
    tokens = fingerprint(config, ()) + tokenizer_fingerprint(config.tokenizer_path)
    model = hashlib.sha256(tokens + bytes([config.control_tokens_in_messages])).digest()
    directory = Path(config.prefix_cache_dir).expanduser()
    try:
        return KeptResponses(directory, model, config.prefix_cache_bytes // _SHARE_OF_RESPONSES)
    except OSError as error:
        log.warning(
            "%s cannot be used (%s), so the tokens of responses are not kept for the next start",
            directory,
            error.strerror or type(error).__name__,
        )
        return None


def _most_sequences(configs: Sequence[EngineConfig], options: ServerOptions) -> int:
    """Return the maximum number of sequences: running, queued, and of one further request."""
    waiting = options.max_num_queued_reqs * len(configs) + MAX_SEQUENCES_PER_REQUEST
    return waiting + sum(config.max_num_seqs for config in configs)


def _build(config: EngineConfig) -> str:
    """Return a text of the settings, except version and model, that change seeded responses."""
    facts = (config.architecture, config.dtype, config.activation_bits, config.isa, config.executor)
    return "|".join(map(str, (*facts, sorted(config.default_sampling.items()))))


def _tiers(config: EngineConfig) -> list[str]:
    """Return the name of each offload tier of the KV cache, such as "swap" or "disk"."""
    files = {"disk": config.prefix_cache_dir, "host": config.shared_prefix_bytes}
    kept = {"swap": config.swap_bytes, **files, **config.kv_tiers}
    return [name for name, size in kept.items() if size and config.enable_prefix_caching]


def _cache_facts(config: EngineConfig) -> dict[str, object]:
    return {
        "block_size": config.block_size,
        "num_gpu_blocks": config.kv_blocks,
        "cache_dtype": config.kv_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
