"""`python -m app`, also called `tangram-chat`: starts everything and serves it, or carries out a command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from urllib.parse import urlencode

import uvicorn
from pydantic import ValidationError

from app import cli, logs
from app.errors import PortTaken
from app.factory import build_services, create_app
from app.preflight.problems import PreflightFailed
from app.preflight.start import prepare
from app.services import Services
from app.settings import Settings
from db.errors import DbError

log = logging.getLogger("app")

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2


class Server(uvicorn.Server):
    """Settles the running replies first: their readers then leave by themselves."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services
        self._echoed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._echoed = sig == signal.SIGINT and sys.stdout.isatty()  # the terminal has shown ^C
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT and SIGTERM, and do not send them to ourselves again: a wanted end is a success."""
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            await _greet(self._services)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._echoed:
            _say("")
        _teller(self._services.settings)("stopping: replies are saved, then the engine ends")
        await self._services.generation.close()
        await super().shutdown(sockets)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal, or carry out a command. Returns the exit code.

    2 is for a setting or an option that cannot work, a taken port included; what the preflight found has
    codes of its own.

    arguments: None for those of the command line.
    """
    try:
        options = cli.parse(arguments)
    except SystemExit as end:  # argparse has said why, or has shown the help
        return int(end.code or 0)
    try:
        settings = Settings()
        if options.command is not None:
            return cli.run(settings, options)
        logs.configure(settings.log_format)
        listening = _listen(settings.host, settings.port)
    except ValidationError as error:
        for problem in error.errors():
            _say(f"setting {'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        return EXIT_CONFIGURATION
    except PortTaken as error:
        _say(error.message)
        return EXIT_CONFIGURATION
    with listening:
        try:
            settings = prepare(settings, _teller(settings))
        except PreflightFailed as error:
            return error.code
        return _serve(settings, listening)


def _serve(settings: Settings, listening: socket.socket) -> int:
    try:
        services = build_services(settings, progress=_teller(settings))
        services.database.migrate()
    except (DbError, OSError) as error:
        _say(f"cannot start: {error}")
        return EXIT_FAILED
    from admin.mount import mount as mount_admin

    app = create_app(settings, services=services, mounts=[mount_admin])
    server = Server(server_config(app, settings), services)
    asyncio.run(server.serve(sockets=[listening]))
    return 0 if server.started else EXIT_FAILED


def server_config(app: Callable[..., Any], settings: Settings) -> uvicorn.Config:
    """uvicorn's options. Forwarded headers are believed only from the proxies that the settings name."""
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
    )


async def _greet(services: Services) -> None:
    settings = services.settings
    tell = _teller(settings)
    address = f"http://{_in_url(settings.host)}:{settings.port}"
    tell(f"Tangram Chat is at {address}")
    if await services.accounts.needs_setup():
        tell("No account yet. This link creates the administrator's; it works once, for a day:")
        tell(f"    {address}/setup?{urlencode({'key': services.accounts.setup_key})}")


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything else is started. Raises PortTaken with what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        raise PortTaken(
            f"cannot serve on {host}:{port}: {error.strerror or error}. Is another Tangram Chat running? "
            "Stop it, or choose another port with TANGRAM_PORT."
        ) from error
    return listening


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else "localhost" if host in ("0.0.0.0", "") else host  # noqa: S104


def _teller(settings: Settings) -> Callable[[str], None]:
    """How to tell the operator something: among the log's objects where these are asked for."""
    return log.info if settings.log_format == "json" else _say


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
