"""policy: show, explain, test and change the rules."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, group, output
from hutch_client.commands.sessions import MODES, real_directory
from hutch_client.tables import count, fields, print_json
from hutch_client.untrusted import one_line, visible
from hutch_shared.encoding import require_utf8
from hutch_shared.errors import HutchError, Reason
from hutch_shared.project_file import POLICY_FILE, UNUSABLE, PolicyFile, read_project_file

__all__ = ["COMMANDS", "tool_input"]

_EFFECTS = ("deny", "ask", "allow")
_MAIN_PARAMETER = {
    "Bash": "command",
    "Read": "file_path",
    "Edit": "file_path",
    "Write": "file_path",
    "MultiEdit": "file_path",
    "NotebookEdit": "notebook_path",
    "Glob": "pattern",
    "Grep": "pattern",
    "WebFetch": "url",
    "WebSearch": "query",
}


def _output(parser: argparse.ArgumentParser) -> None:
    output(parser, "text", "json")


def _place_arguments(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--session", metavar="SESSION", help="in this session: id, prefix of an id, or name")
    place.add_argument("-C", "--directory", metavar="DIR", help="in this directory (default: the current one)")


def _place(hutch: BlockingConnection, given: argparse.Namespace) -> dict[str, Any]:
    if given.session:
        session = hutch.call("get_session", session=given.session)
        place, cwd = {"session": session["id"]}, session["cwd"]
    else:
        cwd = real_directory(given.directory)
        place = {"cwd": cwd}
    project = read_project_file(cwd)
    if project is None or (given.session and project.text.startswith(UNUSABLE)):
        return place  # hutchd uses the file that the session's executor sent last, if there is one
    return {**place, "project": project._asdict()}


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _place_arguments(parser)
    _output(parser)


def _show(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        view = hutch.call("show_policy", **_place(hutch, given))
    if given.output == "json":
        print_json(view)
        return exits.OK
    print(f"mode: {view['mode']}{', bypass forbidden by the host' if view.get('bypass_forbidden') else ''}")
    for layer in view["layers"]:
        remarks = [] if layer.get("in_force", True) else ["NOT in force"]
        remarks += [f"({one_line(layer['note'])})"] if layer.get("note") else []
        print("\n" + "  ".join([one_line(layer["name"]), one_line(layer["origin"]), *remarks]))
        for effect in _EFFECTS:
            for rule in layer["rules"].get(effect, ()):
                print(f"  {effect:<6}{one_line(rule)}")
    for problem in view.get("problems", ()):
        print(f"! {one_line(problem)}", file=sys.stderr)
    return exits.OK


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tool", metavar="TOOL", help="such as Bash, Edit, WebFetch, mcp__server__tool")
    parser.add_argument("input", metavar="INPUT", help="the command, path, URL or query; or the whole input as JSON")
    parser.add_argument("--mode", choices=MODES, help="as if in this mode")
    _place_arguments(parser)
    _output(parser)


def tool_input(tool: str, text: str) -> dict[str, Any]:
    """Return the tool input that `text` gives, either as a JSON object or as the tool's main parameter.

    Raises HutchError INVALID_PARAMS.
    """
    if text.lstrip().startswith("{") and tool != "Bash":
        try:
            given: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise HutchError(Reason.INVALID_PARAMS, f"The input is not a JSON object: {error}.") from None
        return given
    name = _MAIN_PARAMETER.get(tool)
    if name is None:
        raise HutchError(Reason.INVALID_PARAMS, f"Give the input of {tool} as a JSON object.")
    return {name: text}


def _explain(given: argparse.Namespace) -> int:
    asked = tool_input(given.tool, given.input)
    with BlockingConnection() as hutch:
        place = _place(hutch, given)
        verdict = hutch.call("explain_policy", agent_tool=given.tool, input=asked, mode=given.mode, **place)
    if given.output == "json":
        print_json(verdict)
        return exits.OK
    print(
        fields(
            [
                ("decision", verdict["decision"]),
                ("rule", verdict.get("rule")),
                ("layer", verdict.get("layer")),
                ("why", verdict["why"]),
                *(("program", " ".join(words)) for words in verdict.get("programs", ())),
                *(
                    ("always", " — ".join(filter(None, (one["rule"], one.get("note")))))
                    for one in verdict.get("suggestions", ())
                ),
                *(("problem", problem) for problem in verdict.get("problems", ())),
            ]
        )
    )
    return exits.OK


def _test_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="JSON lines, each a case; - for standard input")
    _output(parser)


def _test(given: argparse.Namespace) -> int:
    try:
        cases = sys.stdin.read() if given.file == "-" else _read(given.file)
    except OSError as error:
        raise HutchError(Reason.INVALID_PARAMS, f"{given.file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise HutchError(Reason.INVALID_PARAMS, f"{given.file} cannot be read: it is not UTF-8.") from None
    with BlockingConnection(timeout=300.0) as hutch:
        report = hutch.call("test_policy", cases=cases)
    bad = [(title, report.get(name, ())) for name, title in _FAULTS.items()]
    if given.output == "json":
        print_json(report)
    else:
        print(f"{report['right']} of {count(report['total'], 'case')} right")
        for title, ids in bad:
            print(f"{title}: {len(ids)}{''.join(f' {one_line(one)}' for one in ids)}")
        for case in report.get("cases", ()):
            if not case["right"]:
                line = f"{case['id']}: wanted {case['want']}, got {case['got']}: {case.get('why', '')}"
                print(f"  {one_line(line)}")
    return exits.FAILED if report.get("unsafe_allows") or report.get("missed_denies") else exits.OK


_FAULTS = {"unsafe_allows": "unsafe allows", "missed_denies": "missed denies", "needless_asks": "needless asks"}


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _change_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("effect", choices=_EFFECTS, help="deny beats ask, and ask beats allow")
    parser.add_argument("rules", metavar="RULE", nargs="+", help="such as 'Bash(npm run test:*)'")
    parser.add_argument("-C", "--directory", metavar="DIR", help="only for this project (default: for all projects)")


def _change(given: argparse.Namespace, what: str) -> int:
    cwd = real_directory(given.directory) if given.directory else None
    with BlockingConnection() as hutch:
        view = hutch.call("change_rules", **{what: {given.effect: given.rules}}, cwd=cwd)
    for problem in view.get("problems", ()):
        print(f"! {one_line(problem)}", file=sys.stderr)
    return exits.OK


def _trust_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="DIR", nargs="?", default=".", help="the project (default: the current directory)"
    )


def _trust(given: argparse.Namespace, *, trust: bool) -> int:
    cwd = require_utf8(os.path.realpath(given.path))
    project = read_project_file(cwd)
    if project is None and trust:
        raise HutchError(Reason.NOT_FOUND, f"There is no policy file to trust: {cwd} has no {'/'.join(POLICY_FILE)}.")
    if project is None:
        project = PolicyFile(os.path.join(cwd, *POLICY_FILE), "", "")
    elif trust and project.text.startswith(UNUSABLE):
        raise HutchError(
            Reason.INVALID_PARAMS, f"{project.path} cannot be used: {project.text.removeprefix(UNUSABLE)}."
        )
    with BlockingConnection() as hutch:
        hutch.call("trust_policy", path=project.path, digest=project.digest, trust=trust)
        problems = hutch.call("show_policy", cwd=cwd, project=project._asdict()).get("problems", ()) if trust else ()
    if trust:
        print(f"{visible(project.text).rstrip()}\n", file=sys.stderr)
        print(f"Trusted, until it changes: {project.path} (sha256 {project.digest[:12]}…)", file=sys.stderr)
        for problem in problems:
            print(f"! {one_line(problem)}", file=sys.stderr)
    else:
        print(f"No longer trusted: {project.path}", file=sys.stderr)
    return exits.OK


_VERBS = {
    "show": Command(_show_arguments, _show, "Show the rules in force, layer by layer."),
    "explain": Command(_explain_arguments, _explain, "Show the verdict on a tool call, and the rule behind it."),
    "test": Command(_test_arguments, _test, "Run cases; exit 1 on an unsafe allow or a missed deny."),
    "add": Command(_change_arguments, lambda given: _change(given, "add"), "Add rules of your own."),
    "remove": Command(_change_arguments, lambda given: _change(given, "remove"), "Remove rules of your own."),
    "trust": Command(
        _trust_arguments,
        lambda given: _trust(given, trust=True),
        "Trust a project's policy file in its current content: then its allow rules apply.",
    ),
    "distrust": Command(
        _trust_arguments,
        lambda given: _trust(given, trust=False),
        "End that trust: then only its deny and ask rules apply.",
    ),
}
COMMANDS = {"policy": group(_VERBS, "Show, explain, test and change rules.")}
