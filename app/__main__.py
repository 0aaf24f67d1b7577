"""`python -m app`: starts everything and serves it."""

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

import uvicorn
from pydantic import ValidationError

from app.conversation_texts import write_texts
from app.errors import PortTaken
from app.factory import build_services, create_app
from app.services import Services
from app.settings import Settings
from db.errors import DbError

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
CONVERSATIONS = "conversations"

_HELP = """\
usage: tangram-chat                   (or: python -m app)
       tangram-chat conversations

Start Tangram Chat: the chat and the admin console as web pages, the API, and the engine that runs
the model. It ends with Ctrl-C. With "conversations" it starts nothing and prints, for calibrating,
the texts of the conversations whose people allow that: they are private.

There are no options but --help: settings come from the environment, such as
  MODEL           the model, a directory or a hub id (default: the bundled model)
  TANGRAM_HOST    where it listens (default: 127.0.0.1)
  TANGRAM_PORT    its port (default: 8000)
  TANGRAM_HOME    where its data is kept (default: ~/.local/share/tangram-chat)

docs/operations.md explains all of them."""


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
        _say("stopping: replies are saved, then the engine ends")
        await self._services.generation.close()
        await super().shutdown(sockets)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal. Returns the exit code: 2 for a setting that cannot work, a taken port included.

    arguments: None for those of the command line.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) in (["--help"], ["-h"]):
        _say(_HELP)
        return 0
    if list(arguments) == [CONVERSATIONS]:
        return _print_conversations()
    if arguments:
        _say(
            f"python -m app takes no arguments but --help and {CONVERSATIONS}: settings come from the "
            "environment (MODEL, TANGRAM_...)"
        )
        return EXIT_CONFIGURATION
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings = Settings()
        listening = _listen(settings.host, settings.port)
    except ValidationError as error:
        for problem in error.errors():
            _say(f"setting {'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        return EXIT_CONFIGURATION
    except PortTaken as error:
        _say(error.message)
        return EXIT_CONFIGURATION
    with listening:
        return _serve(settings, listening)


def _print_conversations() -> int:
    try:
        write_texts(Settings(), sys.stdout)
    except (ValidationError, DbError, OSError) as error:
        print(f"cannot read the conversations: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _serve(settings: Settings, listening: socket.socket) -> int:
    try:
        services = build_services(settings, progress=_say)
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
    address = f"http://{_in_url(settings.host)}:{settings.port}"
    _say(f"Tangram Chat is at {address}")
    if await services.accounts.needs_setup():
        _say(f"No account yet: open {address}/setup to create yours.")
        _say(f"From another machine the page asks for this key: {services.accounts.setup_key}")


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


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
