"""Writes a trained model as Hugging Face writes one, for transformers 4 and 5 alike."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from demo.network import Llama, Shape
from demo.tokenizer import BOS, CHAT_TEMPLATE, END, ROLES, special_id


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.float16).contiguous() for name, value in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    bos, end = special_id(tokenizer, BOS), special_id(tokenizer, END)
    write(folder / "config.json", model_config(model.shape, bos, end))
    write(folder / "generation_config.json", generation_config(bos, end))
    write(folder / "tokenizer_config.json", tokenizer_config(model.shape))
    tokenizer.save(str(folder / "tokenizer.json"))


def read_weights(model: Llama, folder: Path) -> None:
    """Sets the weights to those that `export` wrote."""
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def model_config(shape: Shape, bos: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "float16",
        "dtype": "float16",
    }


def generation_config(bos: int, end: int) -> dict[str, object]:
    return {
        "bos_token_id": bos,
        "eos_token_id": end,
        "pad_token_id": end,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "max_new_tokens": 512,
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": list(ROLES.values()),
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
