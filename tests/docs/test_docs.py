"""Every code block of docs/ runs, in the order of its page, in an empty folder beside the scripts.

`bash` blocks run in a shell, `python` blocks in one namespace a page (as a doctest where they have prompts), and a
`text` block is what the block before it printed, with `...` for what may differ.
"""

import contextlib
import dataclasses
import doctest
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from transformers import PreTrainedConfig

from fratrie import FratrieDecoderConfig, FratrieEncoderConfig, FratrieSeq2SeqConfig
from fratrie.cli.__main__ import main

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IS_COMMAND = re.compile(r"fratrie [^|>&;]*$").match
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks_of(page):
    """(line, language, code, output or None) of each block that runs."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in BLOCK.finditer(text):
        line, (language, code) = text[: match.start()].count("\n") + 2, match.groups()
        if language == "text":
            assert blocks and blocks[-1][3] is None, f"{page.name}:{line}: no block that prints this"
            blocks[-1][3] = code
        else:
            blocks.append([line, language, code, None])
    return blocks


def pieces_of(code):
    """The code of a block in pieces: each call of `fratrie`, and the lines between them."""
    lines = code.replace("\\\n", " ").splitlines()
    pieces = []
    for line in lines:
        if IS_COMMAND(line):
            pieces.append((True, line))
        elif pieces and not pieces[-1][0]:
            pieces[-1] = (False, f"{pieces[-1][1]}\n{line}")
        else:
            pieces.append((False, line))
    return pieces


def run_command(words, monkeypatch):
    """Run `fratrie` as a shell would, but in this process, which has read the libraries already."""
    printed = io.StringIO()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    monkeypatch.setattr(sys, "argv", words)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, printed.getvalue()
    return printed.getvalue()


def run_in_shell(code, folder, output):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        ["bash", "-eu", "-c", code], cwd=folder, env=environment, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert (result.returncode != 0) == ("error:" in (output or "")), result.stdout
    return result.stdout


def run_in_python(code, namespace):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "block", "exec"), namespace)
    return printed.getvalue()


def run_as_doctest(code, namespace, name, line):
    test = doctest.DocTestParser().get_doctest(code, namespace, name, name, line - 1)
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    runner.run(test, out=report.write, clear_globs=False)
    assert not runner.failures, report.getvalue()
    namespace.update(test.globs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.ecosystem if page.stem == "ecosystem" else ())
        for page in PAGES
    ],
)
def test_every_block_of_a_page_runs_and_prints_what_stands_there(page, tmp_path, monkeypatch):
    for name in ("scripts", "fratrie"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, language, code, output in blocks_of(page):
        place = f"{page.name}:{line}"
        if language == "python" and ">>>" in code:
            run_as_doctest(code, namespace, place, line)
            continue
        assert language in ("bash", "python"), f"{place}: {language or 'no language'} cannot be run"
        if language == "python":
            printed = run_in_python(code, namespace)
        elif "error:" in (output or ""):
            printed = run_in_shell(code, tmp_path, output)
        else:
            printed = "".join(
                run_command(shlex.split(piece), monkeypatch) if is_command else run_in_shell(piece, tmp_path, output)
                for is_command, piece in pieces_of(code)
            )
        if output is not None and not doctest.OutputChecker().check_output(output, printed, FLAGS):
            pytest.fail(f"{place} is to print\n{output}\nbut printed\n{printed}")


def test_every_page_stands_in_the_index_and_every_link_leads_somewhere():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name == "README.md" or f"({page.name})" in index, page.name
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_the_configuration_is_up_to_date_and_complete():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "docs" / "configuration.py"))["page"]() == page, "python docs/configuration.py"
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    for config_class in (FratrieEncoderConfig, FratrieDecoderConfig, FratrieSeq2SeqConfig):
        for name in {field.name for field in dataclasses.fields(config_class)} - inherited:
            assert f"`{name}`" in page, name


def test_gradients_over_time_are_those_of_the_page_and_vanish_explode_or_stay():
    """The claim of the seeds: clipping bounds what explodes, and attention does neither (Bengio et al. 1994)."""
    drawn = runpy.run_path(str(ROOT / "docs" / "mixers.py"))
    assert drawn["table"]() in (ROOT / "docs" / "mixers.md").read_text(encoding="utf-8"), "python docs/mixers.py"
    near, far = ([drawn["reach"](distance=k, **curve) for curve in drawn["CURVES"].values()] for k in (10, 50))
    vanishing, exploding, clipped, lstm, _, softmax = (y / x for x, y in zip(near, far, strict=True))
    assert vanishing < 1e-11 and exploding > 1e6
    assert max(near[2], far[2]) <= 1 and 0.5 < clipped < 2
    assert lstm > 0.99 and softmax == pytest.approx(11 / 51)
