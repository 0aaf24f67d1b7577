"""Whether a model fits the memory beside an engine, and in what type it does. Asked before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.errors import ConfigError
from tangram.host import GIB, available_memory
from tangram.hub import local_path

SPARE = 0.8
"""Of the memory that is free, what may be taken: the engine and the app go on growing."""
BESIDE = GIB
"""Bytes beside the weights: Python and torch, the cache of a passage, and logits."""
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def compute_type(model: str, device: str, dtype: str) -> str:
    """The type to compute in: on a CPU ``auto`` is float32 where that fits, else the model's own type.

    Raises:
        ConfigError: neither fits the memory that is free.
    """
    if device == "cuda":
        return dtype
    weights = _weights(model)
    if weights is None:
        return dtype
    stored, size = weights
    room = int(available_memory() * SPARE)
    tried = ["float32", stored] if dtype == "auto" else [dtype]
    needed = {kind: size * SIZES[kind] // SIZES.get(stored, 4) + BESIDE for kind in tried if kind in SIZES}
    fitting = [kind for kind, bytes_ in needed.items() if bytes_ <= room]
    if needed and not fitting:
        raise ConfigError(
            "MODEL",
            f"{model} needs about {min(needed.values()) / GIB:.1f} GiB of memory to be read beside the "
            f"engine, and {room / GIB:.1f} GiB can be taken: free some, or try it where no engine runs",
        )
    return fitting[0] if fitting else dtype


def _weights(model: str) -> tuple[str, int] | None:
    """The stored type and the bytes of a model's safetensors files; None where none are on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    folder = Path(local_path(model))
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    files = list(folder.glob("*.safetensors"))
    if not files:
        return None

    config: Any = AutoConfig.from_pretrained(folder)
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    kind = str(stored).removeprefix("torch.") if stored is not None else "float32"
    return kind, sum(file.stat().st_size for file in files)
