"""Questions to the host. Tests put others in their place."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from db.postgres.probe import why_unusable
from db.postgres.url import PostgresUrl
from tangram.host import available_memory, cpu_cache_bytes

_QUERY = "index,name,memory.total,memory.free,compute_cap,driver_version,uuid"
_MIB = 1 << 20
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it; memory in bytes, 0 where the driver does not tell."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    driver: str
    uuid: str = ""


@dataclass(frozen=True)
class HubAnswer:
    """What the hub says of a model.

    state: "ok", "gated", "missing", or "unreachable", which also stands for any other failure.
    clock: the hub's time in Unix seconds, None where it did not say.
    """

    state: str
    clock: float | None = None


class Host:
    """This machine."""

    def gpus(self) -> list[Gpu]:
        """Those that are visible here; empty where there is no driver."""
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
            return [_gpu(line) for line in done.stdout.splitlines() if line.strip()]
        except (OSError, subprocess.SubprocessError, ValueError):
            return []

    def write_error(self, folder: Path) -> tuple[int, str]:
        """Number and name of why nothing can be written there; 0 and "" if it can."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            return error.errno or -1, error.strerror or str(error)
        return 0, ""

    def port_error(self, port: int) -> str:
        """Why nothing can listen on a port of all addresses, "" if it can."""
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        return ""

    def has_library(self, name: str) -> bool:
        """Whether the system's loader finds a shared library."""
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    def memory(self) -> tuple[int, int]:
        """Bytes that are free for programs, and of those what an engine on the CPU takes for its cache."""
        return available_memory(), cpu_cache_bytes()

    def user(self) -> int:
        """The user's number."""
        return os.getuid()

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def last_write(self, path: Path) -> float:
        """When a file was last written, 0 where there is none."""
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    def database_error(self, url: PostgresUrl) -> str:
        """Why a PostgreSQL database cannot be used, "" if it can."""
        return why_unusable(url)

    def downloaded(self, model: str) -> bool:
        """Whether a hub's model was downloaded before, as far as its configuration tells."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            return isinstance(try_to_load_from_cache(model, "config.json"), str)
        except HFValidationError:
            return False

    def hub(self, model: str) -> HubAnswer:
        """Ask the hub, with the token of the environment, whether the model may be downloaded."""
        from huggingface_hub import constants, get_token, hf_hub_url

        if constants.is_offline_mode():
            return HubAnswer("unreachable")
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            answer = httpx.head(hf_hub_url(model, "config.json"), headers=headers, timeout=TIMEOUT_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL):
            return HubAnswer("unreachable")
        clock = _clock(answer.headers.get("date", ""))
        if answer.headers.get("x-error-code") == "GatedRepo":
            return HubAnswer("gated", clock)
        # The hub says 401 for what is not there too, so as not to tell what is private.
        if answer.status_code in (401, 403, 404):
            return HubAnswer("missing", clock)
        return HubAnswer("ok" if answer.status_code < 400 else "unreachable", clock)


def _clock(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def _gpu(line: str) -> Gpu:
    index, name, total, free, capability, driver, uuid = (part.strip() for part in line.split(","))
    major, _, minor = capability.partition(".")
    return Gpu(int(index), name, _bytes(total), _bytes(free), (int(major), int(minor)), driver, uuid)


def _bytes(mib: str) -> int:
    """A card that shares the host's memory says [N/A]."""
    return int(mib) * _MIB if mib.isdigit() else 0
