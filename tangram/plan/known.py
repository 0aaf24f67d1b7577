"""Configurations of common models, so that a plan needs no network: only what the cache and the weights take.

Names and values as in the models' own config.json files.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _dense(
    kind: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
    length: int,
    **more: Any,
) -> Config:
    """heads: (query heads, KV heads) of a layer."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        **more,
    }


_TIED = {"tie_word_embeddings": True}
_HEAD = {"head_dim": 128}

KNOWN: dict[str, Config] = {
    "Qwen/Qwen3-0.6B": _dense("qwen3", 1024, 3072, 28, (16, 8), 151936, 40960, **_HEAD, **_TIED),
    "Qwen/Qwen3-1.7B": _dense("qwen3", 2048, 6144, 28, (16, 8), 151936, 40960, **_HEAD, **_TIED),
    "Qwen/Qwen3-4B-Instruct-2507": _dense("qwen3", 2560, 9728, 36, (32, 8), 151936, 262144, **_HEAD, **_TIED),
    "Qwen/Qwen3-8B": _dense("qwen3", 4096, 12288, 36, (32, 8), 151936, 40960, **_HEAD),
    "Qwen/Qwen3-14B": _dense("qwen3", 5120, 17408, 40, (40, 8), 151936, 40960, **_HEAD),
    "Qwen/Qwen3-32B": _dense("qwen3", 5120, 25600, 64, (64, 8), 151936, 40960, **_HEAD),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _dense(
        "qwen3_moe",
        2048,
        6144,
        48,
        (32, 4),
        151936,
        262144,
        **_HEAD,
        num_experts=128,
        moe_intermediate_size=768,
    ),
    "Qwen/Qwen2.5-7B-Instruct": _dense("qwen2", 3584, 18944, 28, (28, 4), 152064, 32768),
    "meta-llama/Llama-3.1-8B-Instruct": _dense("llama", 4096, 14336, 32, (32, 8), 128256, 131072),
    "meta-llama/Llama-3.2-1B-Instruct": _dense("llama", 2048, 8192, 16, (32, 8), 128256, 131072, **_TIED),
    "meta-llama/Llama-3.2-3B-Instruct": _dense("llama", 3072, 8192, 28, (24, 8), 128256, 131072, **_TIED),
    "mistralai/Mistral-7B-Instruct-v0.3": _dense("mistral", 4096, 14336, 32, (32, 8), 32768, 32768),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _dense("llama", 576, 1536, 30, (9, 3), 49152, 8192, **_TIED),
}
