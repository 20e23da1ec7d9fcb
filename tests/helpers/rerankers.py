"""Tiny rerankers, and the scores that transformers computes with them."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.helpers import gguf_convert
from tests.helpers.heads import transformers_model, with_random_head
from tests.helpers.tiny import tiny_model

# The family of each kind, its class in transformers, and keys of its config.
KINDS = {
    "bert": ("bert", "BertForSequenceClassification", {}),
    "bert-identity": (
        "bert",
        "BertForSequenceClassification",
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaForSequenceClassification", {}),
    "roberta": ("xlm-roberta", "RobertaForSequenceClassification", {"model_type": "roberta"}),
    "camembert": ("xlm-roberta", "CamembertForSequenceClassification", {"model_type": "camembert"}),
    "modernbert": (
        "modernbert",
        "ModernBertForSequenceClassification",
        {"classifier_bias": True, "norm_bias": True},
    ),
    "modernbert-mean": (
        "modernbert",
        "ModernBertForSequenceClassification",
        {"classifier_pooling": "mean"},
    ),
    "gte": ("gte", "GteForSequenceClassification", {}),
    "deberta": ("deberta", "DebertaV2ForSequenceClassification", {}),
    "qwen3": ("qwen3", "Qwen3ForSequenceClassification", {}),
    "qwen3-judge": ("qwen3", "Qwen3ForCausalLM", {}),
}
ENCODERS = tuple(kind for kind in KINDS if not kind.startswith("qwen3"))
FIRST, LAST = "<|im_start|>", "<|im_end|>"
QUERY = "Which river flows through Budapest?"
DOCUMENTS = [
    "The Danube flows through Vienna, Bratislava, Budapest and Belgrade.",
    "",
    "A recipe for goulash: onions, paprika, beef. " * 4,
    "The Thames!",
    "\u00c9lan vital, \u6f22\u5b57 and \U0001f600",
]
INSTRUCTION = "Find the passage that answers"


# Changes of the configs of the models below the heads. Positions must suffice for the prompt of
# Qwen3-Reranker, which has hundreds of tokens without the texts.
BASES = {
    "modernbert-mean": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"max_position_embeddings": 1024},
    "qwen3-judge": {"max_position_embeddings": 1024},
}
LAST_GGUF = "cls.output"
# Kinds that GGUF files may be, and the names of the tensors of their heads there.
GGUF_KINDS = {
    "xlm-roberta": ("bert-roberta", {"classifier.dense": "cls", "classifier.out_proj": LAST_GGUF}),
    "modernbert-mean": (
        "modern-bert",
        {"head.dense": "cls", "head.norm": "cls.norm", "classifier": LAST_GGUF},
    ),
    "qwen3": ("qwen3", {"score": LAST_GGUF}),
    "qwen3-judge": ("qwen3", {}),
}


def base_of(kind: str) -> Path:
    """The directory of the tiny model below the head."""
    return tiny_model(KINDS[kind][0], **BASES.get(kind, {}))


def as_gguf(kind: str, path: Path) -> Path:
    """Write a reranker as llama.cpp's converter does; it has no tokenizer of use."""
    arch, names = GGUF_KINDS[kind]
    tensors = load_file(reranker(kind) / "model.safetensors")
    head = {
        f"{names[stem]}.{part}": value.numpy()
        for name, value in tensors.items()
        for stem, _, part in [name.rpartition(".")]
        if stem in names
    }
    if kind == "qwen3-judge":
        tokenizer = Tokenizer.from_file(str(reranker(kind) / "tokenizer.json"))
        rows = [tokenizer.token_to_id(answer) for answer in ("yes", "no")]
        head = {f"{LAST_GGUF}.weight": tensors["model.embed_tokens.weight"][rows].numpy()}
    assert head
    gguf_convert.convert(arch, path, source=base_of(kind), more=head, pooling_type=4)
    return path


@functools.cache
def reranker(kind: str, labels: int = 1) -> Path:
    """The directory of a tiny reranker of this kind, with random weights in its head."""
    _, name, keys = KINDS[kind]
    source = base_of(kind)
    directory = source.with_name(f"{source.name}-reranker-{kind}-{labels}")
    more = {} if name.endswith("CausalLM") else {"num_labels": labels}
    with_random_head(source, directory, {**keys, "architectures": [name]}, seed=1, **more)
    _let_tokenizer_join(directory / "tokenizer.json", kind)
    return directory


def _let_tokenizer_join(path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    if kind in ENCODERS:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{FIRST} $A {LAST}",
            pair=f"{FIRST} $A {LAST} $B:1 {LAST}:1",
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in (FIRST, LAST)],
        )
    else:
        tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(path))


def expected_scores(kind: str, queries: list[str], documents: list[str]) -> list[float]:
    """The scores of pairs with transformers in fp32, each by itself."""
    import transformers

    path, (_, _, keys) = reranker(kind), KINDS[kind]
    model = transformers_model(path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    scores = []
    for query, document in zip(queries, documents, strict=True):
        with torch.inference_mode():
            logits = model(**_inputs(tokenizer, kind, query, document)).logits.double()
        if kind == "qwen3-judge":
            no, yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
            scores.append(torch.softmax(logits[0, -1, [no, yes]], dim=0)[1].item())
        else:
            plain = "sentence_transformers" in keys
            scores.append((logits if plain else torch.sigmoid(logits)).item())
    return scores


def _inputs(tokenizer: object, kind: str, query: str, document: str) -> dict[str, torch.Tensor]:
    if kind not in ENCODERS:
        return tokenizer(card_prompt(query, document), return_tensors="pt")
    # A list of one pair, since an empty document by itself would be none.
    found = tokenizer([(query, document)], return_tensors="pt", return_token_type_ids=True)
    if not kind.startswith("bert"):
        del found["token_type_ids"]
    else:
        assert set(found["token_type_ids"][0].tolist()) == {0, 1}
    return found


def card_prompt(query: str, document: str, instruction: str | None = None) -> str:
    """The prompt of Qwen3-Reranker's model card."""
    task = instruction or (
        "Given a web search query, retrieve relevant passages that answer the query"
    )
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
