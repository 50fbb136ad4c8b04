import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import datasets.utils
import huggingface_hub.utils
import pytest
import torch
import transformers

import fratrie
from fratrie.cli import __main__ as command_line
from fratrie.cli.options import read_options

ROOT = Path(__file__).parents[2]


@dataclass
class _Options:
    rate: float = 1.0
    precision: str | None = None
    files: list[str] = field(default_factory=list)
    overwrite: bool = False
    mixed_precision: str = "yes"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads options from a file with this text and from the words of a command line."""

    def call(text, *words):
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["fratrie test", "--config", str(file), *words])
        return read_options("A command.", _Options)[0]

    return call


def test_a_file_of_options_is_read_as_the_command_line_is(read):
    text = "rate: 1e-3  # a comment\nmixed_precision: no\nfiles: [a.txt, 007]\noverwrite: true\nprecision: null\n"
    assert read(text) == _Options(0.001, None, ["a.txt", "007"], True, "no")


def test_json_is_read_too_and_the_command_line_comes_first(read):
    text = json.dumps({"rate": 0.5, "precision": "int8", "files": ["a", "b"], "overwrite": True})
    assert read(text) == _Options(0.5, "int8", ["a", "b"], True)
    assert read(text, "--rate", "2", "--files", "c", "--overwrite", "false") == _Options(2.0, "int8", ["c"], False)


def test_a_value_in_a_file_may_begin_with_a_dash(read):
    assert read("precision: -1\nfiles: [a]").precision == "-1" and read("precision: --x").precision == "--x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rates: 1", r"there is no option --rates \(did you mean --rate\?\)"),
        ("config: other.yaml", "there is no option --config"),
        ("- rate", "expected a line «option: value»"),
        ("", "expected a line «option: value»"),
        ("rate: [1", "cannot be read as YAML or JSON"),
        ("rate: 1\nfiles: [a]\nrate: 2", "'rate' occurs twice"),
        ('{"rate": 1, "rate": 2}', "'rate' occurs twice"),
        ("rate: [1, 2]", "rate takes one value, not a list"),
        ("rate: many", "invalid float value"),
        ("files:", "files has no value"),
        ("precision: {a: 1}", "precision is nested"),
        ("files: [[a]]", "files is nested"),
        ("files: [a, '']", "--files is empty"),
        ("precision: ''", "precision has no value"),
        ("rate: inf", "--rate inf: expected a finite number"),
    ],
)
def test_a_file_that_holds_no_options_is_refused(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rats", "1"], r"there is no option --rats \(did you mean --rate\?\); --help lists them"),
        (["--rats", "1", "--fils", "a"], r"\(did you mean --rate\?\); there is no option --fils"),
        (["--rate", "1", "2"], "'2' belongs to no option"),
        (["--rate", "many"], "argument --rate: invalid float value: 'many'"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config is given 2 times"),
        (["--config"], "expected one argument"),
    ],
)
def test_mistakes_on_the_command_line_take_one_line(monkeypatch, words, message):
    monkeypatch.setattr(sys, "argv", ["fratrie test", *words])
    with pytest.raises(ValueError, match=message) as caught:
        read_options("A command.", _Options)
    assert "\n" not in str(caught.value)


def test_a_file_of_options_in_another_encoding(read, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_bytes("precision: é".encode("cp1252"))
    monkeypatch.setattr(sys, "argv", ["fratrie test", "--config", str(tmp_path / "run.yaml")])
    with pytest.raises(ValueError, match="not UTF-8 at byte 11: save it"):
        read_options("A command.", _Options)


@pytest.mark.parametrize("hidden", [True, False])
def test_no_progress_means_none_of_hugging_face_either(monkeypatch, hidden):
    @dataclass
    class Options:
        disable_progress: bool = False

    libraries = (datasets.utils, transformers.utils.logging, huggingface_hub.utils)
    with contextlib.ExitStack() as stack:
        for library in libraries:
            on, off = (
                getattr(library, f"{verb}_progress_bar", None) or getattr(library, f"{verb}_progress_bars")
                for verb in ("enable", "disable")
            )
            before = shows_bars(library)
            on()
            stack.callback(on if before else off)
        monkeypatch.setattr(sys, "argv", ["fratrie test", "--disable_progress", str(hidden)])
        read_options("A command.", Options)
        assert [shows_bars(library) for library in libraries] == [not hidden] * 3


def shows_bars(library):
    if library is transformers.utils.logging:
        return library.is_progress_bar_enabled()
    return not library.are_progress_bars_disabled()


def test_help_tells_every_command_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fratrie"])
    command_line.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(command_line.COMMANDS)
    assert all(30 < len(line) < 120 for line in lines)


@pytest.mark.parametrize("words", [[], ["--help"], ["-V"]])
def test_help_and_versions_import_no_library(words):
    """So they are there at once; the whole takes a tenth of a second, and torch alone some."""
    code = "import sys, fratrie_command; fratrie_command.main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    *printed, modules = done.stdout.splitlines()
    assert printed[0].startswith("usage: " if words != ["-V"] else "fratrie ")
    assert not {"fratrie", "torch", "transformers", "numpy", "yaml"} & set(modules.split())


def test_versions_take_one_line(monkeypatch, capsys):
    for word in ("-V", "--version"):
        monkeypatch.setattr(sys, "argv", ["fratrie", word])
        command_line.main()
        own = f"fratrie {fratrie.__version__} (torch {torch.__version__}, transformers {transformers.__version__})"
        assert capsys.readouterr().out == f"{own}\n"


def test_a_command_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fratrie", "fine-tune"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    assert "no command 'fine-tune': there are demo," in capsys.readouterr().err


def test_every_module_with_a_main_is_a_command():
    folder = Path(command_line.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "run(main)" in path.read_text(encoding="utf-8")}
    assert {name.replace("_", "-") for name in modules} == {*command_line.COMMANDS}
    scripts = {path.stem for path in (folder.parents[1] / "scripts").glob("*.py")}
    assert scripts == modules - {"account", "study"}  # which nobody launches on several processes


def test_the_version_of_a_clone_that_is_not_installed(monkeypatch, capsys):
    def known(name):
        if name == "fratrie":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(command_line, "version", known)
    monkeypatch.setattr(sys, "argv", ["fratrie", "--version"])
    command_line.main()
    assert capsys.readouterr().out == f"fratrie {fratrie.__version__} (torch 1, transformers 1)\n"
