"""Examples at the end of the help text of each command."""

from __future__ import annotations

EXAMPLES = {
    "serve": (
        "cpuserve serve smollm2:135m --port 9000",
        "cpuserve serve OWNER/MODEL:Q4_K_M --max-model-len 8k",
    ),
    "run": (
        "cpuserve run smollm2:135m",
        'echo "What is the capital of France?" | cpuserve run smollm2:135m',
        'cpuserve run smollm2:135m "Summarize this:" < notes.txt',
    ),
    "chat": (
        'cpuserve chat smollm2:135m --system "Be brief."',
        "cpuserve chat --url http://127.0.0.1:8000",
    ),
    "complete": (
        'cpuserve complete smollm2:135m "The capital of France is"',
        'cpuserve complete --prompt "The sky is" --url http://127.0.0.1:8000',
    ),
    "generate": (
        'cpuserve generate smollm2:135m "The capital of France is"',
        'cpuserve generate --prompt "The sky is" --url http://127.0.0.1:8000',
    ),
    "ps": ("cpuserve ps --url http://127.0.0.1:8000",),
    "stop": ("cpuserve stop smollm2:135m",),
    "warm": ("cpuserve warm prompts.jsonl --url http://127.0.0.1:8000",),
    "top": ("cpuserve top", "cpuserve top --url http://127.0.0.1:9000 --once"),
    "completion": ("source <(cpuserve completion bash)",),
    "bench": ("cpuserve bench roofline", "cpuserve bench load smollm2:135m"),
    "bench serve": ("cpuserve bench serve --url http://127.0.0.1:8000",),
    "bench throughput": ("cpuserve bench throughput smollm2:135m --input-len 512",),
    "bench latency": ("cpuserve bench latency smollm2:135m --output-len 64",),
    "bench load": ("cpuserve bench load smollm2:135m",),
    "bench step": ("cpuserve bench step smollm2:135m --batch 1 8 --context 1024",),
    "bench kernels": ("cpuserve bench kernels smollm2:135m --batch 1 --prefill 512",),
    "bench roofline": ("cpuserve bench roofline --json",),
    "run-batch": ("cpuserve run-batch -i requests.jsonl -o results.jsonl smollm2:135m",),
    "config": ("cpuserve config smollm2:135m --max-model-len 8k",),
    "size": (
        "cpuserve size --recommend",
        "cpuserve size smollm2:135m",
        "cpuserve size OWNER/MODEL --instance c7i.4xlarge",
    ),
    "program": ("cpuserve program smollm2:135m",),
    "doctor": ("cpuserve doctor", "cpuserve doctor --json > report.json"),
    "pull": ("cpuserve pull smollm2:135m",),
    "quantize": ("cpuserve quantize OWNER/MODEL model-int4 --scheme int4",),
    "models": ("cpuserve models", "cpuserve models --supported"),
    "list": ("cpuserve list",),
    "ls": ("cpuserve ls",),
    "show": ("cpuserve show smollm2:135m", "cpuserve show OWNER/MODEL:Q4_K_M --template"),
    "rm": ("cpuserve rm OWNER/MODEL:Q4_K_M", "cpuserve rm --packed"),
}


def epilog(command: str) -> str:
    """Return the examples of a command, for the end of its help text."""
    return "\n  ".join(("Examples:", *EXAMPLES[command]))
