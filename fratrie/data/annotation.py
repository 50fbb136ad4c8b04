"""The annotation format of the family-relations corpus (`family_relations/GUIDE.md` holds its grammar): lines
`CODE SENTENCE` or `& SENTENCE`, one block of lines per respondent, one blank line between blocks."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from os import PathLike
from typing import NamedTuple

from fratrie.data.text_files import ENCODING_ADVICE, TextFormat, encoding_advice, existing_file, stored_encoding
from fratrie.files import write_text

LABELS = ("+", "-", "0", "i", "j", "f", "s", "p", "m", "a", "t")
VALENCES = LABELS[:4]
SUBJECTS = LABELS[4:]
CONTINUATIONS = ("merge", "inherit")
GRAMMAR = (
    "a line is 'CODE SENTENCE' or '& SENTENCE'; a code is terms joined by commas, such as 'jm+, jp-'; "
    f"a term is one or two of the letters {' '.join(SUBJECTS)} and one of the signs {' '.join(VALENCES)}"
)

_TERM = re.compile(r"[jfspmat]{1,2}[-+0i]")
# The code ends at the first space that follows no comma.
_LINE = re.compile(r"(?P<code>[^ ,]*(?:, *[^ ,]*)*)(?: (?P<sentence>.*))?", re.DOTALL)
_DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−", "-"))
_WRONG = "?"  # stands for the code of a line that is reported already


@dataclass(frozen=True)
class Segment:
    """One annotated sentence (now and then two) of one respondent.

    Args:
        text: one line of text, without spaces around it.
        code: the annotation, kept in its canonical form (`jm+,jp–` becomes `jm+, jp-`).
        respondent: who speaks; readers number respondents 0, 1, … in the order of the file.
        line: of the file, from 1; 0 of no file. It makes no difference between equal segments.

    Raises:
        ValueError: the text is empty, holds a line end or outer spaces, or the code breaks the grammar.
    """

    text: str
    code: str
    respondent: int
    line: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", canonical_code(self.code))
        if problem := _line_problem(self.text):
            raise ValueError(f"the text {excerpt(self.text)} {problem}")

    @property
    def labels(self) -> tuple[str, ...]:
        """The set of all characters of the code, in the order of `LABELS`."""
        return code_labels(self.code)


class LineProblem(NamedTuple):
    """A wrong line: its number (from 1), its text, and what is wrong and was expected."""

    line: int
    text: str
    reason: str


class AnnotationError(ValueError):
    """A file that breaks the annotation format: `problems` holds every wrong line, the message the first ones."""

    def __init__(self, path: str | PathLike[str], problems: Sequence[LineProblem]) -> None:
        super().__init__(path, problems)
        self.path = path
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [f"{self.path}, line {n}: {reason}: {excerpt(text)}" for n, text, reason in self.problems]
        return "\n".join([f"{self.path}: {len(self.problems)} wrong line(s); {GRAMMAR}", *first_of(lines)])


def canonical_code(code: str) -> str:
    """The code with plain hyphens and `, ` between its terms; a ValueError says what breaks the grammar."""
    terms = [term.strip(" ") for term in code.translate(_DASHES).split(",")]
    for term in terms:
        if problem := _term_problem(term):
            raise ValueError(f"code {excerpt(code)}: {problem}")
    return ", ".join(terms)


def code_labels(code: str) -> tuple[str, ...]:
    """The set of all characters of a code, in the order of `LABELS`: `jm+, jp-` gives `+ - j p m`."""
    characters = canonical_code(code)
    return tuple(label for label in LABELS if label in characters)


def read_annotations(path: str | PathLike[str], continuation: str = "merge", encoding: str = "utf-8") -> list[Segment]:
    """Read a file of the annotation format, in the order of its lines.

    Windows line ends, a byte order mark, typographic dashes in codes, any number of spaces after a comma and
    around a sentence are understood; only `\\n` and `\\r\\n` end a line.

    Args:
        path: the file.
        continuation: what a line `& SENTENCE` becomes: `"merge"` appends it to the segment above after one
            space; `"inherit"` makes it a segment of its own with the code of the segment above.
        encoding: of the file, as Python names it.

    Raises:
        AnnotationError: lists the wrong lines, or says that the file is empty or of another encoding.
        ValueError: an encoding that Python does not know, or another `continuation`.
        OSError: the file cannot be read.
    """
    if continuation not in CONTINUATIONS:
        raise ValueError(f"continuation={continuation!r} is unknown: choose one of {', '.join(CONTINUATIONS)}")
    segments: list[Segment] = []
    problems: list[LineProblem] = []
    respondent, code, in_block = -1, "", False
    for number, line, problem in _lines(existing_file(path).read_bytes(), TextFormat(encoding).encoding):
        if problem is None and not line.strip(" \t"):
            code, in_block = "", False
            continue
        respondent, in_block = respondent + (not in_block), True
        try:
            own_code, sentence = _parse_line(line, problem)
            if own_code is None and not code:
                raise ValueError("'&' with nothing above it in its block, expected a code")
        except ValueError as error:
            problems.append(LineProblem(number, line, str(error)))
            code = code if line.startswith("&") else _WRONG
            continue
        code = own_code or code
        if code == _WRONG:
            continue
        if own_code is None and continuation == "merge":
            segments[-1] = replace(segments[-1], text=f"{segments[-1].text} {sentence}")
        else:
            segments.append(Segment(sentence, code, respondent, number))
    if respondent < 0:
        problems.append(LineProblem(1, "", "empty file, expected at least one line 'CODE SENTENCE'"))
    if problems:
        raise AnnotationError(path, problems)
    return segments


def write_annotations(segments: Iterable[Segment], path: str | PathLike[str]) -> None:
    """Write segments so that `read_annotations(path)` gives them back equal.

    The format holds blocks, not numbers: respondents must be numbered 0, 1, … in order, as
    `read_annotations` and `group_respondents` number them.

    Raises:
        ValueError: there is no segment, or the respondents are not numbered so.
        OSError: the file cannot be written.
    """
    blocks = [(respondent, list(block)) for respondent, block in groupby(segments, lambda s: s.respondent)]
    if not blocks:
        raise ValueError(f"no segment to write to {path}: an empty annotation file is not valid")
    for expected, (respondent, block) in enumerate(blocks):
        if respondent != expected:
            raise ValueError(
                f"respondent {respondent!r} of the segment {excerpt(block[0].text)} where {expected} was "
                "expected: the file would not give the numbers back; pass group_respondents(segments)"
            )
    text = "\n\n".join("\n".join(f"{s.code} {s.text}" for s in block) for _, block in blocks)
    write_text(path, f"{text}\n")


def group_respondents(segments: Iterable[Segment]) -> list[Segment]:
    """The same segments, each respondent's together, respondents numbered 0, 1, … as they first appear."""
    numbers: dict[int, int] = {}
    numbered = [replace(s, respondent=numbers.setdefault(s.respondent, len(numbers))) for s in segments]
    return sorted(numbered, key=lambda s: s.respondent)


def text_problem(text: str) -> str | None:
    """What makes a text unfit to be read by a model, or None."""
    if not text.strip():
        return "is empty"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half of a character ({text[error.start]!r}), which UTF-8 cannot hold"
    return None


def excerpt(value: object, width: int = 100) -> str:
    """The value as a literal, cut after `width` characters; a text inside its quotes."""
    if isinstance(value, str):
        return repr(value if len(value) <= width else value[: width - 1] + "…")
    shown = repr(value)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def first_of(lines: Sequence[str], most: int = 20) -> list[str]:
    """The first lines, and how many more there are."""
    return [*lines[:most], *([f"… and {len(lines) - most:,} more"] if len(lines) > most else [])]


def _lines(data: bytes, encoding: str) -> Iterator[tuple[int, str, str | None]]:
    """Number, text and encoding problem of each line."""
    encoding = stored_encoding(data, encoding)
    if codecs.lookup(encoding).name != "utf-8":
        try:
            data = data.decode(encoding).encode()
        except UnicodeError as error:
            yield 1, "", f"the file is not {encoding} ({error}): {ENCODING_ADVICE}"
            return
    start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    for number, raw in enumerate(data[start:].split(b"\n"), start=1):
        line = raw.removesuffix(b"\r")
        try:
            yield number, line.decode(), None
        except UnicodeDecodeError as error:
            wrong = f"byte 0x{line[error.start]:02x} at offset {start + error.start} is not UTF-8"
            reason = f"{wrong}: {encoding_advice(line, error.start)}"
            yield number, line.decode(errors="backslashreplace"), reason
        start += len(raw) + 1


def _parse_line(line: str, problem: str | None) -> tuple[str | None, str]:
    """Canonical code (None for `&`) and sentence of a line; a ValueError says what is wrong."""
    if problem:
        raise ValueError(problem)
    match = _LINE.fullmatch(line)
    assert match is not None
    code, sentence = match["code"], (match["sentence"] or "").strip(" \t")
    own_code = None if code == "&" else canonical_code(code)
    if not sentence.strip():
        raise ValueError(f"{code!r} without a sentence, expected '{code} SENTENCE'")
    if problem := _line_problem(sentence):
        raise ValueError(f"the sentence {problem}")
    return own_code, sentence


def _line_problem(text: str) -> str | None:
    """What makes a text unfit to be the sentence of a line, or None."""
    if "\n" in text or "\r" in text:
        return "holds a line end (\\n or \\r), expected one line"
    if text != text.strip(" \t"):
        return "has spaces around it, expected none"
    return text_problem(text)


def _term_problem(term: str) -> str | None:
    if _TERM.fullmatch(term):
        return None
    if not term:
        return "nothing where a term was expected (such as 'jm+')"
    shown = excerpt(term, 30)
    if unknown := [character for character in term if character not in LABELS]:
        return f"unknown letter {unknown[0]!r} in {shown}, expected the letters {' '.join(SUBJECTS)} and a sign"
    if term in VALENCES:
        return f"no letter before {shown}, expected one or two of {' '.join(SUBJECTS)}"
    if term[-1] not in VALENCES:
        return f"missing valence after {shown}, expected one of {' '.join(VALENCES)}"
    if any(character in VALENCES for character in term[:-1]):
        return f"two signs in {shown}, expected a comma between terms (such as 'jm+, jp-')"
    return f"too many letters in {shown}, expected one or two before the sign"
