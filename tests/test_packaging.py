"""What `pip install` brings, tried away from the checkout."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
USE = """
from pathlib import Path
import fratrie
from fratrie_command import main
from fratrie.data.corpus import load_family_relations
from fratrie.training.metrics import multilabel_scores
print(Path(fratrie.__file__).parents[1].name, load_family_relations()["test"].num_rows)
print(multilabel_scores([[1]], [[1]], ["a"])["macro_f1"])
main()
"""


def in_process(*arguments, folder, **environment):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(tmp_path):
    source, wheel, empty = (tmp_path / name for name in ("source", "wheel", "empty"))
    for folder in (wheel, empty):
        folder.mkdir()
    shutil.copytree(ROOT / "fratrie", source / "fratrie", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("fratrie_command.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    *_, name = in_process("-c", BUILD, str(wheel), folder=source)
    with zipfile.ZipFile(wheel / name) as archive:
        archive.extractall(tmp_path / "installed")
    (info,) = (tmp_path / "installed").glob("*.dist-info")
    entry = configparser.ConfigParser()
    entry.read(info / "entry_points.txt")
    assert entry["console_scripts"]["fratrie"] == "fratrie_command:main"
    printed = in_process(
        "-c", USE, "account", "gpt2", "--length", "8", folder=empty, PYTHONPATH=str(tmp_path / "installed")
    )
    assert printed[:2] == ["installed 330", "1.0"]
    assert "all parameters" in "".join(printed) and not list(empty.iterdir())
