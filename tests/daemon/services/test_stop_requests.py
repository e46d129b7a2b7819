"""Requests that stop hutchd: a later one replaces an earlier one, and the service manager hears of each."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import anyio

from hutch_daemon.service import Service
from hutch_daemon.services.host import StopRequest
from hutch_daemon.settings import Settings
from hutch_daemon.wiring.settings_file import SettingsFile
from hutch_daemon.wiring.stopping import until_stopped
from hutch_shared import messages as m
from hutch_shared.paths import Paths
from tests.fakes.executors import never_end
from tests.fakes.stage import WAIT, Stage


async def test_a_second_stop_replaces_the_first(stage: Stage, tmp_path: Path) -> None:
    """Each asks the manager for the time that it may take."""
    stage.host.play = never_end
    request, address = StopRequest(), str(tmp_path / "notify")
    service = Service(address)
    file = SettingsFile(Paths(tmp_path / "hutch.toml", tmp_path, tmp_path, tmp_path, False), Settings(), service)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, anyio.fail_after(WAIT):
        manager.bind(address)
        manager.setblocking(False)
        send, signals = anyio.create_memory_object_stream[signal.Signals]()
        async with stage.hutchd(), send, signals, anyio.create_task_group() as tasks:
            executor = await stage.running(await stage.submit(await stage.open()))
            tasks.start_soon(until_stopped, stage.services.host, request, file, service, signals)
            request.make(m.StopDaemon("drain", 100))
            await anyio.wait_readable(manager)
            said = [manager.recv(1000).decode().split("\n")]
            request.make(m.StopDaemon("leave", 1000))
            await anyio.wait_readable(manager)
            said.append(manager.recv(1000).decode().split("\n"))

    assert said == [
        ["STOPPING=1", "EXTEND_TIMEOUT_USEC=160000000", "STATUS=Stops: running turns end first"],
        ["STOPPING=1", "EXTEND_TIMEOUT_USEC=1060000000", "STATUS=Stops: turns are left running"],
    ]
    assert not executor.exited.is_set()
