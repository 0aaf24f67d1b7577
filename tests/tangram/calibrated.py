"""Small calibrations for tests: models of random weights, and profiles that need no model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tangram.calibration.statistics import mean_and_std
from tangram.identity import ModelIdentity
from tangram.profile import Profile
from tangram.profile_file import KEY_SCORER, KEY_SHARE, Calibration, KeyNeeds, Target, as_matrix

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
IDENTITY = ModelIdentity(
    name="m",
    architecture="LlamaForCausalLM",
    layers=4,
    kv_heads=3,
    head_size=64,
    dtype="bfloat16",
    itemsize=2,
    max_model_len=8192,
    config_hash="c" * 32,
    weights_hash="w" * 32,
    tokenizer="T",
    tokenizer_hash="t" * 32,
)
SETTINGS = {"oracle": "kvzip", "scope": "model", "retention": 0.25, "alpha": 1.0, "length": 2048, "seed": 0}
SETTINGS |= {"data": "builtin", "dtype": "float32", "window": 128, "sink": 4}


def random_model(kind: str, folder: Path, tokenizer: Path) -> Path:
    """A directory with a model of random float32 weights: gemma2 (sliding windows, capped scores) or gpt_oss
    (sliding windows, attention sinks)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    common: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 48,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    own: dict[str, Any] = {
        "gemma2": {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
        "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    }[kind]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(kind, **common | own)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


def made_profile(samples: int = 8, seed: int = 0, identity: ModelIdentity = IDENTITY) -> Profile:
    """A calibrated profile of invented needs: heads differ much, samples little."""
    draw = np.random.default_rng(seed)
    heads = draw.uniform(0.02, 0.9, size=(identity.layers, identity.kv_heads))
    needs = np.clip(heads + draw.normal(0, 0.03, size=(samples, *heads.shape)), 0, 1).round(5)
    mean, std = mean_and_std(needs)
    known = Calibration(
        model=identity,
        settings=dict(SETTINGS),
        samples=samples,
        samples_hash="s" * 32,
        created="2026-01-01T00:00:00+00:00",
        tool="0",
        least=as_matrix(needs.min(axis=0)),
        most=as_matrix(needs.max(axis=0)),
        needs=tuple(as_matrix(one) for one in needs),
    )
    return Profile(as_matrix(mean), as_matrix(std), source="made", calibration=known)


def key_needs_of(profile: Profile, seed: int = 5) -> Profile:
    """The profile with invented needs by keys."""
    known = profile.calibration
    assert known is not None
    draw = np.random.default_rng(seed)
    heads = draw.uniform(0.2, 0.8, size=(known.model.layers, known.model.kv_heads))
    needs = np.clip(heads + draw.normal(0, 0.03, size=(known.samples, *heads.shape)), 0, 1).round(5)
    keys = KeyNeeds(KEY_SCORER, KEY_SHARE, tuple(as_matrix(one) for one in needs))
    return replace(profile, calibration=replace(known, key_needs=keys))


def mean_queries_of(profile: Profile, seed: int = 7) -> Profile:
    """The profile with invented mean queries."""
    known = profile.calibration
    assert known is not None
    model = known.model
    drawn = np.random.default_rng(seed).normal(size=(model.layers, model.kv_heads, model.head_size))
    means = tuple(as_matrix(layer) for layer in drawn.round(3).tolist())
    return replace(profile, calibration=replace(known, mean_queries=means))


def also_at(profile: Profile, retention: float, seed: int = 9) -> Profile:
    """The profile with invented needs at a further retention."""
    known = profile.calibration
    assert known is not None
    other = made_profile(known.samples, seed).calibration
    assert other is not None
    mean, std = mean_and_std(np.array(other.needs))
    target = Target(retention, as_matrix(mean), as_matrix(std), other.least, other.most, other.needs)
    return replace(profile, calibration=replace(known, others=(*known.others, target)))
