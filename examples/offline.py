"""Generate text without a server. usage: offline.py [MODEL]"""

import sys

from cpuserve import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2:135m")
    prompts = ["The capital of France is", "The three primary colours are"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(output.prompt, "->", output.outputs[0].text.strip())
