"""The contract of Cohere's /v2/embed and /v1/embed."""

from tests.contract.table import (
    NO_COUNT,
    NO_LIST,
    NO_NUMBER,
    NO_TEXT,
    accepted,
    cases,
    refused,
    run,
)

V2, V1 = "/v2/embed", "/v1/embed"
BODY = {"model": "tiny", "input_type": "search_query", "texts": ["hi"]}
PARTS = [{"content": [{"type": "text", "text": "hi"}]}]
IMAGE = [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
GOOD = {
    "model": ("tiny", "alias", None),
    "texts": (["a"], ["a"] * 96),
    "input_type": ("search_document", "classification", "clustering", None),
    "embedding_types": (["float"], ["int8", "uint8"], ["base64", "float"], [], None),
    "truncate": ("NONE", "START", "END", None),
    "timeout": (1, 2.5, None),
    "images": ([], None),
}
BAD = {
    "texts": ([], [1], [None], ["a"] * 1025, *NO_LIST),
    "input_type": ("image", "other", *NO_TEXT),
    "embedding_types": (["float16"], "float", ["binary"], ["ubinary"], 1, {}, True),
    "truncate": ("end", *NO_TEXT),
    "timeout": (0, -1, *NO_NUMBER),
    "images": (["data:image/png;base64,aaaa"],),
}


@cases(
    accepted(V2, BODY, GOOD),
    refused(V2, BODY, BAD),
    accepted(V1, BODY, GOOD),
    refused(V1, BODY, BAD),
    accepted(V2, {"model": "tiny"}, {"inputs": (PARTS, PARTS * 2)}),
    refused(V2, {"model": "tiny"}, {"inputs": ([], IMAGE, [1], *NO_LIST)}),
    refused(V2, BODY, {"inputs": (PARTS,), "max_tokens": (0, -1, *NO_COUNT)}),
    accepted(V2, BODY, {"max_tokens": (1, 10**6), "output_dimension": (1, 4, None)}),
    refused(V2, BODY, {"output_dimension": (0, 5, *NO_COUNT), "priority": (2**40, *NO_COUNT)}),
    refused(V2, {**BODY, "truncate": "NONE"}, {"max_tokens": (5,)}),
    refused(V2, {"model": "tiny"}, {"texts": (None,)}),
)
def test_texts_are_accepted_or_refused_with_their_field(case):
    run(case, "last")
