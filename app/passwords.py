"""Passwords: argon2id, a few at a time."""

from __future__ import annotations

import asyncio
import secrets
from functools import cached_property

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from app.errors import BadRequest

MIN_PASSWORD = 8
MAX_PASSWORD = 1024


class Passwords:
    """Hashes and checks passwords, off the event loop: each takes 64 MiB and a core for a moment."""

    def __init__(self) -> None:
        self._hasher = PasswordHasher()
        self._hashing = asyncio.Semaphore(2)

    @cached_property
    def _absent(self) -> str:
        """A hash that no password matches, to be checked for names that do not exist."""
        return self._hasher.hash(secrets.token_urlsafe(16))

    async def hash(self, password: str) -> str:
        """The hash that is to be stored."""
        async with self._hashing:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def verify(self, hashed: str | None, password: str) -> bool:
        """Whether the password is the one of the hash. None, for no such user, takes as long and is False."""
        if len(password) > MAX_PASSWORD:
            return False
        async with self._hashing:
            return await asyncio.to_thread(self._matches, hashed, password)

    def is_outdated(self, hashed: str) -> bool:
        """Whether the hash was made with weaker parameters than today's."""
        return self._hasher.check_needs_rehash(hashed)

    def _matches(self, hashed: str | None, password: str) -> bool:
        try:
            return self._hasher.verify(hashed if hashed is not None else self._absent, password)
        except (VerificationError, InvalidHashError):
            return False


def check_new(name: str, password: str) -> None:
    """Raises BadRequest naming what is wrong with the name or the password of an account."""
    if not 1 <= len(name.strip()) <= 64 or not name.isprintable():
        raise BadRequest("The name must have 1 to 64 printable characters.", param="name")
    check_new_password(password)


def check_new_password(password: str) -> None:
    """Raises BadRequest for a password that is too short or too long."""
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise BadRequest(
            f"The password must have at least {MIN_PASSWORD} characters, and at most {MAX_PASSWORD}.",
            param="password",
        )
