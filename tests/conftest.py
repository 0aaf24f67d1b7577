"""Fixtures that several folders share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

from app import bundled_model
from tests import leftovers
from tests.postgres_server import postgres_server
from tests.workers import (
    pytest_collection_modifyitems,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    pytest_xdist_setupnodes,
)

__all__ = [
    "postgres_server",
    "pytest_collection_modifyitems",
    "pytest_xdist_auto_num_workers",
    "pytest_xdist_make_scheduler",
    "pytest_xdist_setupnodes",
]

# Timings are not what hypotheses are about, and the machines that run the tests are shared.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

WATCHER = pytest.StashKey[tuple["subprocess.Popen[bytes]", str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[WATCHER] = leftovers.watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    if WATCHER in config.stash:
        watcher, mark = config.stash[WATCHER]
        leftovers.end_all(mark)
        watcher.kill()
        watcher.wait()


@pytest.fixture(scope="session")
def bundled_model_dir() -> Path:
    """The bundled model, prepared once and kept between runs."""
    default = Path("~/.cache/tangram-chat-tests").expanduser()
    return bundled_model.prepare(Path(os.environ.get("TANGRAM_TEST_MODELS") or default), print)
