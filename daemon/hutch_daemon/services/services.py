"""All services, for `api`."""

from __future__ import annotations

from dataclasses import dataclass

from hutch_daemon.services.access import Access
from hutch_daemon.services.approvals import ApprovalService
from hutch_daemon.services.executors import ExecutorService
from hutch_daemon.services.forks import ForkService
from hutch_daemon.services.history import HistoryService
from hutch_daemon.services.host import HostService
from hutch_daemon.services.keys import KeyService
from hutch_daemon.services.modes import ModeService
from hutch_daemon.services.policy import PolicyService
from hutch_daemon.services.reports import ReportService
from hutch_daemon.services.sessions import SessionService
from hutch_daemon.services.turns import TurnService

__all__ = ["Services"]


@dataclass(frozen=True, slots=True)
class Services:
    """The services that carry out the methods of the wire, by subject."""

    access: Access
    sessions: SessionService
    forks: ForkService
    modes: ModeService
    turns: TurnService
    approvals: ApprovalService
    history: HistoryService
    host: HostService
    policy: PolicyService
    keys: KeyService
    executors: ExecutorService
    reports: ReportService
