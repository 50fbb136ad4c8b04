"""The annotation format: what is read, what is refused and where, and that writing loses nothing."""

import codecs
import pickle
import subprocess
import sys
from importlib.resources import files

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fratrie.data import (
    LABELS,
    SUBJECTS,
    VALENCES,
    AnnotationError,
    Segment,
    code_labels,
    group_respondents,
    read_annotations,
    write_annotations,
)

UNUSUAL_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
CORPUS = files("fratrie.data") / "family_relations"

terms = st.builds("".join, st.tuples(st.text(SUBJECTS, min_size=1, max_size=2), st.sampled_from(VALENCES)))
codes = st.lists(terms, min_size=1, max_size=4).map(", ".join)
texts = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), min_size=1)
    .map(lambda text: text.strip(" \t"))
    .filter(str.strip)
)


@st.composite
def segment_lists(draw):
    blocks = draw(st.lists(st.lists(st.tuples(texts, codes), min_size=1, max_size=4), min_size=1, max_size=4))
    return [Segment(text, code, i) for i, block in enumerate(blocks) for text, code in block]


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("annotations") / "file.txt"


def read(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_annotations(path, **options)


def wrong(path, content):
    """The problems of a file, after checking that the message names each by file, line and text."""
    with pytest.raises(AnnotationError) as caught:
        read(path, content)
    rows = str(caught.value).splitlines()
    assert "CODE SENTENCE" in rows[0] and "jm+, jp-" in rows[0]
    for row, problem in zip(rows[1:], caught.value.problems, strict=True):
        assert row.startswith(f"{path}, line {problem.line}: {problem.reason}: ")
        assert row.endswith(repr(problem.text)) or len(problem.text) > 100
    return caught.value.problems


# --- reading ---


def test_blocks_codes_and_merged_continuation(scratch):
    content = "jf+, js+ J'ai 2 frères.\n& Je m'entends bien avec.\n& Très.\njmi Voilà.\n\n\nmp- Ils crient.\n"
    assert read(scratch, content) == [
        Segment("J'ai 2 frères. Je m'entends bien avec. Très.", "jf+, js+", 0),
        Segment("Voilà.", "jmi", 0),
        Segment("Ils crient.", "mp-", 1),
    ]


def test_inherited_continuation(scratch):
    assert read(scratch, "jf+ Un.\n& Deux.\n& Trois.\nji Quatre.\n& Cinq.", continuation="inherit") == [
        Segment("Un.", "jf+", 0),
        Segment("Deux.", "jf+", 0),
        Segment("Trois.", "jf+", 0),
        Segment("Quatre.", "ji", 0),
        Segment("Cinq.", "ji", 0),
    ]


def test_unknown_continuation_is_refused(scratch):
    with pytest.raises(ValueError, match=r"continuation='join'.*merge, inherit"):
        read(scratch, "ji a", continuation="join")


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("ji a", "ji", "a"),
        ("jm+,jp- a b", "jm+, jp-", "a b"),
        ("jm+,   jp- a", "jm+, jp-", "a"),
        ("jm+, jp–, ja—, jf−, js‑ a", "jm+, jp-, ja-, jf-, js-", "a"),
        ("ji – tiret – long", "ji", "– tiret – long"),
        ("ji   a \t", "ji", "a"),
        ("ji , jm+ a", "ji", ", jm+ a"),
        ("jm+ jp- a", "jm+", "jp- a"),
        ("ai si tu veux", "ai", "si tu veux"),
        ("ji & a", "ji", "& a"),
        ("mp0 😀", "mp0", "😀"),
        ("jj+, jj+ a", "jj+, jj+", "a"),
    ],
)
def test_line_forms(scratch, line, code, text):
    assert read(scratch, line) == [Segment(text, code, 0)]


def test_labels_are_the_set_of_characters_in_label_order():
    assert Segment("a", "jt-,jm+,  jp–", 0).labels == ("+", "-", "j", "p", "m", "t")
    assert Segment("a", "jf+, js+", 0).code == "jf+, js+"
    assert code_labels("mi, s0") == ("0", "i", "s", "m")
    assert (*VALENCES, *SUBJECTS) == LABELS and len(set(LABELS)) == 11


@pytest.mark.parametrize("separator", UNUSUAL_SEPARATORS)
def test_only_newlines_end_a_line(scratch, separator):
    assert read(scratch, f"ji a{separator}b\r\njmi c\n") == [
        Segment(f"a{separator}b", "ji", 0),
        Segment("c", "jmi", 0),
    ]


@settings(deadline=None)
@given(segment_lists(), st.booleans(), st.sampled_from("-–—−"), st.sampled_from(["", " ", "   "]))
def test_tolerated_forms_read_the_same(scratch, segments, windows, dash, gap):
    lines, end = [], "\r\n" if windows else "\n"
    for before, segment in zip([segments[0], *segments], segments, strict=False):
        lines += [""] * (segment.respondent - before.respondent)
        lines += [f"{segment.code.replace('-', dash).replace(', ', f',{gap}')} {segment.text}"]
    assert read(scratch, codecs.BOM_UTF8 + end.join(lines).encode()) == segments


@settings(deadline=None)
@given(st.lists(st.tuples(codes, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_continuation_loses_nothing(scratch, groups):
    content = "\n".join(
        f"{code} {sentences[0]}" + "".join(f"\n& {s}" for s in sentences[1:]) for code, sentences in groups
    )
    assert read(scratch, content) == [Segment(" ".join(sentences), code, 0) for code, sentences in groups]
    inherited = [Segment(sentence, code, 0) for code, sentences in groups for sentence in sentences]
    assert read(scratch, content, continuation="inherit") == inherited


# --- wrong files ---


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("jx+ a", "code 'jx+': unknown letter 'x' in 'jx+', expected the letters j f s p m a t and a sign"),
        ("JM+ a", "unknown letter 'J'"),
        ("jmo a", "unknown letter 'o'"),
        ("Ma mère est gentille", "code 'Ma': unknown letter 'M'"),
        (" ji a", "nothing where a term was expected"),
        ("jm a", "missing valence after 'jm', expected one of + - 0 i"),
        ("jm+, jp a", "code 'jm+, jp': missing valence after 'jp'"),
        ("+ a", "no letter before '+', expected one or two of j f s p m a t"),
        ("jm+jp- a", "two signs in 'jm+jp-', expected a comma"),
        ("jmp+ a", "too many letters in 'jmp+', expected one or two"),
        ("jm+,, jp- a", "nothing where a term was expected"),
        ("jm+, ", "nothing where a term was expected"),
        ("ji", "'ji' without a sentence, expected 'ji SENTENCE'"),
        ("jm+,jp-   ", "'jm+,jp-' without a sentence"),
        ("ji \u00a0", "'ji' without a sentence"),
        ("&", "'&' without a sentence, expected '& SENTENCE'"),
        ("&a", "unknown letter '&'"),
        ("ji\ta", "unknown letter '\\t'"),
        ("ji a\rjm+ b", "the sentence holds a line end (\\n or \\r)"),
        ("\ufeffji a", "unknown letter '\\ufeff'"),
    ],
)
def test_wrong_line(scratch, line, reason):
    (problem,) = wrong(scratch, f"ji avant\n{line}\njmi après")
    assert (problem.line, problem.text) == (2, line)
    assert reason in problem.reason


def test_continuation_needs_a_line_above_in_its_block(scratch):
    problems = wrong(scratch, "& a\n& b\n\nji c\n& d\n\n& e")
    assert [problem.line for problem in problems] == [1, 2, 7]
    assert all("'&' with nothing above it in its block" in problem.reason for problem in problems)


def test_all_wrong_lines_are_reported_once_each(scratch):
    content = b"ji a\njx+ b\n& c\n\n& d\njm e\r\nji\nji ok\n" + b"ji caf\xe9\n" + "jp+ é".encode()
    problems = wrong(scratch, content)
    assert [problem.line for problem in problems] == [2, 5, 6, 7, 9]
    assert problems[2].text == "jm e"
    assert [problem.line for problem in wrong(scratch, "jx+ a\n& b\n&\n& c")] == [1, 3]


@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
def test_wrong_byte_is_located(scratch, bom):
    start = bom + "ji été\r\n".encode()
    (problem,) = wrong(scratch, start + b"jm+ caf\xe9 noir\nji b")
    assert problem.line == 2 and problem.text == "jm+ caf\\xe9 noir"
    assert f"byte 0xe9 at offset {len(start) + 7} is not UTF-8" in problem.reason
    assert "if «jm+ café noir» is what it should say, give encoding='cp1252'" in problem.reason


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_read_by_its_mark(scratch, encoding):
    bom = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    scratch.write_bytes(bom + "ji é\nji b".encode(encoding))
    assert [segment.text for segment in read_annotations(scratch)] == ["é", "b"]


@pytest.mark.parametrize("content", [b"", b"\n \n\t\r\n", codecs.BOM_UTF8])
def test_empty_file(scratch, content):
    (problem,) = wrong(scratch, content)
    assert "empty file, expected at least one line" in problem.reason


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        read_annotations(tmp_path / "absent.txt")
    with pytest.raises(IsADirectoryError):
        read_annotations(tmp_path)


def test_long_line_is_cut_in_the_message(scratch):
    scratch.write_text("jx+ " + "mot " * 10_000)
    with pytest.raises(AnnotationError) as caught:
        read_annotations(scratch)
    assert len(str(caught.value)) < 1000
    assert len(caught.value.problems[0].text) > 40_000


def test_error_survives_pickling(scratch):
    with pytest.raises(AnnotationError) as caught:
        read(scratch, "jx+ a")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@settings(deadline=None)
@given(st.text(st.sampled_from("jmx+-0i,& \n\r\té–")) | st.binary(max_size=40))
def test_any_file_is_read_whole_or_refused_by_line(scratch, content):
    data = content if isinstance(content, bytes) else content.encode()
    lines = data.split(b"\n")
    try:
        segments = read(scratch, data, continuation="inherit")
    except AnnotationError as error:
        assert error.problems and all(1 <= problem.line <= len(lines) for problem in error.problems)
    else:
        filled = [line for line in lines if line.removesuffix(b"\r").removeprefix(codecs.BOM_UTF8).strip(b" \t")]
        assert len(segments) == len(filled)
        for segment, line in zip(segments, filled, strict=True):
            assert line.removesuffix(b"\r").rstrip(b" \t").endswith(segment.text.encode())


# --- writing ---


@settings(deadline=None)
@given(segment_lists())
@example([Segment(f"a{c}b{c}", "jm+, jp-", 0) for c in UNUSUAL_SEPARATORS + "\ufeff\u00a0"])
@example([Segment("& a", "ji", 0), Segment(", jm+", "ji", 0), Segment("si, ai", "ji", 1)])
def test_round_trip(scratch, segments):
    write_annotations(segments, scratch)
    assert read_annotations(scratch) == segments
    assert read_annotations(scratch, continuation="inherit") == segments


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("continuation", ["merge", "inherit"])
def test_round_trip_of_the_corpus(scratch, split, continuation):
    segments = read_annotations(CORPUS / f"{split}.txt", continuation)
    write_annotations(segments, scratch)
    assert read_annotations(scratch) == segments
    if continuation == "merge":
        unfolded = (CORPUS / f"{split}.txt").read_bytes().replace(b"\n& ", b" ")
        assert scratch.read_bytes() == unfolded


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\nb", "holds a line end"),
        ("a\r\nb", "holds a line end"),
        ("a\r", "holds a line end"),
        (" a", "has spaces around it"),
        ("a\t", "has spaces around it"),
        ("", "is empty"),
        ("\u2003", "is empty"),
        ("a\ud83d", "holds half of a character"),
    ],
)
def test_text_that_is_no_line_is_refused(text, reason):
    with pytest.raises(ValueError) as caught:
        Segment(text, "ji", 0)
    assert f"the text {text!r} {reason}" in str(caught.value)


def test_wrong_code_is_refused():
    with pytest.raises(ValueError, match="code 'jm': missing valence"):
        Segment("a", "jm", 0)


@pytest.mark.parametrize("respondents", [[1], [0, 2], [0, 1, 0], [-1]])
def test_respondents_that_would_not_come_back_are_refused(scratch, respondents):
    scratch.write_text("before")
    segments = [Segment(f"texte {i}", "ji", respondent) for i, respondent in enumerate(respondents)]
    with pytest.raises(ValueError, match=rf"respondent .* of the segment 'texte {len(segments) - 1}'.*group_resp"):
        write_annotations(segments, scratch)
    assert scratch.read_text() == "before"
    write_annotations(group_respondents(segments), scratch)
    assert len(read_annotations(scratch)) == len(segments)


def test_group_respondents_keeps_order_and_people():
    segments = [Segment(text, "ji", respondent) for text, respondent in [("a", 7), ("b", 3), ("c", 7), ("d", 9)]]
    assert [(s.text, s.respondent) for s in group_respondents(segments)] == [
        ("a", 0),
        ("c", 0),
        ("b", 1),
        ("d", 2),
    ]


def test_nothing_to_write_is_refused(scratch):
    with pytest.raises(ValueError, match=r"no segment to write to .*file\.txt"):
        write_annotations(iter(()), scratch)


def test_what_cannot_be_written_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*a\.txt"):
        write_annotations([Segment("a", "ji", 0)], tmp_path / "file" / "a.txt")


def test_import_is_light():
    path = str(files("fratrie"))
    code = (
        "import sys, types; package = types.ModuleType('fratrie'); "
        f"package.__path__ = [{path!r}]; sys.modules['fratrie'] = package; import fratrie.data; "
        "print({'datasets', 'sklearn', 'torch', 'pandas'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
