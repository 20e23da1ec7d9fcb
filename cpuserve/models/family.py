"""ModelFamily: what cpuserve knows about one model family, in one record.

A record names code as "module:attribute", which is imported at its first use, so that reading all
records needs neither numpy nor the modules of the families (`cpuserve.models.families`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class TextType:
    """What a `model_type` of a text part says beside its family.

    Published configs leave out what their class in transformers has by default, so the defaults of
    these classes are here, where the readers of the text models have others or none.
    Source: the configuration classes of transformers 5.24.

    defaults: values of keys that a published config may leave out.
    splits_width: whether the heads share hidden_size if the config has no head_dim; else the
      reader of the text model has the default.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    splits_width: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """A model of images and text, whose text part is a text model.

    architectures: its names in config.json.
    text: the model_type of its text part, if the config has none.
    others: further model types that its text part may have.
    called: further names that configs have for such a type, each with the type.
    tied: tie_word_embeddings, if no part of the config has it; None: the default of the text model.
    tower: the part that encodes pictures (TowerDef); "": only the text part runs.
    media: the functions that read the preprocessing of its pictures (FamilyReader), as
      "module:attribute", by the `model_type` of the whole config.
    published: how its files call tensors otherwise (StoredNames.published).
    unread: the tensors of its files that no Program reads (StoredNames.unread).
    projectors: how its mmproj files are read (Projector), as "module:attribute", by their
      clip.projector_type; those of several families are in cpuserve/loader/gguf/projectors.
    mmproj: the kinds of mmproj files of other families that have its tower, by the architecture of
      its text part.
    """

    architectures: tuple[str, ...]
    text: str
    others: tuple[str, ...] = ()
    called: Mapping[str, str] = field(default_factory=dict)
    tied: bool | None = None
    tower: str = ""
    media: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    projectors: Mapping[str, str] = field(default_factory=dict)
    mmproj: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeadNames:
    """How tensors of a head for multi-token prediction begin in its Program, and in files.

    `{}` is the number of layers of the model, and `{last}` that of the last layer of the head.

    own: matrices that such a head may have of its own.
    """

    names: Mapping[str, str]
    own: Mapping[str, str] = field(default_factory=dict)


# How the Program of an assistant calls the embedding of its model.
MODEL_TABLE = "guess.embed_tokens.weight"
# As the layer after the last one of the model.
AFTER = {
    "model.layers.0.": "model.layers.{}.",
    "guess.fc.": "model.layers.{}.eh_proj.",
    "guess.embedding_norm.": "model.layers.{}.enorm.",
    "guess.hidden_norm.": "model.layers.{}.hnorm.",
}
NEXTN = HeadNames(
    {**AFTER, "model.norm.": "model.layers.{}.shared_head.norm."},
    own={
        "model.embed_tokens.": "model.layers.{}.embed_tokens.",
        "lm_head.": "model.layers.{}.shared_head.head.",
    },
)
FINAL = HeadNames({**AFTER, "model.norm.": "model.layers.{}.final_layernorm."})
MTP = HeadNames(
    {
        "model.layers.0.": "mtp.layers.0.",
        "guess.fc.": "mtp.fc.",
        "guess.embedding_norm.": "mtp.pre_fc_norm_embedding.",
        "guess.hidden_norm.": "mtp.pre_fc_norm_hidden.",
        "model.norm.": "mtp.norm.",
    }
)


@dataclass(frozen=True, slots=True)
class Guesses:
    """The head for multi-token prediction that checkpoints of a family may have.

    stored: its tensors in safetensors files.
    gguf: its tensors in GGUF files; None: llama.cpp's converter writes heads to files of their own,
      which are not read.
    dense: whether its layer has no experts, while the model has.
    hidden_first: whether the columns of its fc begin with the hidden state.
    described: whether only models with an entry "guess" in ModelSpec.parts have a head that runs.
    """

    stored: HeadNames
    gguf: HeadNames | None = NEXTN
    dense: bool = False
    hidden_first: bool = False
    described: bool = False


Tables = TypeVar("Tables", "TokenizerTables", "ToolTables")


@dataclass(frozen=True, slots=True)
class TokenizerTables:
    """What only the tokenizers of a family have; code as "module:attribute".

    files: what reads the tokenizer in a file of a directory (TokenizerReader), by the name of the
      file, which may have wildcards.
    gguf: the kinds of tokenizers in GGUF files (GgufTokenizer), by `tokenizer.ggml.model`.
    splits: how texts are cut into pieces (PreTokenizer), by `tokenizer.ggml.pre`.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    gguf: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolTables:
    """How models of a family write tool calls and thoughts.

    calls: formats of tool calls (ToolFormat) as "module:attribute", by --tool-call-parser.
    hints: the texts of a template, or the special tokens, that only a model with the format has.
    thoughts: the texts before and after a thought, by --reasoning-parser.
    """

    calls: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    thoughts: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def joined(first: Tables, second: Tables) -> Tables:
    """Return the tables with the rows of both; where both have a row, that of `first` counts."""
    pairs = ((getattr(first, f.name), getattr(second, f.name)) for f in fields(first))
    return type(first)(*({**rows, **rows_after, **rows} for rows, rows_after in pairs))


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One model family: where its code is, and what files call it and its parts.

    architectures: its names in config.json; messages and reports show the first one.
    text: the class that reads a config and builds a Program (ModelDef).
    differs: the fields of the row that `text` names (DecoderRow) which this family has otherwise:
      a decoder that differs in its configuration alone is a record, and has no code.
    text_types: the `model_type` of configs in which it is the text part.
    wholes: its models of images and text. One with a text part of another family is declared alone.
    saved_as: the classes of transformers that run it, and so are the architecture in the files that
      they save, each with the `model_type`.
    rerankers: classifiers of texts; with one label they score pairs of texts.
    classifiers: classifiers of texts that are no rerankers; with one label they are reward models.
    taggers: classifiers of single tokens.
    masked: models that predict masked tokens; their vectors over the vocabulary are sparse
      embeddings (SPLADE).
    gguf_rerankers: whether its rerankers are read from GGUF files.
    judges: whether it has rerankers that generate "yes" or "no".
    shared_gguf: the architecture in GGUF files that it shares with another family, by its own
      architecture; other metadata of the file decides.
    gguf: the entries of its GGUF architectures (GgufArch) as "module:attribute", by the name of the
      architecture; those of families without a folder are in cpuserve/loader/gguf/archs.
    refused_gguf: why files of a GGUF architecture of its kind are refused, by the architecture.
    guesses: the head that guesses the token after the next one.
    assistants: the classes of small models that guess for it (AssistantDef), as "module:class", by
      architecture.
    mtp_methods: names of vLLM for its own head or its assistants, as methods of speculation.
    own_keys: keys of config.json that transformers may write for any family, and that this one
      reads; others refuse them.
    label: its name in texts for users; "": its architecture.
    example_of: the kind of models of which messages name it as one that runs: "states" (its layers
      keep more than keys and values).
    tokenizer: what its tokenizers have and no others.
    tools: how it writes tool calls and thoughts, if its templates do not show it.
    """

    architectures: tuple[str, ...]
    text: str
    text_types: Mapping[str, TextType] = field(default_factory=dict)
    differs: Mapping[str, Any] = field(default_factory=dict)
    wholes: tuple[Whole, ...] = ()
    saved_as: tuple[tuple[str, str], ...] = ()
    rerankers: tuple[str, ...] = ()
    classifiers: tuple[str, ...] = ()
    taggers: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    gguf_rerankers: bool = False
    judges: bool = False
    shared_gguf: Mapping[str, str] = field(default_factory=dict)
    gguf: Mapping[str, str] = field(default_factory=dict)
    refused_gguf: Mapping[str, str] = field(default_factory=dict)
    guesses: Guesses | None = None
    assistants: Mapping[str, str] = field(default_factory=dict)
    mtp_methods: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    label: str = ""
    example_of: str = ""
    tokenizer: TokenizerTables = field(default_factory=TokenizerTables)
    tools: ToolTables = field(default_factory=ToolTables)

    @property
    def name(self) -> str:
        """The architecture that messages and reports show."""
        return self.architectures[0]

    def below(self, head: str) -> str:
        """Return the architecture below a head, such as BertModel of BertForMaskedLM."""
        stem = head.partition("For")[0]
        stems = {
            name.partition("For")[0].removesuffix("Model"): name for name in self.architectures
        }
        return stems.get(stem, self.name)


# Text models that many published models of images and text have.
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3")


def sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int, **more: Any
) -> dict[str, Any]:
    """Return the keys of config.json for the sizes of a decoder, and `more`."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        **more,
    }
