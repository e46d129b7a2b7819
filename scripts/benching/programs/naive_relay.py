"""A relay as one would write it first: json, a commit per event, a dump and an awaited drain per client.

`naive_relay EXECUTOR_SOCKET CLIENT_SOCKET FOLDER`. As durable as hutchd: a write-ahead log and synchronous=FULL.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

SESSION = "s-0000000000000001"
_LIMIT = 64 << 20


class Relay:
    """The relay: one executor, any number of clients."""

    def __init__(self, folder: Path) -> None:
        """Store the events below `folder`."""
        self._folder = folder
        self._database = sqlite3.connect(folder / "naive.db")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, session TEXT, event TEXT)")
        self._followers: list[asyncio.StreamWriter] = []
        self._executor: asyncio.StreamWriter
        self._seq = 0
        self._turns = 0

    async def serve_executor(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the executor."""
        self._executor = writer
        while line := await reader.readline():
            message = json.loads(line)
            if message.get("method") == "hello":
                await self.say(writer, {"result": {"acked": 0, "daemon_epoch": 1}, "id": message["id"]})
            elif message.get("method") == "report_message":
                for event in message["params"]["events"]:
                    await self.take(event)

    async def take(self, event: dict[str, Any]) -> None:
        """Store one event, send it to every follower, send the receipt."""
        self._seq += 1
        number = event.pop("n")
        event = {"session": SESSION, "seq": self._seq, **event}
        with self._database:
            self._database.execute("INSERT INTO events VALUES (?, ?, ?)", (self._seq, SESSION, json.dumps(event)))
        for follower in self._followers:
            await self.say(follower, {"method": "event", "params": event})
        await self.say(self._executor, {"method": "ack_events", "params": {"n": number}})

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client."""
        while line := await reader.readline():
            message = json.loads(line)
            await self.say(writer, {"result": {}, "id": message["id"]})
            if message["method"] == "follow_events":
                self._followers.append(writer)
            elif message["method"] == "submit_prompt":
                await self.submit(message["params"]["prompt"])
        if writer in self._followers:
            self._followers.remove(writer)
        writer.close()

    async def submit(self, prompt: str) -> None:
        """Pass the prompt to the executor."""
        self._turns += 1
        if self._turns == 1:
            prepare = {
                "session": SESSION, "agent": "script", "cwd": "/", "permission_mode": "bypass", "options": {},
                "limits": {}, "spool": str(self._folder), "home": "/",
            }  # fmt: skip
            await self.say(self._executor, {"method": "prepare_session", "params": prepare, "id": "p"})
        turn = {"session": SESSION, "turn": f"t-{self._turns}", "number": self._turns, "prompt": prompt}
        await self.say(self._executor, {"method": "execute_prompt", "params": turn, "id": self._turns})

    async def say(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        """Write one message, and wait until the buffer is drained."""
        writer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await writer.drain()


async def main(executors: str, clients: str, folder: Path) -> None:
    """Serve both sockets."""
    relay = Relay(folder)
    await asyncio.start_unix_server(relay.serve_executor, executors, limit=_LIMIT)
    server = await asyncio.start_unix_server(relay.serve_client, clients, limit=_LIMIT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
