"""Random models of a few hundred thousand weights, of architectures with sliding-window layers.

Their windows are shorter than the tests' prompts, and their weights such that an answer depends on the whole
prompt and does not fall into repeating one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WINDOW = 64
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save(model_class: Any, config: Any, target: Path) -> str:
    """Write a model with reproducible weights; returns its directory."""
    torch.manual_seed(2606)
    model = model_class(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(0.0, 2.0)
            elif "embed_tokens" in name and config.tie_word_embeddings:
                weight.mul_(0.1)  # or the model says again and again what it read last
    model.save_pretrained(target)
    return str(target)


def gemma3(target: Path) -> str:
    """Two window layers to one full, as in Gemma-3 but for the numbers; the window layers have RoPE of their
    own."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    own = {"num_hidden_layers": 6, "layer_types": types, "query_pre_attn_scalar": 16}
    own["tie_word_embeddings"] = False
    return save(Gemma3ForCausalLM, Gemma3TextConfig(**COMMON, **own, sliding_window=WINDOW), target)


def gemma2(target: Path) -> str:
    """Every other layer, and soft-capped attention scores."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    own = {"num_hidden_layers": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.5}
    return save(Gemma2ForCausalLM, Gemma2Config(**COMMON, **own, sliding_window=WINDOW), target)


def gpt_oss(target: Path) -> str:
    """Every other layer, attention sinks in all of them, and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    own = {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    return save(GptOssForCausalLM, GptOssConfig(**COMMON, **own, sliding_window=WINDOW), target)
