"""The model that is calibrated, loaded with transformers so that its attention can be watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tangram.calibration.attention import NAME, Watcher, register, watched_by
from tangram.errors import ConfigError, UnsupportedError
from tangram.hub import check_reachable, local_path
from tangram.identity import (
    ModelIdentity,
    config_fingerprint,
    vocabulary_fingerprint,
    weights_fingerprint,
)
from tangram.layers import LayerKinds, layer_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_STEP = 1024
"""Tokens of a forward pass."""


@dataclass(frozen=True)
class Reader:
    """A model that reads tokens.

    Attributes:
        decoder: the model without its output layer, whose logits nobody wants.
        kinds: which of its layers attend to everything, and so are calibrated.
    """

    decoder: Any
    tokenizer: Any
    text_config: Any
    identity: ModelIdentity
    kinds: LayerKinds
    device: torch.device

    def new_cache(self) -> Any:
        """An empty cache of keys and values."""
        from transformers import DynamicCache

        return DynamicCache(config=self.text_config)

    def read(self, tokens: Sequence[int], cache: Any, watcher: Watcher, ends: Sequence[int] = ()) -> None:
        """Run the model over tokens, behind those that the cache holds already, in steps.

        Args:
            ends: rising positions in ``tokens`` at which a step must end.
        """
        start = 0
        for end in [*(e for e in ends if e < len(tokens)), len(tokens)]:
            while start < end:
                step = tokens[start : min(end, start + READ_STEP)]
                ids = torch.tensor([step], dtype=torch.long, device=self.device)
                with torch.inference_mode(), watched_by(watcher):
                    self.decoder(input_ids=ids, past_key_values=cache, use_cache=True)
                start += len(step)

    def keys(self, cache: Any, layer: int) -> torch.Tensor:
        """[kv_heads, tokens, head_size] of a layer that attends to everything."""
        return cache.layers[layer].keys[0]

    def values(self, cache: Any, layer: int) -> torch.Tensor:
        """As :meth:`keys`."""
        return cache.layers[layer].values[0]


def branch(cache: Any) -> Any:
    """A cache that continues this one and leaves it as it is. Layers grow by making new tensors, so those
    that are there already can be shared."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    return other


class OutputLayer:
    """From states [tokens, hidden_size] to logits [tokens, vocabulary], bent and scaled as the model does."""

    def __init__(self, head: Any, text_config: Any) -> None:
        self._head = head
        self._cap = getattr(text_config, "final_logit_softcapping", None)
        self._scale = (getattr(text_config, "logit_scale", None) or 1.0) / (
            getattr(text_config, "logits_scaling", None) or 1.0
        )

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(states) * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


def load(
    model: str,
    device: str = "auto",
    dtype: str = "auto",
    accept: Callable[[ModelIdentity], None] = lambda _: None,
) -> Reader:
    """:func:`load_whole` without the output layer.

    Args:
        accept: is asked before the weights are loaded, and raises for a model that is not wanted.
    """
    return _load(model, device, dtype, accept)[0]


def load_whole(model: str, device: str = "auto", dtype: str = "auto") -> tuple[Reader, OutputLayer]:
    """Load a model and its tokenizer.

    Args:
        model: a directory or a hub id.
        device: ``cpu``, ``cuda``, or ``auto``: a GPU if there is one.
        dtype: of the computation; ``auto`` is float32 on a CPU and the model's own type on a GPU.

    Raises:
        ConfigError: it cannot be found or read.
        UnsupportedError: it is of a kind that cannot be calibrated.
    """
    reader, head = _load(model, device, dtype)
    return reader, OutputLayer(head.to(reader.device), reader.text_config)


def _load(
    model: str, device: str, dtype: str, accept: Callable[[ModelIdentity], None] = lambda _: None
) -> tuple[Reader, Any]:
    model = local_path(model)
    check_reachable(model, None)
    where = torch.device(_device(device))
    register()
    config, tokenizer = _configuration(model)
    text_config = config.get_text_config()
    stored = getattr(config, "dtype", None) or getattr(text_config, "dtype", None) or torch.float32
    kind = {"auto": torch.float32 if where.type == "cpu" else stored}.get(dtype)
    identity, kinds = _identify(model, config, tokenizer, stored)
    accept(identity)
    with _quiet():
        whole = _load_model(model, config, getattr(torch, dtype) if kind is None else kind)
    decoder = whole.eval().get_decoder().to(where)
    reader = Reader(decoder, tokenizer, text_config, identity, kinds, where)
    return reader, whole.get_output_embeddings()


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "must be cpu: torch finds no CUDA GPU here")
    return asked


def _configuration(model: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("MODEL", f"{model} cannot be read: {_line(error)}") from None


def _load_model(model: str, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            model, config=config, dtype=dtype, attn_implementation=NAME
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError("MODEL", f"{model} cannot be loaded: {_line(error)}") from None


def _identify(
    model: str, config: Any, tokenizer: Any, stored: torch.dtype
) -> tuple[ModelIdentity, LayerKinds]:
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    query_heads = getattr(text, "num_attention_heads", None)
    if config.is_encoder_decoder or not layers or not query_heads or getattr(text, "kv_lora_rank", None):
        raise UnsupportedError(
            f"{model} ({text.model_type}) cannot be calibrated: it is no decoder with keys and values a head"
        )
    kinds = layer_kinds(text, layers)
    identity = ModelIdentity(
        name=Path(model).name if Path(model).is_dir() else model,
        architecture=(config.architectures or [type(config).__name__])[0],
        layers=len(kinds.full),
        kv_heads=getattr(text, "num_key_value_heads", None) or query_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // query_heads,
        dtype=str(stored).removeprefix("torch."),
        itemsize=stored.itemsize,
        max_model_len=text.max_position_embeddings,
        config_hash=config_fingerprint(text),
        weights_hash=weights_fingerprint(model),
        tokenizer=type(tokenizer).__name__,
        tokenizer_hash=vocabulary_fingerprint(tokenizer.get_vocab()),
        window_layers=kinds.window,
        window_span=kinds.span,
    )
    return identity, kinds


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars: progress is told a sample at a time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def check_watched(reader: Reader, seen: dict[int, int]) -> None:
    """Raise UnsupportedError unless attention was watched in every layer that is calibrated.

    Args:
        seen: KV heads by layer.
    """
    for layer in reader.kinds.full:
        if seen.get(layer) != reader.identity.kv_heads:
            raise UnsupportedError(
                f"{reader.identity.architecture} cannot be calibrated: its layer {layer} was expected to "
                f"attend with {reader.identity.kv_heads} KV heads through transformers' AttentionInterface, "
                f"and attended with {seen.get(layer, 0)}"
            )
