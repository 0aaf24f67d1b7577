"""What a plan must know of a model, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tangram.errors import ConfigError
from tangram.hub import check_reachable, local_path, sentence
from tangram.layers import layer_kinds
from tangram.plan.known import KNOWN
from tangram.profile import ModelShape

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
BITS = {"fp8": 8, "compressed-tensors": 8, "mxfp4": 4.25, "awq": 4.5, "gptq": 4.5}
"""Bits of a quantised weight with its scales, where the configuration names no number of them."""


@dataclass(frozen=True)
class ModelFacts:
    """A model.

    Attributes:
        shape: as the cache takes it.
        weight_bytes: of the weights on all GPUs.
        measured: whether these were read off files; otherwise they are counted from the configuration.
        hidden, inner, vocab: width of a token's vector, of the feed-forward layers, and of the scores.
    """

    shape: ModelShape
    weight_bytes: int
    measured: bool
    hidden: int
    inner: int
    vocab: int


def read_facts(model: str, dtype: str = "auto", ranks: int = 1) -> ModelFacts:
    """Facts of a directory with a config.json, of such a file, of a model that is known here, or of a hub id.

    Args:
        ranks: GPUs of tensor parallelism.

    Raises:
        ConfigError: there is no such model, its configuration lacks what a plan needs, or so many GPUs cannot
            share its heads.
        UnsupportedError: the ragged cache cannot serve it.
    """
    if dtype != "auto" and dtype not in ITEMSIZES:
        raise ConfigError("--dtype", f"must be auto or one of {', '.join(ITEMSIZES)}, not {dtype!r}")
    path = Path(model).expanduser()
    folder = None
    if path.is_file():
        config = _load(path)
    elif path.is_dir():
        config, folder = _load(path / "config.json"), path
    elif model in KNOWN:
        config = KNOWN[model]
    else:
        config = _from_hub(local_path(model))
    found = facts_of(config, model, dtype, folder)
    if ranks < 1 or found.shape.kv_heads % ranks:
        raise ConfigError(
            "--tensor-parallel-size",
            f"must divide the {found.shape.kv_heads} KV heads of the model's layers, not {ranks}",
        )
    return replace(found, shape=replace(found.shape, ranks=ranks))


def facts_of(
    config: Mapping[str, Any], name: str, dtype: str = "auto", folder: Path | None = None
) -> ModelFacts:
    """Facts of a configuration. ``folder``: where the weights lie, if they are here."""
    text = _expanded(config.get("text_config") or config, name)
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
        head_size = int(text.get("head_dim") or hidden // heads)
        length = int(text["max_position_embeddings"])
        inner = int(text.get("intermediate_size") or text["moe_intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "--model", f"the configuration of {name} lacks {error}: it cannot be planned"
        ) from None
    kinds = layer_kinds(SimpleNamespace(**text), layers)
    chosen = "bfloat16" if dtype == "auto" else dtype
    itemsize = ITEMSIZES[chosen]
    state = kv_heads * 2 * head_size * itemsize if kinds.window else 0
    shape = ModelShape(
        name=name,
        layers=len(kinds.full),
        kv_heads=kv_heads,
        head_size=head_size,
        itemsize=itemsize,
        dtype=chosen,
        max_model_len=length,
        full_layers=kinds.full if kinds.window else (),
        window_layers=kinds.window,
        window_span=kinds.span,
        window_state_bytes=state,
        window_blocks=(16,) if kinds.window else (),
    )
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder else 0
    weights = files or int(parameters(text) * _bits(config, chosen) / 8)
    return ModelFacts(shape, weights, bool(files), hidden, inner, vocab)


def parameters(text: Mapping[str, Any]) -> int:
    """Weights of a decoder with gated feed-forward layers, norms left out.

    Args:
        text: the (text part of the) configuration.
    """
    hidden, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    size = text.get("head_dim") or hidden // heads
    kv = text.get("num_key_value_heads") or heads
    attention = 2 * hidden * heads * size + 2 * hidden * kv * size
    experts = text.get("num_local_experts") or text.get("num_experts") or 0
    if experts:
        inner = text.get("moe_intermediate_size") or text["intermediate_size"]
        feed = experts * 3 * hidden * inner + hidden * experts
    else:
        feed = 3 * hidden * text["intermediate_size"]
    tables = 1 if text.get("tie_word_embeddings", True) else 2
    return int(layers * (attention + feed) + tables * text["vocab_size"] * hidden)


def _bits(config: Mapping[str, Any], dtype: str) -> float:
    quantised = config.get("quantization_config")
    if not quantised:
        return 8.0 * ITEMSIZES[dtype]
    bits = quantised.get("bits") or BITS.get(str(quantised.get("quant_method")))
    if bits is None:
        method = quantised.get("quant_method")
        raise ConfigError("--weights-gib", f"is needed: what {method!r} weights take is not known here")
    return float(bits)


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--model", f"{path} is not a model's configuration: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("--model", f"{path} is not a model's configuration: not a JSON object")
    return found


def _from_hub(model: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    check_reachable(model, None)
    try:
        return _load(Path(hf_hub_download(model, "config.json")))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError("--model", sentence(model, " ".join(str(error).split())[:300])) from None


def _expanded(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """With ``layer_types`` where some layers see a window only, which old configurations leave to code."""
    found = dict(text)
    if found.get("use_sliding_window") is False:
        found["sliding_window"] = None
    window = found.get("sliding_window")
    tied = "tie_word_embeddings" not in found
    if not (window and not found.get("layer_types")) and not (tied and found.get("model_type")):
        return found
    from transformers import AutoConfig  # takes seconds, so only where it is needed

    try:
        whole = AutoConfig.for_model(**found).get_text_config()
    except (ValueError, TypeError, KeyError) as error:
        if window:
            raise ConfigError("--model", f"the layers of {name} are not known here: {error}") from None
        return found
    return {**whole.to_dict(), **{key: value for key, value in found.items() if value is not None}}
