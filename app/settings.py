"""Settings of the app, read from the environment once at start."""

from __future__ import annotations

import ipaddress
import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.redaction import is_placeholder
from app.sampling import BUNDLED_MAX_TOKENS, DEFAULT_MAX_TOKENS
from db.errors import InvalidInput
from db.postgres.url import PostgresUrl, parse_url

DEFAULT_HOME = Path("~/.local/share/tangram-chat")
MIN_SECRET = 16


class Settings(BaseSettings):
    """Each field is the environment variable of the same name with TANGRAM_ in front, save MODEL.

    The engine's own options (TANGRAM_RETENTION, TANGRAM_CHUNK, ...) are read by the engine process.
    """

    model_config = SettingsConfigDict(
        env_prefix="TANGRAM_", populate_by_name=True, frozen=True, extra="ignore"
    )

    home: Path = DEFAULT_HOME
    """Where the model, the database, backups and logs live."""

    database_url: str = Field(default="", repr=False)
    """A PostgreSQL database to keep everything in that SQLite keeps in `home` otherwise; empty: SQLite."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)

    model: str = Field(default="", validation_alias="MODEL")
    """Path or hub id of the model; empty: the bundled one."""

    engine_args: str = ""
    """Further vLLM options for the engine's command line, quoted as in a shell."""

    data_parallel_size: int = Field(default=1, ge=1, le=64)
    """GPUs of this host over which the engine spreads the conversations, each with the whole model."""

    engine_url: str = ""
    """Use the engine that runs at this address instead of starting one."""

    engine_api_key: str = Field(default="", repr=False)
    """Key of the engine at `engine_url`, when it wants one."""

    engine_command: str = ""
    """What starts the engine, before MODEL and the options; empty: `python -m tangram serve`."""

    start_timeout: float = Field(default=900.0, gt=0)
    """Seconds that the engine may take to become ready."""

    expect_gpu: bool = False
    """Whether the engine is to run on a GPU: what that needs is then looked at before anything starts."""

    preflight: Literal["on", "warn", "off"] = "on"
    """What the look at the host before the start does: refuse, only say what it finds, or nothing."""

    metrics_port: int = Field(default=0, ge=0, le=65535)
    """A port, on all addresses, for Prometheus alone: metrics of app and engine without a key; 0 for none."""

    max_reply_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=1)
    """Tokens of a reply where neither the request nor the conversation names a number; `reply_tokens`."""

    resume_replies: bool = True
    """Whether replies that a restart interrupted go on by themselves."""

    session_days: int = Field(default=30, ge=1)

    setup_key: str = Field(default="", repr=False)
    """Key of the link that creates the first account; empty: another random one at each start."""

    link_hours: int = Field(default=72, ge=1, le=24 * 366)
    """Hours that an invitation and a password's reset can be used."""

    user_running: int = Field(default=8, ge=1)
    """Requests of one user that the engine works on at once; further ones wait."""

    user_waiting: int = Field(default=64, ge=0)
    user_per_minute: int = Field(default=240, ge=1)

    max_running: int = Field(default=128, ge=1)
    """Requests of all users that the engine is given at once."""

    max_waiting: int = Field(default=1024, ge=0)

    stall_seconds: float = Field(default=300.0, ge=0)
    """Seconds with work and without progress after which the engine ends itself; after half of that it is not
    ready. 0: never."""

    log_format: Literal["text", "json"] = "text"
    """json: one JSON object a line, and a line for each request."""

    audit_days: int = Field(default=400, ge=1)

    trusted_proxies: str = ""
    """Comma-separated addresses or networks whose forwarded headers are believed; empty: nobody's."""

    @field_validator("home", mode="after")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @field_validator("setup_key", "engine_api_key")
    @classmethod
    def _no_placeholder(cls, secret: str, info: ValidationInfo) -> str:
        secret = secret.strip()
        if is_placeholder(secret):
            raise ValueError(
                "is a placeholder that anybody can guess: choose a random secret, or leave it empty"
            )
        if info.field_name == "setup_key" and secret and len(secret) < MIN_SECRET:
            raise ValueError(f"must have at least {MIN_SECRET} characters")
        return secret

    @field_validator("database_url")
    @classmethod
    def _is_postgres(cls, text: str) -> str:
        try:
            if text.strip():
                parse_url(text)
        except InvalidInput as error:
            raise ValueError(error.problem) from None
        return text.strip()

    @field_validator("engine_args", "engine_command")
    @classmethod
    def _splits(cls, text: str) -> str:
        try:
            shlex.split(text)
        except ValueError as error:
            raise ValueError(f"cannot be split like a shell command: {error}") from error
        return text

    @field_validator("trusted_proxies")
    @classmethod
    def _addresses(cls, text: str) -> str:
        proxies = [part.strip() for part in text.split(",") if part.strip()]
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"must be IP addresses or networks, separated by commas: {error}") from error
        return ",".join(proxies)

    def reply_tokens(self, bundled: bool) -> int:
        """`max_reply_tokens`; unless that was set, less for the bundled model."""
        unset = "max_reply_tokens" not in self.model_fields_set
        return BUNDLED_MAX_TOKENS if bundled and unset else self.max_reply_tokens

    @property
    def database_path(self) -> Path:
        """The SQLite file; there is none with `database_url`."""
        return self.home / "db" / "chat.sqlite3"

    @property
    def postgres(self) -> PostgresUrl | None:
        """What `database_url` says; None for SQLite."""
        return parse_url(self.database_url) if self.database_url else None

    @property
    def backups_dir(self) -> Path:
        return self.home / "backups"

    @property
    def models_dir(self) -> Path:
        return self.home / "models"

    @property
    def profiles_dir(self) -> Path:
        return self.home / "profiles"

    @property
    def control_dir(self) -> Path:
        """Where the running app listens for `tangram-chat` commands; for its owner alone."""
        return self.home / "run"

    @property
    def engine_log(self) -> Path:
        return self.home / "logs" / "engine.log"

    def make_folders(self) -> None:
        """Create the data directory, readable by its owner alone."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (
            self.database_path.parent,
            self.backups_dir,
            self.models_dir,
            self.profiles_dir,
            self.control_dir,
            self.engine_log.parent,
        ):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
