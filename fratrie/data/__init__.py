"""Texts and their labels: the annotation format (here), the shipped corpus (`fratrie.data.corpus`) and files
of other formats (`fratrie.data.loading`). The last two need `datasets`, so they are imported by name."""

from fratrie.data.annotation import (
    LABELS,
    SUBJECTS,
    VALENCES,
    AnnotationError,
    LineProblem,
    Segment,
    canonical_code,
    code_labels,
    group_respondents,
    read_annotations,
    write_annotations,
)

__all__ = [
    "LABELS",
    "SUBJECTS",
    "VALENCES",
    "AnnotationError",
    "LineProblem",
    "Segment",
    "canonical_code",
    "code_labels",
    "group_respondents",
    "read_annotations",
    "write_annotations",
]
