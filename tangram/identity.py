"""Which model a profile was made for: enough to notice that it is not the one that is served.

Two fingerprints: of the configuration's values that give the model its shape, which every way of loading it
agrees on, and of a few pieces of its weight files, which are read without loading the model.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tangram.errors import ProfileError

SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
TENSORS = 16
PIECE_BYTES = 4096
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
HEADER_LIMIT = 100_000_000
"""Bytes; the file format allows no longer header."""


@dataclass(frozen=True)
class ModelIdentity:
    """A model as a profile knows it.

    Attributes:
        name: as it was given, without its folder.
        architecture: the class that its configuration names.
        layers: those that attend to everything; the profile is about these.
        window_layers, window_span: sliding-window layers beside them, and the tokens that such a layer sees.
        itemsize: bytes of an element in the type that the model is stored in, which ``dtype`` names.
        config_hash: see :func:`config_fingerprint`.
        weights_hash: see :func:`weights_fingerprint`; None where there are no safetensors files.
        tokenizer: its class; ``tokenizer_hash`` is of its vocabulary.
    """

    name: str
    architecture: str
    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    itemsize: int
    max_model_len: int
    config_hash: str
    weights_hash: str | None
    tokenizer: str
    tokenizer_hash: str
    window_layers: int = 0
    window_span: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> ModelIdentity:
        """Read what :meth:`to_dict` gave. Raises ValueError, with what is wrong, for anything else."""
        if not isinstance(data, dict) or set(data) != set(cls.__dataclass_fields__):
            raise ValueError("'model' must have exactly the fields " + ", ".join(cls.__dataclass_fields__))
        for name, field in cls.__dataclass_fields__.items():
            value = data[name]
            if field.type == "int":
                right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            else:
                right = isinstance(value, str) or (field.type == "str | None" and value is None)
            if not right:
                raise ValueError(f"'model.{name}' is {value!r}")
        return cls(**data)

    def refuse_other(self, path: str, config_hash: str | None, weights_hash: str | None) -> None:
        """Raise ProfileError unless the fingerprints are this model's; None is not compared.

        Args:
            path: the profile's file, for the sentence.
        """
        if config_hash not in (None, self.config_hash):
            raise ProfileError(
                f"profile {path} is for another model: it was calibrated on {self.name} "
                f"({self.architecture}), which has another shape; calibrate this one"
            )
        if self.weights_hash is not None and weights_hash not in (None, self.weights_hash):
            raise ProfileError(
                f"profile {path} is for another model: it was calibrated on {self.name}, which has the same "
                "shape but other weights; calibrate this one"
            )


def config_fingerprint(text_config: Any) -> str:
    """Of the (text part of the) model's Hugging Face configuration: what decides the model's shape and is
    the same whoever read the file."""
    values = {name: getattr(text_config, name, None) for name in SHAPE_FIELDS}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def vocabulary_fingerprint(vocabulary: dict[str, int]) -> str:
    """Of a tokenizer's words and their ids."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:32]


def weights_fingerprint(model: str, revision: str | None = None) -> str | None:
    """Of the first bytes of some tensors, evenly chosen from all by name.

    Reads at most 64 KiB of weights. None where the model's safetensors files are not on this machine.

    Args:
        model: a directory or a hub id.
        revision: of the hub's model.
    """
    try:
        return _weights_fingerprint(model, revision)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whoever loads it says what is wrong
        return None


def _weights_fingerprint(model: str, revision: str | None) -> str | None:
    index = _local(model, INDEX, revision)
    if index is None:
        whole = _local(model, WHOLE, revision)
        return None if whole is None else _digest(dict.fromkeys(_header(whole)[0], whole))
    files: dict[str, Path] = {}
    for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
        found = _local(model, file, revision)
        if found is None:
            return None
        files[name] = found
    return _digest(files)


def _local(model: str, file: str, revision: str | None) -> Path | None:
    path = Path(model)
    if path.is_dir():
        return path / file if (path / file).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, file, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors that a safetensors file names, and where their bytes begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_LIMIT:
            raise ValueError("no safetensors file")
        tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def _digest(files: dict[str, Path]) -> str:
    names = sorted(files)
    chosen = names[:: math.ceil(len(names) / TENSORS)]
    headers = {path: _header(path) for path in {files[name] for name in chosen}}
    digest = hashlib.sha256()
    for name in chosen:
        tensors, start = headers[files[name]]
        about = tensors[name]
        begin, end = about["data_offsets"]
        digest.update(json.dumps([name, about["dtype"], about["shape"]]).encode())
        with files[name].open("rb") as file:
            digest.update(_piece(file, start + begin, end - begin))
    return digest.hexdigest()[:32]


def _piece(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(min(PIECE_BYTES, length))
