"""The scheduler's socket: answers, failures, and who may come in."""

from __future__ import annotations

import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tangram import control
from tangram.control import ControlServer, call
from tangram.errors import ConfigError, EngineUnavailable


def fail(_: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("broken")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tangram-0" / "engine.sock"


@pytest.fixture
def server(path: Path) -> Iterator[ControlServer]:
    server = ControlServer(path, {"echo": lambda asked: {"got": asked["value"]}, "fail": fail})
    yield server
    server.close()


@pytest.mark.usefixtures("server")
def test_calls_are_answered(path: Path) -> None:
    assert call(path, "echo", value=[1, "ü"]) == {"got": [1, "ü"]}


@pytest.mark.usefixtures("server")
def test_many_callers_at_once_each_get_their_own_answer(path: Path) -> None:
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: call(path, "echo", value=i)}))
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: {"got": i} for i in range(20)}


@pytest.mark.usefixtures("server")
def test_a_failing_call_is_the_caller_s_error_and_the_server_lives_on(path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="RuntimeError: broken"):
        call(path, "fail")
    with pytest.raises(EngineUnavailable, match="KeyError"):
        call(path, "unknown")
    assert call(path, "echo", value=1) == {"got": 1}


def test_nobody_there_is_engine_unavailable(path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="does not answer"):
        call(path, "echo", value=1)


@pytest.mark.usefixtures("server")
def test_only_this_user_may_enter(path: Path) -> None:
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_planted_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        ControlServer(tmp_path / "link" / "x.sock", {})


def test_closing_removes_the_socket_and_a_new_engine_takes_the_place(path: Path) -> None:
    ControlServer(path, {}).close()
    assert not path.exists()
    second = ControlServer(path, {"echo": lambda _: {}})
    assert call(path, "echo") == {}
    second.close()


def test_sockets_of_killed_engines_are_removed_and_those_of_living_ones_are_not(path: Path) -> None:
    living = ControlServer(path, {"echo": lambda _: {}})
    dead = ControlServer(path.with_name("dead.sock"), {})
    dead._server.shutdown()
    dead._server.server_close()  # as a kill leaves it: the file stays
    assert path.with_name("dead.sock").exists()
    third = ControlServer(path.with_name("third.sock"), {})
    assert not path.with_name("dead.sock").exists()
    assert call(path, "echo") == {}
    living.close()
    third.close()


def test_a_server_that_is_starting_is_not_removed_by_one_that_starts_beside_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines and their workers start together, into one folder; one that does not listen yet looks dead."""
    beside: list[ControlServer] = []
    listen = socket.socket.listen

    def slowly(own: socket.socket, *backlog: int) -> None:
        if not beside:  # bound, and not listening yet
            monkeypatch.setattr(socket.socket, "listen", listen)
            beside.append(ControlServer(path.with_stem("other"), {"echo": lambda asked: {}}))
        listen(own, *backlog)

    monkeypatch.setattr(socket.socket, "listen", slowly)
    server = ControlServer(path, {"echo": lambda asked: {"got": asked["value"]}})
    try:
        assert beside
        assert call(path, "echo", value=1) == {"got": 1}
        assert call(path.with_stem("other"), "echo") == {}
    finally:
        server.close()
        beside[0].close()


def test_a_stopped_engine_whose_queue_is_full_holds_nobody_up(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    stopped = path.with_name("stopped.sock")
    with ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(stopped))
        listener.listen(0)
        while True:  # until nobody else is let in
            caller = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            try:
                caller.connect(str(stopped))
            except BlockingIOError:
                break
        ControlServer(path, {}).close()
        assert stopped.exists(), "it may go on"


def test_a_folder_too_long_for_a_socket_gives_way_to_a_short_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instance = "1795977363041768983"
    for length in range(60, 120):
        monkeypatch.setattr(tempfile, "gettempdir", lambda length=length: "/" + "x" * length)
        both = control.socket_path(instance), control.worker_socket(instance)
        assert len({path.parent for path in both}) == 1
        assert all(len(str(path)) <= control.LONGEST for path in both)
    assert both[0].is_relative_to("/tmp")
    with pytest.raises(ConfigError, match=r"TMPDIR: .* is too long for a socket"):
        ControlServer(tmp_path / ("x" * 108) / "a.sock", {})


def test_the_path_fits_into_a_socket_address() -> None:
    assert len(str(control.socket_path("1795977363041768983_dp10"))) < 100
