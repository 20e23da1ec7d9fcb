"""The outputs of requests as values that tests compare bit for bit."""


def exact(output):
    """Return (tokens, logprobs of all reported alternatives) of each completion of `output`."""
    return [
        (c.token_ids, [{t: p.logprob for t, p in row.items()} for row in c.logprobs or ()])
        for c in output.outputs
    ]


def exact_answers(llm, prompts, params):
    """Return `exact` of all completions of all prompts, in one list; params as in LLM.generate."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [completion for output in outputs for completion in exact(output)]
