"""kvpress on the same prompts: an outside implementation of compressed caches.

It compresses exactly the tokens that our cache has sealed when the question comes, at the same ratio; what
we hold raw it reads behind them uncompressed. So both keep the same number of keys.

kvpress pins versions of its requirements that cannot be had beside vLLM 0.32 (docs/scorers.md), so only
its modules with these methods are loaded, from the installed package or a directory on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

STEP = 64
"""Tokens read at once behind a compressed context, or fewer. Where heads keep different tokens, kvpress looks
for one key that repels all queries of a step; of many queries there may be none."""


def package() -> None:
    """Make kvpress's modules importable without loading its root, which needs packages that are not here.

    Raises:
        RuntimeError: it is not there.
    """
    if "kvpress" in sys.modules:
        return
    found = importlib.machinery.PathFinder.find_spec("kvpress")
    if found is None or found.origin is None:
        raise RuntimeError("kvpress is not installed: make setup, or put its directory on PYTHONPATH")
    root = ModuleType("kvpress")
    root.__path__ = [str(Path(found.origin).parent)]
    sys.modules["kvpress"] = root


def press_of(name: str, ratio: float) -> Any:
    """A press that removes the share ``ratio``; ``AdaKV-X`` is X's scores with AdaKV's budgets of heads."""

    def found(one: str) -> Any:
        module = {"KVzip": "kvzip", "KeyDiff": "keydiff", "SnapKV": "snapkv", "AdaKV": "adakv"}[one]
        return getattr(importlib.import_module(f"kvpress.presses.{module}_press"), f"{one}Press")

    package()
    adaptive, _, score = name.rpartition("-")
    press = found(score)(compression_ratio=ratio)
    return found(adaptive)(press) if adaptive else press


def load(model: str, device: str, dtype: str) -> Any:
    """The model, with attention that leaves out what a press masks."""
    from transformers import AutoModelForCausalLM

    package()
    importlib.import_module("kvpress.attention_patch").patch_attention_functions()
    kind = getattr(torch, dtype)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=kind, attn_implementation="sdpa")
    return whole.to(device).eval()


@contextmanager
def _positions_told(model: Any) -> Iterator[None]:
    """kvpress asks each layer for ``cache_position``, which transformers has since 5.3 no longer."""

    def add(module: Any, _: Any, named: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        states, cache = named["hidden_states"], named["past_key_values"]
        before = cache.get_seq_length(module.layer_idx)
        at = torch.arange(before, before + states.shape[1], device=states.device)
        return (), {**named, "cache_position": at}

    with ExitStack() as hooks:
        for layer in model.model.layers:
            hook = layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
            hooks.callback(hook.remove)
        yield


class Pressed:
    """A context, compressed by a press, and what follows it."""

    def __init__(self, model: Any, press: Any, context: Sequence[int]) -> None:
        from transformers import DynamicCache

        self.model, self.length = model, len(context)
        self.cache = DynamicCache()
        with torch.inference_mode(), _positions_told(model):
            if press is None:
                self._whole(context)
                return
            with press(model):
                self._whole(context)

    def _whole(self, context: Sequence[int]) -> None:
        self.model.model(input_ids=self._ids(context), past_key_values=self.cache)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(tokens)], dtype=torch.long, device=self.model.device)

    def answer(self, prompt: Sequence[int], stops: Sequence[int], most: int) -> list[int]:
        """The greedy continuation behind the context and ``prompt``, without the token that ends it."""
        said: list[int] = []
        for start in range(0, len(prompt), STEP):
            token = self._read(prompt[start : start + STEP])
        while token not in stops:
            said.append(token)
            if len(said) == most:
                break
            token = self._read([token])
        return said

    def _read(self, tokens: Sequence[int]) -> int:
        """The likeliest next token; in halves where kvpress finds no key for all queries."""
        before = [layer.get_seq_length() for layer in self.cache.layers]
        try:
            return self._step(tokens)
        except ValueError:
            if len(tokens) == 1:
                raise
        # Some layers have the step's keys already.
        for layer, length in zip(self.cache.layers, before, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        half = len(tokens) // 2
        self._read(tokens[:half])
        return self._read(tokens[half:])

    def _step(self, tokens: Sequence[int]) -> int:
        """The likeliest next token. Positions count all tokens, those removed too."""
        at = torch.arange(self.length, self.length + len(tokens), device=self.model.device)[None]
        with torch.inference_mode():
            out = self.model(
                input_ids=self._ids(tokens), past_key_values=self.cache, position_ids=at, logits_to_keep=1
            )
        self.length += len(tokens)
        return int(out.logits[0, -1].argmax())
