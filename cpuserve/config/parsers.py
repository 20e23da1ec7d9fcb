"""The values of --tool-call-parser and --reasoning-parser, as in vLLM.

serving/tools/families.py has the meanings of these values.
"""

# The two options also accept "auto" (the parser is found from the model's files) and "none".
TOOL_CALL_PARSERS = (
    "apertus", "cohere_command_r", "cohere_command3", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "functiongemma", "gemma4", "glm45", "glm47", "granite", "hermes",
    "hunyuan_a13b", "kimi_k2", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "minimax",
    "minimax_m2", "mistral", "mistral_args", "nemotron_json", "olmo3", "openai", "phi4_mini_json",
    "pythonic", "qwen3_coder", "qwen3_xml", "seed_oss",
)  # fmt: skip
REASONING_PARSERS = (
    "apriel", "cohere", "deepseek_r1", "deepseek_v3", "gemma4", "glm45", "granite", "hunyuan_a13b",
    "kimi_k2", "minimax_m2", "mistral", "nemotron_v3", "olmo3", "openai_gptoss", "qwen3",
    "seed_oss", "step3",
)  # fmt: skip
