"""What the command line asks for that writes: done by the running app, which alone writes to its database.

Without an app the same commands run in the command's own process, which then holds the writer's lock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from app.errors import AppError, BadRequest
from app.people import IssuedLink, People
from app.services import Services
from db.database import Database
from db.errors import DbError, NotFound
from db.maintenance import vacuum
from db.store import Store
from db.views import QuotaView

Command = Callable[..., Awaitable[Any]]


class Operator:
    """Runs commands by name. Results are JSON values.

    port: where the app listens that carries them out.
    """

    def __init__(self, database: Database, store: Store, people: People, port: int) -> None:
        self._port = port
        self._database = database
        self._store = store
        self._people = people
        self.commands: Mapping[str, Command] = {
            "vacuum": self._vacuum,
            "user list": self._list,
            "user invite": self._invite,
            "user disable": self._disable,
            "user enable": self._enable,
            "user reset": self._reset,
            "user admin": self._admin,
            "user quota": self._quota,
        }

    @classmethod
    def of(cls, services: Services) -> Operator:
        """The operator of a running app."""
        return cls(services.database, services.store, services.people, services.settings.port)

    async def run(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Carry out one command. Raises AppError, DbError; BadRequest for what is no command."""
        if command not in self.commands:
            raise BadRequest(
                f"There is no command {command!r} in the app that runs. Is it of another version?"
            )
        try:
            return await self.commands[command](**arguments)
        except TypeError as error:
            raise BadRequest(f"{command}: {error}") from error

    async def _vacuum(self) -> dict[str, int]:
        return asdict(await vacuum(self._database))

    async def _list(self) -> list[dict[str, Any]]:
        return [asdict(person) for person in await self._people.list_users()]

    async def _invite(self, admin: bool, note: str, hours: int | None) -> dict[str, Any]:
        return self._issued(await self._people.invite(None, is_admin=admin, note=note, hours=hours))

    async def _disable(self, name: str) -> str:
        return (await self._people.disable(None, await self._id(name))).name

    async def _enable(self, name: str) -> str:
        return (await self._people.enable(None, await self._id(name))).name

    async def _reset(self, name: str, hours: int | None) -> dict[str, Any]:
        return self._issued(await self._people.reset_password(None, await self._id(name), hours=hours))

    async def _admin(self, name: str, revoke: bool) -> str:
        return (await self._people.set_admin(None, await self._id(name), not revoke)).name

    async def _quota(
        self, name: str, running: int | None, waiting: int | None, per_minute: int | None
    ) -> dict[str, Any]:
        quota = QuotaView(running, waiting, per_minute)
        return asdict(await self._people.set_quota(None, await self._id(name), quota))

    def _issued(self, issued: IssuedLink) -> dict[str, Any]:
        return {"path": issued.path, "port": self._port, "expires_at": issued.link.expires_at}

    async def _id(self, name: str) -> str:
        user = await self._store.user_by_name(name)
        if user is None:
            raise NotFound("user")
        return user.id


def sentence(error: AppError | DbError) -> str:
    """What a command prints of an error."""
    return error.message if isinstance(error, AppError) else f"{error}"
