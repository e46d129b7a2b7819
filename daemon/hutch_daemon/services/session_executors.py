"""Provides a session's executor: leases one, waits for its connection, and lets it prepare the session."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from hutch_daemon.environments.levels import is_less
from hutch_daemon.keys.vault import Vault, session_context
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.pool.view import ExecutorKey
from hutch_daemon.redaction import KnownSecrets
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.services.agent_dirs import agent_dir
from hutch_daemon.services.isolation import IsolationPlan, IsolationPlanner
from hutch_daemon.services.recap import read_recap
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import events, executors, sessions, turns
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import FORK_MARK, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.agents import keeps_conversation, provider_of
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice
from hutch_shared.latch import Latch

__all__ = ["SessionExecutors"]


_NAMED = 3
"""The files left out that the sentence of a notice names; its details list all."""


class ConversationOrigin(NamedTuple):
    """Where a session's conversation may come from."""

    directories: tuple[str, ...]
    """The directories of other sessions' agents, the most likely first."""
    is_named: bool
    """Whether the user named the conversation, and no turn has used it yet."""


class SessionExecutors:
    """Leases and prepares executors for sessions."""

    def __init__(
        self,
        store: Store,
        pool: Pool,
        accounts: Accounts,
        isolation: IsolationPlanner,
        vault: Vault,
        known: KnownSecrets,
        settings: SettingsInForce,
        spool_dir: Path,
    ) -> None:
        """`spool_dir` contains the spool directories of executors that do not create their own."""
        self._store = store
        self._pool = pool
        self._accounts = accounts
        self._isolation = isolation
        self._vault = vault
        self._known = known
        self._settings = settings
        self._spool_dir = spool_dir

    async def obtain(self, session: SessionRow, changed: Latch) -> Executor:
        """Return a connected and prepared executor of the session; lease one if there is none.

        `changed` must be notified when the session's executor changes. Raises the errors of a start or a preparation.
        """
        tried_again = False
        while True:
            executor = self._pool.roster.serving.get(session.id)
            if executor is None or executor.checked_for is not self._settings.current:
                executor = await self._check(session, executor)
            executor.idle_since = None
            while executor.peer is None and not executor.over:
                await changed.wait()
            if executor.over:
                raise HutchError(Reason.EXECUTOR_LOST, f"The executor went away: {executor.detail}.")
            if executor.prepared and session.recap_due and not executor.has_recap:
                await self._pool.end(executor, "its agent did not keep the conversation", grace=3.0)
                continue
            if executor.prepared and executor.sandbox_failed:  # the next one gets what holds now
                await self._pool.end(executor, "the sandbox of its session does not hold any more", grace=3.0)
                continue
            if executor.prepared:
                return executor
            plan = await self._plan(session, executor)
            if (why := _unable(session, executor, plan)) is not None:
                self._pool.retire(executor, f"it is of an earlier version of Hutch, which {why}")
                continue
            try:
                await self._prepare(session, executor, plan)
            except HutchError as error:
                if tried_again or error.reason is not Reason.ISOLATION_UNAVAILABLE:
                    raise
                tried_again = True
                if not await self._holds_otherwise(executor, plan):
                    raise
                continue
            return executor

    async def _check(self, session: SessionRow, executor: Executor | None) -> Executor:
        """Return the session's executor if the settings and its environment still allow it, otherwise lease another."""
        settings = self._settings.current
        account = self._accounts.require_allowed(session)
        if executor is None or not await self._still_fits(session, executor):
            key = ExecutorKey(account, session.agent, session.environment)
            return await self._pool.lease(session.id, key)
        if executor.prepared and not executor.environment.asks_each_time:
            executor.checked_for = settings
        return executor

    async def _still_fits(self, session: SessionRow, executor: Executor) -> bool:
        """Return whether the current settings still allow the session's executor; if not, end it.

        If the launcher cannot be reached, the executor is kept.
        """
        try:
            await executor.environment.check_account(executor.key.account)
        except HutchError as error:
            if error.details.get("refused"):
                self._pool.retire(executor, f"its account may run no agents any more: {error.message}")
                raise
        if executor.prepared and not self._isolation.accepts(session.isolation):
            await self._pool.end(executor, "it has less isolation than is required now", grace=3.0)
            return False
        return True

    async def _plan(self, session: SessionRow, executor: Executor) -> IsolationPlan:
        """Plan the isolation of the session in this executor. `isolation_unavailable` if it is less than required."""
        grouped = executor.launched is None or bool(executor.launched.state.get("cgroup"))
        return await self._isolation.plan(
            executor.environment,
            session.agent,
            session.cwd,
            executor.key.account,
            session.isolation.asked,
            grouped=grouped,
        )

    async def _holds_otherwise(self, executor: Executor, plan: IsolationPlan) -> bool:
        """Try the sandbox again that an executor refused; return whether another result than the plan's was found."""
        if plan.sandbox is None:
            return False
        account, kind, environment = executor.key.account, plan.sandbox.kind, executor.environment
        environment.doubt_sandbox(account, kind, plan.probe)
        fresh = await environment.probe_sandbox(account, self._settings.current.sandbox)
        return fresh.of(kind) is not plan.probe.of(kind)

    async def _prepare(self, session: SessionRow, executor: Executor, plan: IsolationPlan) -> None:
        """Let the executor prepare its session, and store the result."""
        settings, environment = self._settings.current, executor.environment
        spool = await self._spool_of(executor)
        directory = await anyio.to_thread.run_sync(
            agent_dir, environment, executor.key.account, self._spool_dir, session.id
        )
        origin = await self._store.write(
            partial(_record_places, session=session, executor=executor.id, spool=spool, directory=directory, plan=plan)
        )
        executor.network = plan.isolation.network  # before the agent asks for its key
        provider, resume = provider_of(session.agent), session.agent_session
        apart, accounts = environment.isolation_offered().separate_account, settings.accounts
        prepare = m.PrepareSession(
            session=session.id,
            agent=session.agent,
            cwd=session.cwd,
            permission_mode=session.permission_mode,
            options=self._unsealed_options(session),
            limits=session.limits,
            spool=str(spool),
            home=executor.key.account.home,
            sandbox=plan.sandbox,
            apart=apart,
            setup=m.AccountSetup(accounts.path, accounts.umask) if apart else m.AccountSetup(),
            instructions=accounts.instructions,
            base_url=settings.provider(provider).base_url if provider is not None else None,
            resume=resume.removeprefix(FORK_MARK) if resume is not None else None,
            fork=resume is not None and resume.startswith(FORK_MARK),
            retries=settings.turns.retries,
            stream_idle=settings.turns.stream_idle,
            real_cwd=session.real_cwd,
            agent_dir=directory,
            resume_from=origin.directories,
            resume_named=origin.is_named,
            recap=await self._store.read(partial(read_recap, session=session.id)) if session.recap_due else None,
            permission_expiry=settings.permissions.expiry,
            spool_bytes=settings.executors.spool,
        )
        executor.has_namespace = plan.sandbox is not None and plan.sandbox.kind == "bubblewrap"
        prepared = await self._send(executor, prepare, settings.executors.prepare_timeout)
        executor.prepared, executor.has_recap = True, prepare.recap is not None
        row = await self._store.write(partial(_record_prepared, session=session, prepared=prepared))
        if row.permission_mode != session.permission_mode:  # changed during the preparation
            await executor.send_mode(row.id, row.permission_mode)

    async def _send(self, executor: Executor, prepare: m.PrepareSession, timeout: float) -> m.Prepared:
        try:
            prepared: m.Prepared = await executor.call("prepare_session", prepare, timeout)
        except HutchError as error:
            error = HutchError(error.reason, self._known.mask_text(error.message), **error.details)
            self._pool.retire(executor, f"it could not open its session: {error.message}")
            raise error from None
        except anyio.get_cancelled_exc_class():
            self._pool.retire(executor, "the session was closed while it was opened")
            raise
        return prepared

    def _unsealed_options(self, session: SessionRow) -> m.AgentOptions:
        """Return the session's options with its MCP servers' settings, which are sealed as they may contain secrets."""
        if session.sealed is None:
            return session.options
        servers = msgspec.json.decode(self._vault.open(session_context(session.id), session.sealed))
        return msgspec.structs.replace(session.options, mcp_servers=servers)

    async def _spool_of(self, executor: Executor) -> Path:
        spool = executor.environment.spool_of(executor.key.account, executor.id)
        if spool is None:
            spool = self._spool_dir / executor.id
            await anyio.to_thread.run_sync(partial(spool.mkdir, mode=0o700, parents=True, exist_ok=True))
        return spool


def _unable(session: SessionRow, executor: Executor, plan: IsolationPlan) -> str | None:
    """Return what a spare of an earlier version cannot do for the session; None if it can do everything."""
    if not executor.adopted:
        return None
    if plan.sandbox is not None and "landlock" not in executor.abilities:  # it would run an empty program
        return "knows neither Landlock nor the filter of system calls"
    if not keeps_conversation(session.agent):
        return None
    if "agent_dir" not in executor.abilities:  # it would look for the conversation, and write, in `~/.claude`
        return "gives sessions no directory of their own"
    if session.recap_due and "recap" not in executor.abilities:
        return "cannot begin a conversation with a recap"
    return None


def _record_prepared(tx: Tx, session: SessionRow, prepared: m.Prepared) -> SessionRow:
    """Record the result of the preparation; report the instruction files if they are others than before."""
    read, now = prepared.instructions, sessions.get(tx, session.id)
    conversation = prepared.agent_session or session.agent_session
    if now is not None and now.agent_session != session.agent_session:  # a late report of an earlier executor
        conversation = now.agent_session
    if read is not None and read != (session.instructions or m.Instructions()):
        events.append(tx, session.id, None, "notice", _instructions_notice(read))
    return sessions.update(
        tx,
        session.id,
        keys=prepared.keys,
        agent_session=conversation,
        cwd=prepared.cwd or session.cwd,
        real_cwd=session.real_cwd or prepared.cwd is not None,
        instructions=read or session.instructions,
    )


def _isolation_notice(session: SessionRow, plan: IsolationPlan) -> Notice | None:
    """Return a notice if the session has another sandbox or less isolation than it had; otherwise None."""
    before, now = session.isolation, plan.isolation
    exposed = plan.keys == "exposed" and session.keys == "brokered"
    other = before.network is not None and before.sandbox != now.sandbox  # earlier versions recorded neither
    if not (exposed or other or is_less(now.level, before.level)):
        return None
    message = f"The isolation of this session is {now.level} now, keys: {plan.keys}. {now.why}"
    return Notice("isolation", message, {"sandbox": now.sandbox, "level": now.level, "keys": plan.keys})


def _instructions_notice(read: m.Instructions) -> Notice:
    given = f"{len(read.given)} instruction file{'' if len(read.given) == 1 else 's'}"
    cut = [f"{file.path}: {file.why}" for file in read.given if file.why]
    left_out = [f"{file.path}: {file.why}" for file in read.left_out]
    message = f"The agent was given {given}."
    if cut or left_out:
        shown = "; ".join([*cut, *left_out][:_NAMED])
        more = len(cut) + len(left_out) - _NAMED
        message += f" Not given: {shown}" + (f"; and {more} more." if more > 0 else ".")
    return Notice("instructions", message, msgspec.to_builtins(read))


def _record_places(
    tx: Tx, session: SessionRow, executor: str, spool: Path, directory: str, plan: IsolationPlan
) -> ConversationOrigin:
    """Record the executor's spool, the agent's directory and the planned isolation, which the next hutchd must know.

    Report the isolation if it is another or less than the record says. Return where the conversation may come from.
    """
    executors.update(tx, executor, spool=str(spool))
    if (changed := _isolation_notice(sessions.get(tx, session.id) or session, plan)) is not None:
        events.append(tx, session.id, None, "notice", changed)
    earlier = [session.agent_dir]  # another one if the settings have moved it
    if session.agent_session is not None:
        conversation = session.agent_session.removeprefix(FORK_MARK)
        earlier += [row.agent_dir for row in sessions.ancestors(tx, session)]
        earlier += [row.agent_dir for row in sessions.of_conversation(tx, session, conversation)]
    sessions.update(tx, session.id, agent_dir=directory, isolation=plan.isolation, keys=plan.keys)
    named = session.agent_session is not None and session.forked_from is None
    return ConversationOrigin(
        tuple(dict.fromkeys(one for one in earlier if one is not None and one != directory)),
        named and not turns.has_begun(tx, session.id),
    )
