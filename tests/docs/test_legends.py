"""Names of tensors end in their shape, and the legend at the top of a file says what every letter stands for."""

import re
from pathlib import Path

import pytest

MODELING = Path(__file__).parents[2] / "fratrie" / "modeling"
FILES = sorted(file.name for file in MODELING.glob("*.py") if re.search(r"\b[a-z]\w*_[A-Z0-9]*[A-Z]\b", file.read_text()))


@pytest.mark.parametrize("name", FILES)
def test_every_letter_of_a_shape_is_in_the_legend(name: str):
    text = (MODELING / name).read_text()
    legend = re.search(r"^Shapes: (.*?)(?:\n\n|\"\"\")", text, re.DOTALL | re.MULTILINE)
    assert legend, "a legend is missing"
    said = set(re.findall(r"\b([A-Z])\b", legend[1]))
    used = {letter for suffix in re.findall(r"\b[a-z]\w*_([A-Z0-9]*[A-Z])\b", text) for letter in suffix}
    shapes = {letter for shape in re.findall(r"`\(([A-Z0-9, ·+…]+)\)`", text) for letter in re.findall(r"[A-Z]", shape)}
    assert {letter for letter in used | shapes if letter.isalpha()} <= said | {"X"}, "X is any size"
