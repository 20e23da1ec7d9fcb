"""Converts tensor names of checkpoint files to the names that Programs use (Hugging Face names)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.models.stored_names import StoredNames

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(
    r"(?:(?:enc\.)?blk\.(?P<layer>\d+)\.)?(?P<part>[\w.]+?)(?P<kind>\.weight|\.bias|)"
)
# The suffixes of NVFP4 scales in GGUF files, and in Programs.
_SCALES = {"scale": ".weight_scale", "input_scale": ".input_scale"}
# Hugging Face tensors that end with one of these texts have no suffix ".weight" or ".bias".
_BARE = ("_bias", "A_log", "mamba.D", "mixer.D", ".sinks", "layer_scalar", "correct_output_scale")

# Tensors that no Program reads: buffers that some exporters store
# although they follow from the config.
_IGNORED = re.compile(
    r".*\.rotary_emb\.inv_freq|rope_freqs\.weight|.*\.(?:attn|attention|self_attn)\.(?:masked_)?bias"
    r"|.*\.position_ids"
)
# The parts for images and audio, also for making them, heads for multi-token prediction, the
# tokens of EAGLE-3 heads, and the groups of tokens from which assistants may choose.
_PARTS = re.compile(
    r"(?:model\.)?mtp(?:_\w+)?\..*|(?:model\.)?(?:visual|vision_tower|multi_modal_projector)\..*"
    r"|vit_large_projector\..*|(?:model\.)?(?:vision_model|connector|aligner|mm_projector|merger)\..*"
    r"|(?:model\.)?(?:image_newline|visual_embeddings_table\.weight)"
    r"|patch_merge_mlp\..*|model\.density_router\..*|model\.projector\.(?:pre_norm|linear_[12])\..*|(?:mlp_AR|mlp1)\..*"
    r"|(?:model\.)?(?:audio_tower|embed_vision|embed_audio|vision_embedder)\..*"
    r"|model\.(?:vqmodel|generation_(?:embeddings|aligner|head))\..*"
    r"|(?:model\.)?(?:vision|audio)_tokenizer\..*|d2t|t2d|masked_embedding\..*"
    r"|(?:model\.)?(?:vit|high_res_vision_\w+|vision_(?:projector|adapter|projection)|projector)\..*"
    r"|(?:model\.)?(?:linear_proj|resampler_model|sound_\w+|(?:image|video)_tower|\w+_projectors)\..*"
    r"|model\.high_res_vision_alpha|model\.vision_backbone\..*|model\.transformer\.wte\.new_embedding"
    r"|(?:talker|token2wav|code2wav|vision_final_layernorm|blocks|patch_embed|pos_embed)\..*"
    r"|deepstack_merger_list\..*"
)


_IMAGES = (
    *("vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)


def gguf_to_hf(
    name: str,
    blocks: Mapping[str, str] = MappingProxyType({}),
    top: Mapping[str, str] = MappingProxyType({}),
    layers: str = "model.layers",
    bare: tuple[str, ...] = (),
) -> str:
    """Return the Hugging Face name of a GGUF tensor; an unknown name is returned unchanged.

    blocks, top: the tensor names inside and outside of blocks that differ from Llama
      in this architecture.
    layers: the part of a name before the number of a block.
    bare: how further tensors of this architecture end that have no suffix.
    """
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    table = {**_GGUF_TOP, **top} if layer is None else {**_GGUF_BLOCK, **blocks}
    stem, _, last = part.rpartition(".")
    if part not in table and not kind and last in _SCALES:
        part, kind = stem, _SCALES[last]
    if part not in table:
        return name
    prefix, template = "" if layer is None else f"{layers}.{int(layer)}.", table[part]
    stays = template.endswith((*_BARE, *bare)) and not template.endswith("relative_attention_bias")
    return f"{prefix}{template}" if stays else f"{prefix}{template}{kind}"


def checkpoint_to_hf(name: str) -> str:
    """Return the name that Programs use for a tensor in a safetensors file.

    Names that only one family has are changed before (StoredNames.normalize), and others after.
    Checkpoints without an output head (embedding models) and older OPT files omit "model.",
    and GPT-2 checkpoints omit "transformer.". Models for images and text have "language_model"
    or "text_model" in the names of their text tensors. Tensors of BERT and its relatives begin
    with "bert.", "roberta.", "deberta." and so on if the checkpoint has a head. Parts for images
    have names of three kinds, depending on the version that wrote them.
    """
    name = name.removeprefix("thinker.")  # the part of models that speak, for texts
    name = name.replace("model.language_model.", "model.").removeprefix("language_model.")
    if name.startswith(("model.model.", "model.lm_head.")):  # a whole text model inside of a model
        name = name.removeprefix("model.")
    if name.startswith("model.text_model."):
        name = f"model.{name.removeprefix('model.text_model.')}"
    if name == "model.image_newline":
        return "image_newline"
    if name.startswith(_IMAGES):
        return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    if name.startswith("backbone."):
        return f"model.{name.removeprefix('backbone.')}"
    if name.startswith("visual.") and not name.startswith("visual.vision_model."):
        return f"model.{name}"
    for prefix in ("bert.", "roberta.", "distilbert.", "new.", "gte.", "deberta.", "mpnet."):
        name = name.removeprefix(prefix)
    if name.startswith(("h.", "wte.", "wpe.", "ln_f.", "word_embeddings.")):
        return f"transformer.{name}"
    bare = ("decoder.", "layers.", "embed_tokens.", "norm.")
    return f"model.{name}" if name.startswith(bare) else name


def program_name(name: str, names: StoredNames) -> str:
    """Return the name that Programs use for a tensor that files of a family call `name`."""
    return names.translate(checkpoint_to_hf(names.normalize(name)))


def is_ignored(name: str, tower: tuple[str, ...] = (), names: StoredNames | None = None) -> bool:
    """Whether no Program reads the tensor: it is a buffer, or for a part that is not served.

    tower: the beginnings of the tensor names of the served tower (TowerSpec.names) and head.
    names: how files call the tensors of the model's family, if that is known.
    """
    if _IGNORED.fullmatch(name) is not None or (names is not None and names.leaves(name)):
        return True
    return _PARTS.fullmatch(name) is not None and not name.startswith(tower)
