"""A model's name, looked at before vLLM asks a hub for it again and again.

Without a network vLLM needs more than a minute to find out that a name is neither a directory nor a model
that was downloaded before. Here it takes one question.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import httpx

from tangram.errors import ConfigError, Unreachable

CONFIGURATIONS = ("config.json", "params.json")
"""Of these one is in every model directory, and so in the cache of every model that was downloaded."""
TIMEOUT_SECONDS = 5.0


def local_path(model: str) -> str:
    """The name as vLLM is to get it: ``~`` expanded. Raises ConfigError for a path without a directory."""
    path = Path(model).expanduser() if model.startswith("~") else Path(model)
    if model.startswith(("/", ".", "~")):
        if not path.is_dir():
            raise ConfigError("MODEL", f"there is no directory {path}")
        return str(path)
    return model


def check_reachable(model: str, revision: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when the model is no directory, was never downloaded, and no hub may be asked;
    Unreachable when the hub does not answer.

    Whether a hub that answers has it is left to vLLM, which knows more kinds of names.

    Args:
        model: as given to vLLM.
        revision: the branch or commit that was asked for.
    """
    # Comes with vLLM, which the caller may have to say is missing.
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    elsewhere = environment.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    if elsewhere or "://" in model or Path(model).exists():
        return
    try:
        if any(
            isinstance(try_to_load_from_cache(model.split(":")[0], name, revision=revision), str)
            for name in CONFIGURATIONS
        ):
            return
    except HFValidationError:  # no name of the hub's, but perhaps one of a kind that vLLM knows
        return
    if constants.is_offline_mode():
        raise ConfigError("MODEL", sentence(model, "it was not downloaded before, and HF_HUB_OFFLINE is set"))
    try:
        httpx.head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except httpx.TransportError as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise Unreachable("MODEL", sentence(model, f"{constants.ENDPOINT} does not answer ({why})")) from None


def not_a_model(model: str, error: Exception) -> str:
    """The sentence for what vLLM raised because the hub gave no such model, "" for any other error."""
    from huggingface_hub.errors import HFValidationError

    if not isinstance(error, OSError | HFValidationError) or Path(model).exists():
        return ""
    return f"MODEL: {sentence(model, ' '.join(str(error).split()))}"


def sentence(model: str, why: str) -> str:
    """What the user reads."""
    return f"{model} is neither a directory nor a model that the hub gives us: {why}"
