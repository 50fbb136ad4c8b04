"""Multi-label scores as an `evaluate` metric that loads from this folder without network.

`evaluate.load("…/multilabel_f1").compute(predictions=…, references=…, labels=[…])`: a sample is a list
of 0 and 1.
"""

import datasets
import evaluate

from fratrie.training.metrics import multilabel_scores

_DESCRIPTION = "Precision, recall, F1 and support of every label, with their macro and micro means."
_INPUTS = """
Args:
    predictions: for every sample, 0 or 1 for every label.
    references: the same for the truth.
    labels: the names of the labels; their positions when not given.
Returns:
    precision, recall, f1, support: a dictionary by label.
    macro_precision, macro_recall, macro_f1: means over all labels; present_macro_…: over those with an example.
    micro_precision, micro_recall, micro_f1: means over all decisions.
    samples: how many were counted.
"""


class MultilabelF1(evaluate.Metric):
    """`fratrie.training.metrics.multilabel_scores` behind the interface of `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        indicators = datasets.Sequence(datasets.Value("int32"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": indicators, "references": indicators}),
        )

    def _compute(
        self, predictions: list[list[int]], references: list[list[int]], labels: list[str] | None = None
    ) -> dict:
        return multilabel_scores(predictions, references, labels)
