#!/usr/bin/env python3
"""Write models and drafters for them that are right as often as one likes.

usage: make_drafts.py MODEL DIR [--layers 2] [--damping 0.005] [--scale 8] [--known 32000]

MODEL is a directory of make_model.py. With the shape qwen2.5-0.5b, the script writes
DIR/model: its layers after the first --layers add their outputs times --damping to the stream;
DIR/draft, its first --layers layers; DIR/head, a MiMo with an MTP head; and DIR/tapped
with DIR/eagle, its EAGLE-3 head. With the shape gemma4-0.6b, it writes DIR/model and DIR/assistant.

In DIR/head, DIR/tapped and the Gemma 4, all layers are damped, so that the next token depends
mostly on the last one, and the head passes on the embedding of this token:

- The MTP head by its first matrix. Its layer adds nothing.
- The EAGLE-3 head by its attention: the values are the embedding, and each row finds almost only
  itself. It guesses --known tokens, as published heads do. Other tokens are rare in DIR/tapped,
  because their rows of the output matrix are a fourth as large.
- The assistant by its first matrix, to its own columns. The embedding of the model is 0 in all
  other columns. Its layers add nothing.

With smaller factors they agree more often. Steps cost as much as with other weights.
The output matrix is random and not tied to the embedding, or each token would
be its own likeliest successor. Logits have a standard deviation of --scale.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cpuserve.loader.load import read_config
from cpuserve.loader.speculation.guess_heads import guess_head
from cpuserve.models import spec_from_config
from cpuserve.program.parts import stored_needs

TABLE, NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SUMS = ("o_proj.weight", "down_proj.weight")  # added to the stream
GEMMA_SUMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
GEMMA_SUMS += ("post_per_layer_input_norm.weight",)  # norms before these sums
RARE = 0.25  # the output rows of tokens that an EAGLE-3 head does not know, as a part of others
# The queries and keys of an EAGLE-3 head are normed embeddings times FOCUS: the score of a row with
# itself is about FOCUS^2 times the root of a head's columns, and other scores are around 0.
FOCUS = 2.0
# As in the assistant of Gemma 4 E2B.
ASSISTANT = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
ASSISTANT_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
KEPT = ("vocab_size", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window")
KEPT += ("max_position_embeddings", "rms_norm_eps", "hidden_act", "hidden_activation")


def layer_of(name):
    """Return the number of the layer that has a tensor, or -1."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def damped(tensors, first, factor, sums=SUMS):
    """Return the tensors, with the sums of all layers from `first` on times a factor."""
    return {
        name: tensor * factor if name.endswith(sums) and layer_of(name) >= first else tensor
        for name, tensor in tensors.items()
    }


def write(directory, source, tensors, **changes):
    """Write a model with the tokenizer of `source`, and its config with changes."""
    config = json.loads((source / "config.json").read_text()) | changes
    write_head(directory, config, tensors)
    for file in source.glob("*.json"):
        if not (directory / file.name).exists() and not file.name.endswith("index.json"):
            (directory / file.name).write_bytes(file.read_bytes())


def write_head(directory, config, tensors):
    """Write a checkpoint without a tokenizer."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def random_matrix(shape, numbers):
    """Return a random matrix; its products are about as large as their inputs."""
    return (torch.randn(shape, generator=numbers) * shape[-1] ** -0.5).bfloat16()


def head_tensors(directory, tensors):
    """Return the tensors of an MTP head that passes on the embedding of the next token."""
    head, width = guess_head(spec_from_config(read_config(directory))), len(tensors[NORM])
    numbers, made = torch.Generator().manual_seed(1), {}
    for need in stored_needs(head.program.weights):
        name = head.stored(need.name)
        if name == need.name:  # the model and its head share it
            continue
        if len(need.shape) == 1:
            value = torch.zeros(need.shape) if name.endswith("bias") else torch.ones(need.shape)
        elif name.endswith(SUMS):
            value = torch.zeros(need.shape)
        elif need.name == "guess.fc.weight":  # its inputs: the hidden state, then the embedding
            value = torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1)
        else:
            value = random_matrix(need.shape, numbers)
        made[name] = value.bfloat16()
    made[head.stored(NORM)] = tensors[NORM].clone()
    return made


def known_tokens(vocab, count):
    """Return the tokens that an EAGLE-3 head guesses, in order."""
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:count]
    return chosen.sort().values


def eagle_head(config, model, known):
    """Return the config and the tensors of an EAGLE-3 head that passes on the next embedding.

    The hidden states of the model are not used. A guess after the first one begins with the stream
    of the guess before it, which is its embedding, so the values take it away again.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    inner, layers = config["intermediate_size"], config["num_hidden_layers"]
    numbers, one, none = torch.Generator().manual_seed(4), torch.eye(width), torch.zeros
    read = sorted({min(2, layers), layers // 2, max(layers - 3, 0)})
    focus = torch.cat([FOCUS * one, none(width, width)], dim=1)
    at = "midlayer"
    made = {
        "fc.weight": none(width, len(read) * width),
        f"{at}.self_attn.q_proj.weight": focus,
        f"{at}.self_attn.k_proj.weight": focus.clone(),
        f"{at}.self_attn.v_proj.weight": torch.cat([one, -one], dim=1),
        f"{at}.self_attn.o_proj.weight": one.clone(),
        f"{at}.mlp.gate_proj.weight": random_matrix((inner, width), numbers),
        f"{at}.mlp.up_proj.weight": random_matrix((inner, width), numbers),
        f"{at}.mlp.down_proj.weight": none(width, inner),
        "norm.weight": model[NORM],
        OUTPUT: model[OUTPUT][known],
    }
    for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        made[f"{at}.{norm}.weight"] = torch.ones(width)
    made = {name: tensor.bfloat16() for name, tensor in made.items()}
    made["d2t"] = known - torch.arange(len(known))
    made["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
    made["t2d"][known] = True
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,  # the values are as wide as the embedding
        "draft_vocab_size": len(known),
        "eagle_aux_hidden_state_layer_ids": read,
    }
    return config | changes, made


def assistant(config, output):
    """Return the config and the tensors of an assistant that passes on the last embedding.

    output: the output matrix of the model.
    """
    text = {key: config[key] for key in KEPT if key in config} | ASSISTANT
    text |= {"num_hidden_layers": len(ASSISTANT_LAYERS), "layer_types": ASSISTANT_LAYERS}
    text |= {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    theirs, width = config["hidden_size"], text["hidden_size"]
    inner, numbers = text["intermediate_size"], torch.Generator().manual_seed(5)
    made = {
        OUTPUT: output[:, :width],
        # The stream of the model has as much in fewer columns, so its norm makes them larger.
        NORM: torch.full((width,), (theirs / width) ** 0.5),
        "pre_projection.weight": torch.eye(width, 2 * theirs),
        "post_projection.weight": random_matrix((theirs, width), numbers),
    }
    for i, kind in enumerate(ASSISTANT_LAYERS):
        at = f"model.layers.{i}"
        head = text["global_head_dim" if kind == "full_attention" else "head_dim"]
        columns = text["num_attention_heads"] * head
        made[f"{at}.self_attn.q_proj.weight"] = random_matrix((columns, width), numbers)
        made[f"{at}.self_attn.o_proj.weight"] = random_matrix((width, columns), numbers)
        made[f"{at}.self_attn.q_norm.weight"] = torch.ones(head)
        for part in ("gate", "up"):
            made[f"{at}.mlp.{part}_proj.weight"] = random_matrix((inner, width), numbers)
        made[f"{at}.mlp.down_proj.weight"] = random_matrix((width, inner), numbers)
        for norm in ("input_layernorm", "pre_feedforward_layernorm"):
            made[f"{at}.{norm}.weight"] = torch.ones(width)
        for norm in ("post_attention_layernorm", "post_feedforward_layernorm"):
            made[f"{at}.{norm}.weight"] = torch.zeros(width)
        made[f"{at}.layer_scalar"] = torch.ones(1)
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": theirs,
        "text_config": text,
    }
    return config, {name: tensor.bfloat16() for name, tensor in made.items()}


def from_gemma4(source, config, args):
    """Write a Gemma 4 with an assistant."""
    tensors, numbers = load(source), torch.Generator().manual_seed(2)
    shape, width = tensors[TABLE].shape, ASSISTANT["hidden_size"]
    tensors[TABLE] = torch.zeros(shape, dtype=torch.bfloat16)
    tensors[TABLE][:, :width] = random_matrix((shape[0], width), numbers)
    tensors[OUTPUT] = random_matrix(shape, numbers) * args.scale
    for name, tensor in tensors.items():
        if name.endswith(("layer_scalar", NORM)):
            tensors[name] = torch.ones_like(tensor)
    model = damped(tensors, 0, args.damping, GEMMA_SUMS)
    changes = {"final_logit_softcapping": None, "tie_word_embeddings": False}
    write(args.directory / "model", source, model, **changes)
    write_head(args.directory / "assistant", *assistant(config, tensors[OUTPUT]))


def from_qwen2(source, config, args):
    """Write a Qwen2 with a draft model, one with an MTP head, and one with an EAGLE-3 head."""
    tensors = load(source)
    table, root = tensors[TABLE], tensors[TABLE].shape[1] ** 0.5
    tensors[TABLE] = table * root  # about as large as the sum of a layer
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(2))
    tensors[OUTPUT] = (noise * args.scale / root).bfloat16()
    model = damped(tensors, args.layers, args.damping)
    write(args.directory / "model", source, model, tie_word_embeddings=False)
    first = {name: tensor for name, tensor in model.items() if layer_of(name) < args.layers}
    sizes = {"num_hidden_layers": args.layers, "tie_word_embeddings": False}
    write(args.directory / "draft", source, first, **sizes)
    guessing = args.directory / "head"
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    changes |= {"num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    model = damped(tensors, 0, args.damping)
    write(guessing, source, model, **changes)
    save_file(
        {name: t.contiguous() for name, t in (model | head_tensors(guessing, model)).items()},
        guessing / "model.safetensors",
        metadata={"format": "pt"},
    )
    known = known_tokens(config["vocab_size"], args.known)
    rare = torch.ones(config["vocab_size"], dtype=torch.bool)
    rare[known] = False
    model[OUTPUT] = model[OUTPUT].clone()
    model[OUTPUT][rare] *= RARE
    write(args.directory / "tapped", source, model, tie_word_embeddings=False)
    write_head(args.directory / "eagle", *eagle_head(config, model, known))


def load(source):
    """Return all tensors of a directory of make_model.py."""
    return {
        n: t for file in sorted(source.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="MODEL")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--damping", type=float, default=0.005)
    parser.add_argument("--scale", type=float, default=8.0)
    parser.add_argument("--known", type=int, default=32000)
    args = parser.parse_args(argv)
    config = json.loads((args.source / "config.json").read_text())
    made = {"Qwen2ForCausalLM": from_qwen2, "Gemma4ForCausalLM": from_gemma4}
    name = config["architectures"][0]
    if name not in made:
        sys.exit(f"make_drafts: {args.source} is a {name}; give one of {', '.join(made)}")
    made[name](args.source, config, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
