"""The network that the real CLI and its commands reach with each setting."""

from __future__ import annotations

import http.server
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.programs import bubblewrap, landlock_holds, link_programs
from tests.rehearsal import Model, Say, Steps, Use
from tests.sampling import sample
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ASK = (
    "export PATH=/usr/bin:/bin; for port in %d %d; do curl -sS -m 20 http://127.0.0.1:$port/ 2>&1; echo; done;"
    " env | grep -i _proxy= | grep -vc ^NODE"
)


class Page(http.server.BaseHTTPRequestHandler):
    """Answers each request with its port."""

    def do_GET(self) -> None:
        """Answer with the port."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"PAGE %d" % self.connection.getsockname()[1])

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def pages() -> Iterator[tuple[int, int]]:
    """Two web servers on loopback."""
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers[0].server_port, servers[1].server_port
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
async def reloaded(model: Model) -> AsyncIterator[Host]:
    """A host with a key; each test replaces its settings."""
    async with host(settings_for(model), env={"HTTPS_PROXY": "http://127.0.0.1:9"}) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


@pytest.fixture(scope="module")
async def bare(model: Model, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """A host without bubblewrap."""
    path = tmp_path_factory.mktemp("bin")
    link_programs(path)
    async with host(settings_for(model), env={"PATH": str(path)}) as made:
        yield made


async def ask(on: Host, model: Model, pages: tuple[int, int]) -> tuple[m.Session, str]:
    """Make an agent call both servers; return its session and its command's output."""
    model.script = Steps(("go", Use("Bash", {"command": ASK % pages})), ("", Say("done")))
    async with on.client() as hutch:
        session = await on.claude(hutch, "asked")
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
            assert end.state == "completed", end
            (said,) = log.of("tool_result")
        return await hutch.get_session(session.id), said.text


@sample(2)
@pytest.mark.parametrize("network", ["full", "broker-only", "allow-list"])
async def test_an_agent_reaches_its_model_and_the_network_of_the_settings(
    reloaded: Host, model: Model, pages: tuple[int, int], network: str
) -> None:
    """With every setting only the broker calls the model, and it keeps the key."""
    bubblewrap()
    model.key = KEY
    settings = f'[sandbox]\nnetwork = "{network}"\nallow = ["127.0.0.1:{pages[0]}"]\n'
    await reloaded.reload(settings_for(model, settings))
    session, said = await ask(reloaded, model, pages)

    reached = {"full": {*pages}, "broker-only": set(), "allow-list": {pages[0]}}[network]
    assert session.keys == "brokered"
    assert session.isolation is not None
    assert {page for page in pages if f"PAGE {page}" in said} == reached
    assert ("[sandbox] allow" in said) == (network == "allow-list")
    assert int(said.split()[-1]) == {"full": 1, "broker-only": 0, "allow-list": 8}[network]


@sample(1)
@pytest.mark.parametrize("network", ["full", "broker-only", "allow-list"])
async def test_a_search_by_the_provider_follows_the_network(reloaded: Host, model: Model, network: str) -> None:
    """With a limited network the CLI's search fails as a tool and reaches no provider; the turn goes on."""
    bubblewrap()
    model.key = KEY
    await reloaded.reload(settings_for(model, f'[sandbox]\nnetwork = "{network}"\n'))
    model.script = Steps(
        ("go", Use("WebSearch", {"query": "hutch"})), ("web search", Say("Found it.")), ("", Say("done"))
    )
    before = len(model.requests)
    async with reloaded.client() as hutch:
        session = await reloaded.claude(hutch, "searching")
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
            (said,) = log.of("tool_result")
    searches = [b'"type":"web_search_' in request.raw for request in model.requests[before:]]

    assert end.state == "completed"
    assert any(searches) == (network == "full")
    assert ("the provider would use its own network" in said.text) == (network != "full"), said


@sample(1)
@pytest.mark.parametrize("network", ["full", "broker-only", "allow-list"])
async def test_a_script_agent_has_the_same_sandbox(
    reloaded: Host, model: Model, pages: tuple[int, int], network: str
) -> None:
    """If the settings require a sandbox, it reaches the network of the settings and no more."""
    bubblewrap()
    settings = f'[sandbox]\nmode = "require"\nnetwork = "{network}"\nallow = ["127.0.0.1:{pages[0]}"]\n'
    line = {"tool": "Bash", "input": {"command": f"{ASK % pages}; ls -d /proc/[0-9]* | wc -l"}, "run": True}
    await reloaded.reload(settings_for(model, settings))
    async with reloaded.client() as hutch:
        session = await reloaded.script(hutch, [line], permission_mode="bypass")
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
            (said,) = log.of("tool_result")
    reached = {"full": {*pages}, "broker-only": set(), "allow-list": {pages[0]}}[network]

    assert end.state == "completed"
    assert {page for page in pages if f"PAGE {page}" in said.text} == reached
    assert int(said.text.split()[-1]) < 10


@sample(1)
@pytest.mark.parametrize("agent", ["claude", "script"])
@pytest.mark.parametrize("network", ["full", "broker-only"])
async def test_without_bubblewrap_landlock_limits_the_network(
    bare: Host, model: Model, pages: tuple[int, int], network: str, agent: str
) -> None:
    """The agent reaches its model, and its commands the host's network or none."""
    if not landlock_holds():
        pytest.skip("kernel: it has no Landlock")
    if agent == "claude":
        await bare.hutch("key", "add", "anthropic", input=KEY, code=None)
    model.key = KEY
    await bare.reload(settings_for(model, f'[sandbox]\nmode = "require"\nkind = "any"\nnetwork = "{network}"\n'))
    if agent == "claude":
        session, said = await ask(bare, model, pages)
    else:
        line = {"tool": "Bash", "input": {"command": ASK % pages}, "run": True}
        async with bare.client() as hutch:
            session = await bare.script(hutch, [line], permission_mode="bypass")
            async with log_of(hutch, session) as log:
                await log.play(session, "go")
                said = log.of("tool_result")[0].text

    assert (session.isolation.sandbox, session.isolation.level) == ("landlock", "reduced")
    assert session.keys == ("brokered" if agent == "claude" else "none")
    assert {page for page in pages if f"PAGE {page}" in said} == ({*pages} if network == "full" else set())
    assert ("loopback" in session.isolation.open) == (network == "full")


@sample(2)
@pytest.mark.parametrize("agent", ["claude", "script"])
@pytest.mark.parametrize(
    "settings",
    [
        'mode = "require"',
        'network = "allow-list"',
        'kind = "bubblewrap"\nnetwork = "broker-only"',
        'mode = "off"\nnetwork = "allow-list"',
    ],
)
async def test_without_bubblewrap_no_session_starts_that_requires_a_sandbox(
    bare: Host, model: Model, agent: str, settings: str
) -> None:
    """No session gets less isolation than required: the reason names the setting and the missing part.

    Landlock knows no allow-list.
    """
    await bare.reload(settings_for(model, f"[sandbox]\n{settings}\n"))
    async with bare.client() as hutch:
        with pytest.raises(HutchError) as refused:
            await hutch.open_session(m.OpenSession(agent, str(bare.folder("refused")), permission_mode="bypass"))

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE
    assert settings.splitlines()[-1] in refused.value.message
    assert ("[sandbox] mode" if "off" in settings else "is not installed") in refused.value.message
