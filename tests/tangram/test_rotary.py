"""Rotations taken from a model's configuration, against what vLLM itself turns queries by."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    SmolLM3Config,
)
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import VllmConfig, set_current_vllm_config

from tangram.errors import UnsupportedError
from tangram.rotary import INTERLEAVED, UNKNOWN, Rotary, find_rotary

CPU = torch.device("cpu")
SIZE, POSITIONS = 16, 4096
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": SIZE}


def find(config: Any, layers: int = 2, size: int = SIZE, limit: int = POSITIONS) -> Rotary | None:
    return find_rotary(config, layers, size, limit, CPU)


def undone(rotary: Rotary, parameters: dict[str, Any], neox: bool, limit: int = POSITIONS) -> torch.Tensor:
    """Queries that vLLM turned and we turned back, divided by what they were: [positions, SIZE]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that vLLM's layers load
        from vllm.model_executor.layers.rotary_embedding import get_rope

        vllm_config: Any = VllmConfig()
        vllm_config.model_config = SimpleNamespace(max_model_len=limit)  # longrope asks for it
        with set_current_vllm_config(vllm_config):
            theirs = get_rope(SIZE, POSITIONS + limit, neox, dict(parameters), torch.float32)
    at = torch.tensor([0, 1, 7, 500, 1234])
    query = torch.rand(5, SIZE, generator=torch.Generator().manual_seed(1)) + 0.5
    turned, _ = getattr(theirs, "forward_native", theirs.forward)(at, query.clone(), query.clone())
    back = rotary.turn(turned[None, None], *rotary.phases(-at, torch.tensor([1])))
    return back[0, 0] / query


@pytest.mark.parametrize("kind", SCALINGS)
def test_it_takes_off_what_vllm_put_on(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    config = LlamaConfig(**SMALL, rope_parameters=rope, max_position_embeddings=2048)
    rotary = find(config)
    assert rotary is not None
    ratio = undone(rotary, config.rope_parameters, neox=True)
    # Some scalings also stretch the vector, all of it by the same factor; that is to stay.
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), atol=2e-3, rtol=0)
    if kind != "yarn":
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-3, rtol=0)


@pytest.mark.parametrize("limit", [512, POSITIONS])
def test_long_and_short_factors_as_the_engine_s_limit_decides(limit: int) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 512,
    }
    sizes = {key: value for key, value in SMALL.items() if key != "head_dim"}
    config = Phi3Config(**sizes, rope_parameters=rope, max_position_embeddings=POSITIONS, pad_token_id=0)
    config.original_max_position_embeddings = 512
    rotary = find(config, limit=limit)
    assert rotary is not None
    ratio = undone(rotary, config.rope_parameters, True, limit)[:3]
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), atol=2e-3, rtol=0)


def test_a_part_of_the_head_and_neighbouring_pairs() -> None:
    half = PhiConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, partial_rotary_factor=0.5)
    rotary = find(half)
    assert rotary is not None
    assert rotary.frequencies.shape == (2, 4)
    ratio = undone(rotary, half.rope_parameters, neox=True)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-3, rtol=0)

    gptj = GPTJConfig(n_embd=64, n_head=4, n_layer=2, rotary_dim=8)
    gptj.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}  # as vLLM completes it
    rotary = find(gptj)
    assert rotary is not None
    ratio = undone(rotary, {**gptj.rope_parameters, "rope_dim": 8}, neox=False)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-3, rtol=0)


def test_layers_without_a_rotation_are_left_alone() -> None:
    config = SmolLM3Config(hidden_size=64, num_attention_heads=4, num_hidden_layers=4, pad_token_id=0)
    config.no_rope_layers = [1, 1, 1, 0]
    rotary = find(config, layers=4)
    assert rotary is not None
    assert rotary.frequencies[3].abs().max() == 0
    assert rotary.frequencies[:3].min() > 0
    assert find(GPT2Config(n_layer=2)) is None


def turning(source: str) -> str:
    """The functions of a transformers model that turn queries."""
    named = "rotate_half|rotate_every_two|_?apply_rotary_(?:pos_)?emb"
    return "".join(re.findall(rf"def (?:{named})\(.*?(?=\n(?:def|class|@)|\Z)", source, re.DOTALL))


def test_models_whose_pairs_are_neighbours_are_known() -> None:
    """Against transformers' own code of every model that writes text."""
    folder = Path(transformers.__file__).parent / "models"
    neighbours, halves = set(), set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        package = folder / model_type_to_module_name(kind)
        path = package / f"modeling_{package.name}.py"
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        if "kv_lora_rank" in source:  # latent attention, which is refused as a whole
            continue
        if "::2]" in turning(source) or "view_as_complex" in source:
            neighbours.add(kind)
        elif turning(source):
            halves.add(kind)
    assert {"glm", "glm4", "helium", "ernie4_5", "gptj"} <= neighbours
    assert {"llama", "qwen2", "gemma3_text", "gpt_neox"} <= halves
    assert neighbours <= INTERLEAVED | UNKNOWN
    assert halves & INTERLEAVED == set()


def test_models_are_built_where_another_device_is_the_default() -> None:
    config = LlamaConfig(**SMALL)
    with torch.device("meta"):
        rotary = find(config)
    assert rotary is not None
    assert rotary.frequencies.isfinite().all()
    assert rotary.frequencies.device == CPU


def test_of_mixed_layers_the_full_attention_ones_count() -> None:
    config = Gemma3TextConfig(**SMALL)
    rotary = find(config)
    assert rotary is not None
    full = config.rope_parameters["full_attention"]
    ratio = undone(rotary, full, neox=True)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-3, rtol=0)
    assert full["rope_theta"] != config.rope_parameters["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        {"rope_type": "llama3", "rope_theta": 1e4},
        {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_what_cannot_be_taken_off_is_refused_with_an_alternative(rope: dict[str, Any]) -> None:
    config = Qwen2Config(**SMALL)
    config.rope_parameters = rope
    with pytest.raises(
        UnsupportedError,
        match=r"is not known, which the scorers expected_attention .*choose another",
    ):
        find(config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    config.no_rope_layers = [1]
    with pytest.raises(UnsupportedError, match="which layers models of type qwen2 rotate"):
        find(config)
    for kind in ("cohere2", "llama4", "codegen"):
        config.model_type = kind
        with pytest.raises(UnsupportedError, match=f"how models of type {kind} rotate"):
            find(config)
    config.rope_parameters = None
    with pytest.raises(UnsupportedError, match="how models of type codegen rotate"):
        find(config)
