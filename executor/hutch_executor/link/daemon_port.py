"""The `DaemonPort` that runners get: the link, the reporter and the open permission requests behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from anyio import to_thread

from hutch_executor.events.reporter import Reporter
from hutch_executor.link.daemon_link import DaemonLink
from hutch_executor.link.open_requests import OpenRequests
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind
from hutch_shared.ids import new_id
from hutch_shared.project_file import read_project_file

__all__ = ["LinkedDaemon"]

_REQUEST_LIMIT: Final = 30 << 20
"""Bytes of a permission request. hutchd does not read a larger frame, so it could not say which request it refuses."""


class LinkedDaemon:
    """The `DaemonPort` of one session."""

    def __init__(self, link: DaemonLink, reporter: Reporter, session: str, cwd: str) -> None:
        """Act for `session`, whose working directory is `cwd`."""
        self.requests = OpenRequests(self._send)
        self._link = link
        self._reporter = reporter
        self._session = session
        self._cwd = cwd

    def __repr__(self) -> str:
        return f"<LinkedDaemon {self._session} {self.requests!r}>"

    async def get_api_key(self, provider: str) -> m.KeyGrant:
        """Request a key; see the port."""
        grant: m.KeyGrant = await self._link.call("get_api_key", m.GetApiKey(self._session, provider))
        return grant

    async def request_permission(
        self,
        kind: m.PermissionKind,
        call: m.ToolCall,
        *,
        cwd: str | None = None,
        questions: tuple[m.Question, ...] = (),
        plan: str | None = None,
    ) -> m.PermissionDecision:
        """Request a decision; see the port."""
        project = await self._project_file()
        request = m.RequestPermission(
            ask=new_id("ask"),
            session=self._session,
            turn=self._reporter.turn or "",
            kind=kind,
            call=call,
            cwd=cwd or self._cwd,
            questions=questions,
            plan=plan,
            project=project,
        )
        return await self.requests.decide(request)

    async def judge_reads(self, named: Mapping[str, str], imported: Mapping[str, str]) -> Mapping[str, str]:
        """Ask which instruction files a rule denies; see the port."""
        asked = m.JudgeReads(self._session, {**named}, {**imported}, await self._project_file())
        judged: m.ReadsJudged = await self._link.call("judge_reads", asked)
        return judged.withheld

    async def report(self, kind: EventKind, data: msgspec.Struct, native: bytes | None = None) -> None:
        """Report an event; see the port."""
        await self._reporter.report(kind, data, native)

    async def _project_file(self) -> m.ProjectFile | None:
        """Read the project's policy file, which may have changed."""
        project = await to_thread.run_sync(read_project_file, self._cwd)
        return m.ProjectFile(*project) if project is not None else None

    async def _send(self, request: m.RequestPermission) -> m.PermissionDecision:
        """Send the request after the events that led to it."""
        if len(msgspec.json.encode(request)) > _REQUEST_LIMIT:
            raise HutchError(Reason.FRAME_TOO_LARGE, "The call is too large for a decision.")
        await self._reporter.wait_sent(self._reporter.outbox.last)
        decision: m.PermissionDecision = await self._link.call("request_permission", request)
        return decision
