"""Fixtures that several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app import bundled_model


@pytest.fixture(scope="session")
def bundled_model_dir() -> Path:
    """The bundled model, prepared once and kept between runs."""
    default = Path("~/.cache/tangram-chat-tests").expanduser()
    return bundled_model.prepare(Path(os.environ.get("TANGRAM_TEST_MODELS") or default), print)
