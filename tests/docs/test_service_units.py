"""The units for systemd and the line for cron that the documents offer can be used as they stand."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from app.cli import build_parser
from app.preflight.problems import Code
from tests.tree import ROOT

UNITS = sorted((ROOT / "docs" / "systemd").iterdir())
TREE = "/opt/tangram-chat"
SETTINGS = "set -a; TANGRAM_HOME=/var/lib/tangram-chat; . /etc/tangram-chat.env; "
"""What gives a command in a shell what the units give to theirs."""


def entries(unit: Path) -> list[tuple[str, str, str]]:
    """(section, name, value) of each line of a unit that is no comment."""
    found, section = [], ""
    for line in unit.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#"):
            name, given, value = line.partition("=")
            assert given, f"{unit.name}: {line}"
            found.append((section, name, value))
    return found


def commands() -> list[list[str]]:
    """What the units run, and the line for cron."""
    started = [
        shlex.split(value) for unit in UNITS for _, name, value in entries(unit) if name == "ExecStart"
    ]
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```crontab\n(.*?)\n```", text, flags=re.M | re.S)
    minute, hour, day, month, weekday, command = block.split(maxsplit=5)
    assert (day, month, weekday) == ("*", "*", "*")
    assert 0 <= int(minute) < 60
    assert 0 <= int(hour) < 24
    assert "%" not in command, "cron ends a command there"
    assert command.startswith(SETTINGS)
    return [*started, shlex.split(command.removeprefix(SETTINGS))]


def test_what_is_started_exists_and_takes_these_options() -> None:
    programs = set()
    for program, *words in commands():
        assert program.startswith(f"{TREE}/")
        programs.add(program.removeprefix(f"{TREE}/"))
        if program.endswith("/tangram-chat"):
            assert build_parser().parse_args(words).keep > 0
        else:
            assert (ROOT / program.removeprefix(f"{TREE}/")).stat().st_mode & 0o100
    assert programs == {"scripts/up.sh", ".venv/bin/tangram-chat"}


def test_all_read_the_settings_that_name_the_database() -> None:
    services = [unit for unit in UNITS if unit.suffix == ".service"]
    assert len(services) == 2
    for unit in services:
        given = {(name, value) for _, name, value in entries(unit) if name.startswith("Environment")}
        assert given == {
            ("Environment", "TANGRAM_HOME=/var/lib/tangram-chat"),
            ("EnvironmentFile", "-/etc/tangram-chat.env"),
        }, unit.name
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    commands_there = [line for line in text.splitlines() if f"{TREE}/.venv/bin/tangram-chat" in line]
    assert len(commands_there) == 2
    assert all(SETTINGS in line for line in commands_there)


def test_a_shell_gives_the_settings_to_a_command(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("# a comment\nMODEL=a/b\nTANGRAM_DATABASE_URL='postgresql://h/x?a=1&b=2'\n")
    words = SETTINGS.replace("/etc/tangram-chat.env", str(file)) + "env"
    said = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "TANGRAM_DATABASE_URL=postgresql://h/x?a=1&b=2\n" in said
    assert "TANGRAM_HOME=/var/lib/tangram-chat\n" in said


def test_a_host_that_cannot_work_is_not_tried_again() -> None:
    (service,) = (unit for unit in UNITS if unit.name == "tangram-chat.service")
    (codes,) = (value.split() for _, name, value in entries(service) if name == "RestartPreventExitStatus")
    # A database's server may start after this host: it is asked again.
    assert {int(code) for code in codes} == {int(code) for code in Code} - {Code.DATABASE}


def test_a_timer_has_its_service() -> None:
    names = {unit.name for unit in UNITS}
    timers = {name for name in names if name.endswith(".timer")}
    assert timers
    assert {name.replace(".timer", ".service") for name in timers} <= names


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        # It looks whether what is started is there: `true` stands for it.
        text = re.sub(rf"^ExecStart={TREE}/\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.M)
        (tmp_path / unit.name).write_text(text)
    paths = [str(tmp_path / unit.name) for unit in UNITS]
    looked = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, timeout=60)
    said = [line for line in (looked.stdout + looked.stderr).splitlines() if "tangram-chat" in line]
    assert (looked.returncode, said) == (0, [])
