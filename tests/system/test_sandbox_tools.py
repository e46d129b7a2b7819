"""The real CLI and ten ordinary tools work in each sandbox."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator

import pytest

from hutch_shared import messages as m
from tests.programs import bubblewrap, landlock_holds, required_program
from tests.rehearsal import Model, Say, Steps, Use
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

_WHEEL = """
import zipfile
with zipfile.ZipFile("given-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("given/__init__.py", "")
    wheel.writestr("given-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: given\\nVersion: 1.0\\n")
    wheel.writestr("given-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("given-1.0.dist-info/RECORD", "")
"""
_SERVER = """
import http.server, threading, urllib.request
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("status", urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").status)
"""
_PYTHON = shlex.quote(sys.executable)
TOOLS = {
    "git": (
        (
            "git init -q r && cd r && git config user.name n && git config user.email n@example.com && echo 1 > a &&"
            " git add a && git commit -qm one && git clone -q . ../clone && git -C ../clone log --oneline | wc -l"
        ),
        "1",
    ),
    "pip": (
        (
            f"{_PYTHON} -c {shlex.quote(_WHEEL)} && {_PYTHON} -m pip install -q --no-index --target site given-1.0*.whl"
            " && ls -d site/given"
        ),
        "site/given",
    ),
    "venv": (f"{_PYTHON} -m venv --without-pip v && v/bin/python -c 'print(6 * 7)'", "42"),
    "npm": (
        (
            'mkdir n && cd n && printf \'{"name":"n","version":"1.0.0","scripts":{"t":"node -p 6*7"}}\' > package.json'
            " && npm pack --silent && npm install --silent --no-audit --no-fund ./n-1.0.0.tgz; npm run -s t"
        ),
        "42",
    ),
    "make": (
        ("printf 'all:\\n\\techo made > out\\n\\tinstall -m 755 out in\\n' > Makefile && make -s && ls -l in"),
        "rwxr-xr-x",
    ),
    "cc": ("echo 'int main(void) { return 42; }' > c.c && cc c.c -o c; ./c; echo $?", "42"),
    "pytest": (
        (
            f"printf 'def test_it(tmp_path):\\n    assert tmp_path.exists()\\n' > test_it.py && {_PYTHON} -m pytest -q"
            " -p no:cacheprovider test_it.py"
        ),
        "1 passed",
    ),
    "a server on loopback": (f"{_PYTHON} -c {shlex.quote(_SERVER)} 2>/dev/null", "status 200"),
    "tar": (
        ("mkdir t && touch t/x && chmod 751 t/x && tar cf t.tar t && rm -r t && tar xf t.tar && ls -l t/x"),
        "rwxr-x--x",
    ),
    "a script with a here-document": (
        ("cat <<E > s && chmod +x s && ./s\n#!/bin/sh\nmktemp >/dev/null && echo 42\nE"),
        "42",
    ),
}
"""Each tool: a command, and words of its output when it works."""


@pytest.fixture(params=["bubblewrap", "landlock"])
async def sandboxed(request: pytest.FixtureRequest, model: Model) -> AsyncIterator[tuple[Host, m.SandboxKind]]:
    """A host whose sessions have that sandbox."""
    kind: m.SandboxKind = request.param
    if kind == "bubblewrap":
        bubblewrap()
    elif not landlock_holds():
        pytest.skip("kernel: it has no Landlock")
    for name in ("npm", "make", "cc"):
        required_program(name)
    async with host(settings_for(model) + f'[sandbox]\nkind = "{kind}"\n') as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made, kind


async def test_ten_ordinary_tools_work(sandboxed: tuple[Host, m.SandboxKind], model: Model) -> None:
    """The CLI starts, answers a prompt and runs each tool as its shell's command; the key stays home."""
    made, kind = sandboxed
    model.script = Steps(
        ("go", [Use("Bash", {"command": command}) for command, _ in TOOLS.values()]), ("", Say("done"))
    )
    async with made.client() as hutch:
        session = await made.claude(hutch, "tools")
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
            said = [result.text for result in log.of("tool_result")]
        session = await hutch.get_session(session.id)

    assert end.state == "completed", end
    assert (session.keys, session.isolation.sandbox) == ("brokered", kind)
    assert {tool: text for tool, text in zip(TOOLS, said, strict=True) if TOOLS[tool][1] not in text} == {}
