"""The commands of `tangram-chat`: what an operator does from a terminal, while the app runs or not."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.audit import AuditLog
from app.control import NotRunning, Refused, ask
from app.conversation_texts import write_texts
from app.database import URL, existing_database, replaced_database
from app.errors import AppError
from app.fairness import FairQueue, Limits
from app.operator_commands import Operator, sentence
from app.passwords import Passwords
from app.people import People
from app.settings import Settings
from db.check import check
from db.database import Database
from db.errors import DbError, StorageUnavailable
from db.maintenance import export_owner
from db.postgres.moving import move_in
from db.store import Store

DESCRIPTION = """\
Start Tangram Chat: the chat and the admin console as web pages, the API, and the engine that runs
the model. It ends with Ctrl-C. With a command, do that instead; commands also work while it runs."""

EPILOG = """\
Settings come from the environment, such as
  MODEL           the model, a directory or a hub id (default: the bundled model)
  TANGRAM_HOST    where it listens (default: 127.0.0.1)
  TANGRAM_PORT    its port (default: 8000)
  TANGRAM_HOME    where its data is kept (default: ~/.local/share/tangram-chat)

docs/operations.md explains all of them."""


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    parser = argparse.ArgumentParser(
        prog="tangram-chat",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, words: str, run: Callable[..., int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        made.set_defaults(run=run)
        return made

    backup = add("backup", "copy the database, checked, while everything goes on", _backup)
    backup.add_argument("directory", nargs="?", type=Path, help="where to (default: backups in TANGRAM_HOME)")
    backup.add_argument("--keep", type=_positive, help="delete all but the newest KEEP made by this command")
    restored = add("restore", "put a backup in the place of the database; stop the app first", _restore)
    restored.add_argument("backup", type=Path)
    checked = add("check", "look for damage in the database or in a backup", _check)
    checked.add_argument("file", nargs="?", type=Path, help="a backup (default: the database)")
    add("vacuum", "give the space of deleted rows back; writes wait meanwhile", _vacuum)
    words = "copy the SQLite database into the empty one of TANGRAM_DATABASE_URL, all or nothing"
    add("to-postgres", words, _to_postgres)
    export = add("export", "write all conversations of a user, or of everybody, as JSON", _export)
    export.add_argument("target", type=Path, help="a file that is not there yet; with --all a directory")
    whose = export.add_mutually_exclusive_group(required=True)
    whose.add_argument("--user", help="a user's name")
    whose.add_argument("--all", action="store_true", help="everybody, a file each")
    words = "print the texts of conversations whose people allow it, for calibrating: they are private"
    add("conversations", words, _conversations)
    _add_user_commands(commands.add_parser("user", help="list, invite, disable, enable, reset users"))
    return parser


def _add_user_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, words: str, run: Callable[..., int], *, named: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        made.set_defaults(run=run)
        if named:
            made.add_argument("name")
        return made

    add("list", "show all users", _list, named=False)
    invite = add("invite", "make a link with which somebody makes an account, once", _invite, named=False)
    invite.add_argument("--admin", action="store_true", help="an administrator's account")
    invite.add_argument("--note", default="", help="whom it is for, for yourself")
    reset = add("reset", "end a user's sign-ins and make a link for another password", _reset)
    for made in (invite, reset):
        made.add_argument("--hours", type=_positive, help="how long it works (default: TANGRAM_LINK_HOURS)")
    add("disable", "shut a user out: sign-ins, keys, links, running replies", _change)
    add("enable", "let a disabled user in again", _change)
    admin = add("admin", "make a user an administrator", _admin)
    admin.add_argument("--revoke", action="store_true", help="take the rights away instead")
    quota = add("quota", "set what a user may do at once; what is left out is the default", _quota)
    quota.add_argument("--running", type=int, help="requests that run at once")
    quota.add_argument("--waiting", type=int, help="requests that wait behind them")
    quota.add_argument("--per-minute", type=int, help="requests that begin in a minute")


def run(settings: Settings, options: argparse.Namespace) -> int:
    """Carry out the chosen command; print what came of it. Returns the exit code."""
    try:
        code: int = options.run(settings, options)
    except (AppError, DbError) as error:
        return _failed(sentence(error))
    except Refused as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    return code


# ---- the database ----------------------------------------------------------------------------


def _backup(settings: Settings, options: argparse.Namespace) -> int:
    directory: Path = options.directory or settings.backups_dir
    made = existing_database(settings).dialect.back_up(directory, "manual")
    print(made)
    if options.keep is not None:
        ours = directory.glob(f"{settings.database_path.stem}-*-manual-*.sqlite3")
        for old in sorted(ours, key=lambda path: path.stat().st_mtime_ns)[: -options.keep]:
            old.unlink()
    return 0


def _restore(settings: Settings, options: argparse.Namespace) -> int:
    kept = replaced_database(settings).dialect.restore(options.backup)
    print(f"restored from {options.backup}")
    if kept is not None:
        print(f"what was there before is kept at {kept}")
    return 0


def _check(settings: Settings, options: argparse.Namespace) -> int:
    if options.file:
        where, found = str(options.file), check(options.file)
    else:
        dialect = existing_database(settings).dialect
        where, found = dialect.where, dialect.check()
    for line in found:
        print(line)
    if not found:
        print(f"{where} is in order")
    return 1 if found else 0


def _vacuum(settings: Settings, options: argparse.Namespace) -> int:
    result = _do(settings, "vacuum", {})
    print(f"{result['before']} bytes before, {result['after']} after")
    return 0


def _to_postgres(settings: Settings, options: argparse.Namespace) -> int:
    if settings.postgres is None:
        return _failed(f"set {URL} to the address of an empty PostgreSQL database first")
    counts = move_in(settings.database_path, settings.postgres, settings.backups_dir)
    print(f"copied {settings.database_path} to PostgreSQL ({settings.postgres}):")
    for table, count in counts.items():
        print(f"  {count:>9} {table}")
    print(f"The file stays as it is, and is not used any more: without {URL} commands and the app refuse it.")
    return 0


def _export(settings: Settings, options: argparse.Namespace) -> int:
    database = existing_database(settings)
    if not database.is_current:
        raise StorageUnavailable("the database has an older schema: start the app once, which upgrades it")
    database.migrate()

    async def work() -> int:
        store = Store(database)
        try:
            if not options.all:
                user = await store.user_by_name(options.user)
                if user is None:
                    return _failed("user not found")
                _write(options.target, await export_owner(database, user.id))
                return 0
            options.target.mkdir(mode=0o700, parents=True, exist_ok=True)
            for person in await store.list_users():
                # By id: a name can be anything, also a path.
                _write(options.target / f"{person.id}.json", await export_owner(database, person.id))
            return 0
        finally:
            await database.aclose()

    return asyncio.run(work())


def _conversations(settings: Settings, options: argparse.Namespace) -> int:
    write_texts(settings, sys.stdout)
    return 0


def _write(path: Path, content: Any) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=1)
        file.write("\n")
    print(path)


# ---- users -----------------------------------------------------------------------------------


def _list(settings: Settings, options: argparse.Namespace) -> int:
    people = _do(settings, "user list", {})
    for person in people:
        kind = "disabled" if person["disabled_at"] else "admin" if person["is_admin"] else "user"
        seen = f"last seen {_day(person['last_seen_at'])}" if person["last_seen_at"] else "never seen"
        print(f"{kind:8}  {person['name']}  ({seen}, {person['api_keys']} API keys)")
    return 0


def _invite(settings: Settings, options: argparse.Namespace) -> int:
    arguments = {"admin": options.admin, "note": options.note, "hours": options.hours}
    return _show_link(settings, _do(settings, "user invite", arguments))


def _reset(settings: Settings, options: argparse.Namespace) -> int:
    arguments = {"name": options.name, "hours": options.hours}
    return _show_link(settings, _do(settings, "user reset", arguments))


def _change(settings: Settings, options: argparse.Namespace) -> int:
    name = _do(settings, f"user {options.action}", {"name": options.name})
    print(f"{name} is {options.action}d")
    return 0


def _admin(settings: Settings, options: argparse.Namespace) -> int:
    name = _do(settings, "user admin", {"name": options.name, "revoke": options.revoke})
    print(f"{name} is {'no longer' if options.revoke else 'now'} an administrator")
    return 0


def _quota(settings: Settings, options: argparse.Namespace) -> int:
    limits = {"running": options.running, "waiting": options.waiting, "per_minute": options.per_minute}
    _do(settings, "user quota", {"name": options.name, **limits})
    shown = ", ".join(
        f"{name.replace('_', ' ')}: {'default' if value is None else value}" for name, value in limits.items()
    )
    print(f"{options.name}: {shown}")
    return 0


def _show_link(settings: Settings, issued: Any) -> int:
    host = "localhost" if settings.host in ("0.0.0.0", "") else settings.host  # noqa: S104 (read, not bound)
    print(f"http://{host}:{issued['port']}{issued['path']}")
    print(
        f"works once, until {_day(issued['expires_at'])}; put your proxy's address in front if you have one"
    )
    return 0


# ---- parts -----------------------------------------------------------------------------------


def _do(settings: Settings, command: str, arguments: dict[str, Any]) -> Any:
    """Have the running app do it, or do it here when none runs."""
    try:
        return ask(settings.control_dir, command, arguments)
    except NotRunning:
        pass
    database = existing_database(settings)
    database.migrate()

    async def work() -> Any:
        try:
            return await _operator(settings, database).run(command, arguments)
        finally:
            await database.aclose()

    return asyncio.run(work())


def _operator(settings: Settings, database: Database) -> Operator:
    store = Store(database)
    audit = AuditLog(store, days=settings.audit_days)
    idle = FairQueue(running=1, waiting=0, limits=Limits(1, 0, 1))
    people = People(store, Passwords(), audit, idle, link_hours=settings.link_hours)
    return Operator(database, store, people, settings.port)


def _day(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(milliseconds / 1000))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _failed(message: str) -> int:
    print(f"tangram-chat: {message}", file=sys.stderr)
    return 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command and its options; `command` is None to start the app. Exits with 2 for a mistake."""
    return build_parser().parse_args(arguments)
