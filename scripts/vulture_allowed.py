"""Names that vulture takes for unused, each with the library or protocol that uses it. `scripts/check` reads this file.

Fields of wire types (`messages`, `events`) and of stored rows (`store/rows`) are not checked: the wire and the database
use them.
"""

from typing import Any

_: Any = None

_.disabled  # hutch_broker.agents: logging reads it
_.read_timeout  # hutch_broker.proxy: aiohttp reads it
_.redirect_request  # hutch_daemon.keys.oauth: urllib calls it
_.read_messages  # hutch_executor.runners.claude: claude-agent-sdk calls it
_.__getattr__  # hutch_client: Python calls it for a late import (PEP 562)
_.__init_subclass__  # hutch_executor.runners.claude: Python calls it for a subclass
_.create_module  # hutch_executor.runners.claude: the import system calls it
_.exec_module  # hutch_executor.runners.claude: the import system calls it
_.formatter_class  # hutch_client.commands.completion: argparse reads it
_.completer  # hutch_client.commands.completion: argcomplete reads it
_.comment_ws  # hutch_client.commands.config: tomlkit reads it
_._value_  # hutch_shared.errors: enum reads it
_.jsonrpc  # hutch_shared.rpc.envelope: msgspec checks the member
_.trace  # hutch_shared.unix: a parameter of __exit__
_.extra_attributes  # hutch_shared.rpc.stream: anyio reads it
_.kwargs  # hutch_shared.rpc.dispatch: a parameter of Signature.bind
_.in_memory  # hutch_executor.events.outbox: tests watch the bound
_.in_flight  # hutch_shared.rpc.conversation: tests watch the bound
_.needless_denies  # hutch_daemon.permissions.cases: the report of the policy tests
_.backlog  # hutch_shared.rpc.peer: tests watch the bound
