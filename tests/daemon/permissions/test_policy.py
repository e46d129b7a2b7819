"""Decisions of the policy, each with its sentence."""

from __future__ import annotations

from typing import get_args

import pytest

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import Verdict, judge, paths_to_resolve
from hutch_daemon.permissions.rules import LayerName
from hutch_shared.messages import PermissionMode, ToolCall
from hutch_shared.vocabulary import to_call

LAYERS: tuple[LayerName, ...] = get_args(LayerName)


def decide(
    layer: Layer,
    tool: str,
    text: str,
    mode: PermissionMode = "ask",
    real: dict[str, str] | None = None,
    cwd: str = "/w",
) -> Verdict:
    key = {"Bash": "command", "WebFetch": "url"}.get(tool, "file_path")
    call = to_call(tool, {key: text}, "c", cwd)
    found = {path: path for path in paths_to_resolve(call, cwd, "/home/u")} if real is None else real
    policy = compile_policy([layer], home="/home/u")
    return judge(policy, call, mode=mode, cwd=cwd, real=found, home="/home/u", workspace="/w")


def test_a_verdict_names_the_rule_its_layer_and_what_it_matched() -> None:
    """The user sees the deciding rule, its layer, and the part of the call that it matched."""
    verdict = decide(Layer("account", deny=("Bash(rm:*)",), origin="~/policy.toml"), "Bash", "ls; rm -f x")

    assert verdict.decision == "deny"
    assert (verdict.rule, verdict.layer) == ("Bash(rm:*)", "account")
    assert verdict.why == "Bash(rm:*) (~/policy.toml) denies rm -f x."
    assert verdict.programs == (("ls",), ("rm", "-f", "x"))


def test_a_request_names_the_command_without_a_rule() -> None:
    """The reason is one sentence that names the command."""
    assert decide(Layer("account", allow=("Bash(ls:*)",)), "Bash", "ls && id").why == "No rule allows `id`."


def test_a_rule_that_is_not_enough_says_why() -> None:
    """If a rule matches but the program could run something else, the request names both."""
    verdict = decide(Layer("account", allow=("Bash(sort:*)",)), "Bash", "sort -o x y")

    assert verdict.why == "`Bash(sort:*)` does not cover this: sort -o may write files or run programs."


def test_an_unresolved_path_is_not_allowed() -> None:
    """An allow rule needs the path as the account resolved it; a deny rule does not."""
    layer = Layer("account", allow=("Edit(src/**)",), deny=("Edit(/src/x)",), base="/w")

    assert decide(layer, "Edit", "src/a", real={}).decision == "ask"
    assert decide(layer, "Edit", "src/x", real={}).decision == "deny"
    assert decide(layer, "Edit", "src/a", real={"/w/src/a": "/w/src/a"}).decision == "allow"


def test_an_unresolved_operand_may_be_a_denied_file() -> None:
    """If a rule denies files, a command is allowed only if its operands are resolved."""
    layer = Layer("account", allow=("Bash(cat:*)",), deny=("Read(.env)",))

    assert decide(layer, "Bash", "cat a", real={}).decision == "ask"
    assert decide(layer, "Bash", "cat a", real={"/w/a": "/w/a"}).decision == "allow"
    assert decide(layer, "Bash", "cat a", real={"/w/a": "/w/.env"}).decision == "deny"
    assert decide(layer, "Bash", "cat a", "bypass", real={}).decision == "ask"


def test_a_path_is_resolved_before_its_dots_are_removed() -> None:
    """`link/../x` lies beside the link's target; that path is judged."""
    layer = Layer("account", allow=("Edit(**)",), deny=("Edit(//etc/**)",))

    assert decide(layer, "Edit", "link/../x", real={"/w/link/../x": "/etc/x"}).decision == "deny"
    assert paths_to_resolve(to_call("Edit", {"file_path": "link/../x"}, "c", "/w"), "/w", "/home/u") == (
        "/w/link/../x",
    )


def test_paths_of_a_command_are_to_be_resolved() -> None:
    """These are operands, redirections and the directories of `cd`."""
    paths = paths_to_resolve(to_call("Bash", {"command": "cd sub && cat a --file=b > ~/c"}, "c", "/w"), "/w", "/home/u")

    assert {"/w/sub", "/w/sub/a", "/w/a", "/w/b", "/home/u/c"} <= set(paths)


def test_paths_of_a_command_are_bounded() -> None:
    """The executor need not resolve every word of a long line."""
    assert (
        len(
            paths_to_resolve(
                to_call("Bash", {"command": "ls " + "a " * 4000 + " ".join(map(str, range(900)))}, "c", "/w"), "/w", "/"
            )
        )
        <= 200
    )


@pytest.mark.parametrize("tool", ["Bash", "Read", "Edit", "Grep", "WebFetch", "mcp__a__b", "mcp__", "Other"])
@pytest.mark.parametrize(("mode", "wanted"), [("ask", "ask"), ("unattended", "deny")])
def test_every_input_gets_a_decision(tool: str, mode: PermissionMode, wanted: str) -> None:
    """Malformed input is asked about or denied, and never raises."""
    layer = Layer("account", ask=("Read(a)",), deny=("Bash(rm:*)", "Read(.env)", "WebFetch(domain:evil.test)"))

    for text in ("", "\x00", "\ud800", "a" * 100_000, "(" * 20_000, "'", "$(", "\r\n", "/" * 5000, "~" * 50):
        decision = decide(layer, tool, text, mode).decision
        assert decision == wanted or (tool in {"Read", "Grep"} and decision == "allow"), text


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("Bash", {"command": "ls"}),
        *((tool, {"file_path": "/w/a"}) for tool in ("Read", "NotebookRead", "Edit", "MultiEdit", "Write")),
        ("NotebookEdit", {"notebook_path": "/w/a"}),
        *((tool, {"pattern": "a"}) for tool in ("Grep", "Glob", "LS")),
        ("WebFetch", {"url": "https://a.test"}),
        *((tool, {}) for tool in ("WebSearch", "Task", "TodoWrite", "BashOutput", "mcp__a__b", "Whatever")),
    ],
)
@pytest.mark.parametrize("mode", ["ask", "bypass"])
def test_a_deny_rule_for_a_tool_denies_each_of_its_calls(
    tool: str, given: dict[str, str], mode: PermissionMode
) -> None:
    """Rules and calls classify tools alike."""
    policy = compile_policy([Layer("account", deny=(tool,))], home="/home/u")
    call = to_call(tool, given, "c", "/w")
    real = {path: path for path in paths_to_resolve(call, "/w", "/home/u")}

    verdict = judge(policy, call, mode=mode, cwd="/w", real=real, home="/home/u", workspace="/w")

    assert (policy.problems, verdict.decision, verdict.rule) == ((), "deny", tool)


@pytest.mark.parametrize(("tool", "given"), [("WebSearch", {"query": "q"}), ("LS", {"path": "/etc"})])
def test_an_allow_rule_for_a_tool_allows_its_calls(tool: str, given: dict[str, str]) -> None:
    """A tool that a rule allows by its name runs without a request."""
    policy = compile_policy([Layer("account", allow=(tool,))], home="/home/u")

    verdict = judge(
        policy,
        to_call(tool, given, "c", "/w"),
        mode="unattended",
        cwd="/w",
        real={"/etc": "/etc"},
        home="/home/u",
        workspace="/w",
    )

    assert (verdict.decision, verdict.rule) == ("allow", tool)


def test_a_call_without_its_subject_is_asked_about() -> None:
    """A rule with a pattern cannot allow a call that lacks the field it matches."""
    policy = compile_policy([Layer("account", allow=("Bash", "Read", "Edit", "WebFetch"))], home="/home/u")

    for action in ("run_command", "read", "edit", "fetch", "search"):
        call = ToolCall(call_id="1", action=action, agent_tool="X", input={})
        verdict = judge(policy, call, mode="ask", cwd="/w", real={}, home="/home/u", workspace="/w")
        assert verdict.decision == "ask", action


@pytest.mark.parametrize("mode", ["ask", "accept_edits", "plan", "bypass"])
def test_the_user_decides_questions_and_plans(mode: PermissionMode) -> None:
    """No rule and no mode decides them."""
    layer = Layer("account", allow=("AskUserQuestion", "ExitPlanMode"))

    assert decide(layer, "AskUserQuestion", "x", mode).decision == "ask"
    assert decide(layer, "ExitPlanMode", "x", mode).decision == "ask"


def test_the_unattended_mode_never_asks() -> None:
    """A call that would be asked about is denied, with that reason and without suggestions."""
    verdict = decide(Layer("account"), "Bash", "git status", "unattended")

    assert (verdict.decision, verdict.suggestions) == ("deny", ())
    assert verdict.why == "The mode unattended denies a call that would ask. No rule allows `git status`."


@pytest.mark.parametrize("mode", get_args(PermissionMode))
@pytest.mark.parametrize("denied_in", LAYERS)
def test_a_deny_of_any_layer_beats_an_allow_of_every_layer(denied_in: str, mode: PermissionMode) -> None:
    """The mode does not matter."""
    layers = [
        Layer(name, allow=("Bash(make:*)",), deny=("Bash(make deploy:*)",) if name == denied_in else (), trusted=True)
        for name in LAYERS
    ]
    call = to_call("Bash", {"command": "make deploy now"}, "c", "/w")

    verdict = judge(
        compile_policy(layers, home="/h"), call, mode=mode, cwd="/w", real={"/w": "/w"}, home="/h", workspace="/w"
    )

    assert (verdict.decision, verdict.layer) == ("deny", denied_in)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("Bash(./build.sh)", "./build.sh"),
        ("Bash(./build.sh:*)", "./build.sh -q"),
        ("Bash(python3 tools/x.py:*)", "python3 -u tools/x.py"),
        ("Bash(source env)", "source env"),
        ("Bash(for f in a; do ./x $f; done)", "for f in a; do ./x $f; done"),
    ],
)
def test_a_relative_path_in_a_rule_means_the_work_directory(rule: str, line: str) -> None:
    """If the agent changed the directory, the same relative path is another file."""
    layer = Layer("account", allow=(rule, "Bash(python3 -u tools/x.py:*)", "Bash(ls:*)"))

    assert decide(layer, "Bash", line).decision == "allow"
    elsewhere = decide(layer, "Bash", line, cwd="/w/sub")
    assert (elsewhere.decision, elsewhere.suggestions) == ("ask", ())
    assert decide(layer, "Bash", "ls x", cwd="/w/sub").decision == "allow"


BYPASS = Layer("account", allow=("Bash",))
HOME = "/home/u"


@pytest.mark.parametrize(
    "line",
    [
        "rm -rf /",
        "rm -r ~",
        "rm --recursive /home",
        "rm -R /home/u/*",
        "rm -rf $HOME",
        'rm -rf "$X"',
        "rm -rf `pwd`",
        "find / -delete",
        "find ~ -name x -delete",
        "cd / && rm -rf *",
        "sudo rm -rf /",
    ],
)
def test_removing_the_root_or_the_home_asks_in_the_mode_bypass(line: str) -> None:
    """Even a rule that allows every command does not allow it."""
    assert decide(BYPASS, "Bash", line, "bypass").decision == "ask"


@pytest.mark.parametrize(
    "line",
    [
        "rm -rf build",
        "rm /home/u/x",
        "rm -f ~",  # without -r, rm refuses a directory
        "rm -rf ~/project",
        "rm -rf x*",  # only names in the work directory
        "find . -name x",
        "find / -name x",  # removes nothing
        "find ~/project -delete",
        "find $X -name x",
        "find x* -delete",
        "ls -R /",
        "ls -delete /",  # ls deletes nothing
        "cp -r / x",
        "chmod -R 755 *",
        "grep -r $X .",
    ],
)
def test_other_commands_pass_in_the_mode_bypass(line: str) -> None:
    """Only recursive `rm` and `find -delete` are checked, and only against the root, the home and its parents."""
    verdict = decide(Layer("account"), "Bash", line, "bypass")

    assert verdict.decision == "allow", verdict.why


def test_a_find_that_deletes_below_an_unknown_name_is_not_taken_for_the_home() -> None:
    """In the mode `bypass`, an unknown name makes `rm -rf` ask, but not `find -delete`."""
    assert decide(Layer("account"), "Bash", "find $X -delete", "bypass").decision == "allow"
    assert decide(Layer("account"), "Bash", "rm -rf $X", "bypass").decision == "ask"


@pytest.mark.parametrize(("rule", "decision"), [("Read", "allow"), ("Read(x)", "deny"), ("Edit", "allow")])
def test_a_bare_read_rule_covers_only_the_agents_own_tools(rule: str, decision: str) -> None:
    """Nearly every command reads files, so only a rule with a pattern covers the files of commands."""
    assert decide(Layer("account", allow=("Bash(cat:*)",), deny=(rule,)), "Bash", "cat x").decision == decision


def test_a_bare_edit_rule_covers_the_files_that_commands_write() -> None:
    """`Edit` in deny denies a redirection too."""
    assert decide(Layer("account", allow=("Bash(cat:*)",), deny=("Edit",)), "Bash", "cat x > y").decision == "deny"


def test_a_search_of_the_work_directory_may_read_a_denied_file() -> None:
    """A recursive search without a directory reads the working directory."""
    layer = Layer("account", allow=("Bash(rg:*)", "Bash(ls:*)"), deny=("Read(src/secret/**)",))

    assert decide(layer, "Bash", "rg KEY").decision == "ask"
    assert decide(layer, "Bash", "ls -l").decision == "allow"


@pytest.mark.parametrize(
    ("rule", "decision"),
    [("WebFetch", "allow"), ("WebFetch(domain:x.test)", "deny"), ("WebFetch(domain:y.test)", "allow")],
)
def test_a_bare_web_rule_covers_only_the_agents_own_tools(rule: str, decision: str) -> None:
    """Only a rule with a host covers the addresses in commands."""
    layer = Layer("account", allow=("Bash(curl:*)",), deny=(rule,))

    assert decide(layer, "Bash", "curl http://x.test/a").decision == decision


def test_bypass_asks_about_an_unreadable_line_even_without_rules() -> None:
    """A line with control characters might remove the home; an unresolved file only matters to rules."""
    assert decide(Layer("account"), "Bash", "ls \x01", "bypass").decision == "ask"
    assert decide(Layer("account"), "Edit", "a", "bypass", real={}).decision == "allow"
