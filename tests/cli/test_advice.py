"""Every option that a message names is one of the command that shows it."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from fratrie.cli.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--(\w+)")
LAUNCHER = {"cpu", "num_processes", "multi_gpu"}  # options of `accelerate launch`
# Advice that a command never comes to, since it gives what the advice would have it give.
NEVER = {"_advice": {"evaluate"}}
FIXED = ("demo", "compare-mixers", "study")  # choose the options of a training themselves


class Module:
    """The definitions of a file and where its imported names come from."""

    def __init__(self, path):
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.definitions = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        self.origins = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fratrie")):
                above = path.parents[node.level - 1] if node.level else ROOT
                source = above.joinpath(*(node.module or "").split("."))
                self.origins |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}


@cache
def module(path):
    return next((Module(file) for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def resolved(path, name):
    """The file and name of a definition that `name` means in the module `path`; nothing where it is not ours."""
    if (here := module(path)) is None:
        return None
    if name in here.definitions:
        return path, name
    source, original = here.origins.get(name, (None, None))
    if source is None:
        return None
    return (source / original, None) if module(source / original) else resolved(source, original)


def uses(path, node):
    """What the code of a node may call: functions and classes by their names, and those of imported modules."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield resolved(path, part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            found = resolved(path, part.value.id)
            if found and found[1] is None:
                yield resolved(found[0], part.attr)


def reached(path):
    """Every definition that a command may come to."""
    done, waiting = set(), [*uses(path, module(path).tree)]
    while waiting:
        found = waiting.pop()
        if found and found[1] and found not in done:
            done.add(found)
            waiting += uses(found[0], module(found[0]).definitions[found[1]])
    return done


def said(node):
    """The options that its strings name, but for docstrings."""
    documents = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Expr)}
    texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and id(part) not in documents]
    return {flag for text in texts if isinstance(text.value, str) for flag in FLAG.findall(text.value)}


@pytest.mark.parametrize("command", COMMANDS)
def test_messages_name_options_of_their_command(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", ["fratrie", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    options = set(FLAG.findall(capsys.readouterr().out)) | LAUNCHER
    path = ROOT / "fratrie" / "cli" / command.replace("-", "_")
    wrong = {"the command": said(module(path).tree) - options}
    for source, name in reached(path):
        if command not in (*FIXED, *NEVER.get(name, ())):
            wrong[f"{source}: {name}"] = said(module(source).definitions[name]) - options
    assert not {place: flags for place, flags in wrong.items() if flags}


def test_the_search_finds_what_it_looks_for():
    names = {name for _, name in reached(ROOT / "fratrie" / "cli" / "finetune")}
    assert {
        "_advice",
        "check_every_label_occurs",
        "_check_nothing_is_replaced",
        "checkpoint_folder",
        "portable_path",
    } <= names
    assert "allow_missing_labels" in said(module(ROOT / "fratrie/training/tasks").tree)
