"""Host fixtures and model facts for tests of platforms, without files or machines."""

from cpuserve.config.options import EngineOptions
from cpuserve.platforms.base import KvLayerFacts, ModelFacts
from cpuserve.platforms.cpu import CpuPlatform
from tests.helpers.machines import HOSTS

GIB = 1 << 30

SMOLLM2 = ModelFacts(
    name="smollm2:135m",
    path="/models/smollm2.gguf",
    tokenizer_path="/models/smollm2.gguf",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    quantization="gguf Q4_1",
    two_terms=True,
    max_position=8192,
    kv_layers=(KvLayerFacts(3, 64),) * 30,
    weight_bytes=98_000_000,
    activation_width=6000,
    matrix_weights=134_479_872,
    barriers=30 * 5 + 1,
)
LLAMA_1B = ModelFacts(
    name="meta-llama/Llama-3.2-1B",
    path="/models/llama",
    tokenizer_path="/models/llama",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    quantization=None,
    max_position=131072,
    kv_layers=(KvLayerFacts(8, 64),) * 16,
    weight_bytes=2_471_645_608,
    activation_width=25600,
    matrix_weights=1_235_746_816,
    barriers=16 * 5 + 1,
)


def host_names():
    return sorted(HOSTS)


def load_host(name):
    return HOSTS[name]


def resolve(host, facts=SMOLLM2, sources=None, **options):
    """Resolved for a fixture name or a Host."""
    host = load_host(host) if isinstance(host, str) else host
    return CpuPlatform().resolve(EngineOptions(**options), sources or {}, facts, host)


def got(resolved, field):
    """Return the decided value of a field."""
    return next(d.got for d in resolved.decisions if d.field == field)


def why(resolved, field):
    """Return the reason for the decided value of a field."""
    return next(d.why for d in resolved.decisions if d.field == field)


def write_tree(root, files):
    """Write {relative path: text} below `root`, as sysfs and proc show it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
