"""Model directories made on the spot: configurations of a few layers, for what must be refused or served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_config(folder: Path, **values: Any) -> Path:
    """A directory that holds nothing but a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def random_llama(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """A Llama of random weights, three layers of four query and two KV heads, with a real tokenizer.

    Its weights are large enough that every token depends on distant ones: a key that is missing, or another
    one's, changes what is generated. Greedy outputs do not settle into a loop.
    """
    import torch
    from safetensors.torch import save_file

    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    config = LLAMA | {"vocab_size": vocabulary, "tie_word_embeddings": False}
    write_config(folder, **config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    generator = torch.Generator().manual_seed(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    query = config["num_attention_heads"] * config["head_dim"]

    def random(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": random(vocabulary, hidden, 1.0),
        "lm_head.weight": random(vocabulary, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape, scale in (
            ("self_attn.q_proj", (query, hidden), 0.2),
            ("self_attn.k_proj", (kv, hidden), 0.2),
            ("self_attn.v_proj", (kv, hidden), 0.3),
            ("self_attn.o_proj", (hidden, query), 0.3),
            ("mlp.gate_proj", (wide, hidden), 0.1),
            ("mlp.up_proj", (wide, hidden), 0.1),
            ("mlp.down_proj", (hidden, wide), 0.1),
        ):
            weights[f"{prefix}{name}.weight"] = random(*shape, scale)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def random_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 for :func:`random_llama`'s attention, in the files that vLLM reads."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rank, hidden = 8, LLAMA["hidden_size"]
    widths = {"q_proj": LLAMA["num_attention_heads"], "v_proj": LLAMA["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, heads in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shape = (heads * LLAMA["head_dim"], rank)
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(*shape, generator=generator) * 0.3
    save_file(weights, str(folder / "adapter_model.safetensors"))
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
