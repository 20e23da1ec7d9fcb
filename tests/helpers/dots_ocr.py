"""A tiny random dots.ocr, as its own code, which is not run, writes it.

transformers has no such model. Its layers are layers of Qwen2.5-VL without windows and biases; the
norms around them, the merger and the whole model are here.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.vision_utils import get_vision_position_ids

DOTS_OCR = "DotsOCRForCausalLM"
_EPS = 1e-3  # so that another epsilon would be seen
_MERGE = 2
# The names of its own code in place of those of Qwen2.5-VL.
_NAMES = {
    "mlp.gate_proj": "mlp.fc1",
    "mlp.up_proj": "mlp.fc3",
    "mlp.down_proj": "mlp.fc2",
}


class _Tower(nn.Module):
    def __init__(self, vision: Qwen2_5_VLVisionConfig, width: int) -> None:
        super().__init__()
        hidden, patch = vision.hidden_size, vision.patch_size
        patches = nn.Module()
        patches.proj = nn.Conv2d(3, hidden, patch, patch)
        patches.norm = qwen.Qwen2_5_VLRMSNorm(hidden, _EPS)
        self.patch_embed = nn.ModuleDict({"patchifier": patches})
        self.blocks = nn.ModuleList(qwen.Qwen2_5_VLVisionBlock(vision) for _ in range(vision.depth))
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.bias = None
            if isinstance(module, qwen.Qwen2_5_VLRMSNorm):
                module.variance_epsilon = _EPS
        self.post_trunk_norm = qwen.Qwen2_5_VLRMSNorm(hidden, _EPS)
        self.merger = qwen.Qwen2_5_VLPatchMerger(width, hidden, _MERGE)
        self.merger.ln_q = nn.LayerNorm(hidden, 1e-6)
        self.turns = qwen.Qwen2_5_VLVisionRotaryEmbedding(vision)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Return the rows of pictures. pixels: [patches, 3 * frames * patch * patch]."""
        side = self.patch_embed["patchifier"].proj.kernel_size
        x = self.patch_embed["patchifier"].proj(pixels.reshape(len(pixels), 3, -1, *side)[:, :, 0])
        x = self.patch_embed["patchifier"].norm(x.flatten(1))
        places = get_vision_position_ids(grids, _MERGE)
        turns = self.turns(x, places)
        ends = torch.nn.functional.pad(grids.prod(dim=1).cumsum(0), (1, 0)).int()
        for block in self.blocks:
            x = block(x, cu_seqlens=ends, position_embeddings=turns)
        return self.merger(self.post_trunk_norm(x))


class DotsOCRForCausalLM(nn.Module):
    """A Qwen2 that reads pictures, with the arguments and results of models of transformers."""

    def __init__(self, text: Qwen2Config, vision: Qwen2_5_VLVisionConfig, image_id: int) -> None:
        super().__init__()
        self.language = Qwen2ForCausalLM(text)
        self.vision_tower = _Tower(vision, text.hidden_size)
        self.config = SimpleNamespace(
            text_config=text, vision_config=vision, image_token_id=image_id
        )

    @property
    def model(self) -> DotsOCRForCausalLM:
        """The model without its head, which has the tower."""
        return self

    def get_image_features(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor):
        """Return an object with the rows of pictures as `pooler_output`."""
        return SimpleNamespace(pooler_output=[self.vision_tower(pixel_values, image_grid_thw)])

    def forward(self, input_ids: torch.Tensor, **given: Any):
        """Return an object with the logits of all tokens."""
        x = self.language.get_input_embeddings()(input_ids)
        if "pixel_values" in given:
            rows = self.vision_tower(given["pixel_values"], given["image_grid_thw"])
            x = x.masked_scatter((input_ids == self.config.image_token_id)[..., None], rows)
        return self.language(inputs_embeds=x, use_cache=False)


def write_dots_ocr(
    to: Path, text: dict[str, Any], vision: dict[str, Any], pictures: dict[str, Any], image_id: int
) -> DotsOCRForCausalLM:
    """Write a random model with the settings of its image processor, and return it.

    text, vision: values of the configs of these parts; those of the tower under the names of Qwen.
    """
    torch.manual_seed(2)
    inner = Qwen2Config(**text, tie_word_embeddings=False)
    tower = Qwen2_5_VLVisionConfig(**vision, attn_implementation="eager")
    model = DotsOCRForCausalLM(inner, tower, image_id).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn(value.shape) * 0.2 + (0.9 if "norm" in name else 0))
    tensors = {}
    for name, value in model.state_dict().items():
        new = name.removeprefix("language.")
        for theirs, ours in _NAMES.items() if new == name else ():
            new = new.replace(theirs, ours)
        tensors[new] = value.contiguous()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    own = {
        "embed_dim": tower.hidden_size,
        "hidden_size": inner.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_hidden_layers": tower.depth,
        "num_attention_heads": tower.num_heads,
        "patch_size": tower.patch_size,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 1,
        "rms_norm_eps": _EPS,
        "use_bias": False,
        "post_norm": True,
    }
    # The keys of the text part are in the whole config.
    whole = {
        **inner.to_dict(),
        "architectures": [DOTS_OCR],
        "model_type": "dots_ocr",
        "auto_map": {"AutoModelForCausalLM": "modeling_dots_ocr.DotsOCRForCausalLM"},
        "image_token_id": image_id,
        "vision_config": own,
    }
    (to / "config.json").write_text(json.dumps(whole))
    settings = {**pictures, "temporal_patch_size": 1}
    (to / "preprocessor_config.json").write_text(json.dumps(settings))
    return model
