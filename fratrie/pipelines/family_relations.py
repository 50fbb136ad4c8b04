"""The task `family-relations`: whom a French sentence about the family speaks of, and in which tone.

Labels and names are those of the annotation guide of the family-relations corpus.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from .bulk import BulkPipeline, Row
from .text_pipeline import TextPipeline, text_of

VALENCE_NAMES = {"+": "positive", "-": "négative", "0": "neutre", "i": "information"}
PERSON_NAMES = {
    "j": "je",
    "f": "frère",
    "s": "sœur",
    "p": "père",
    "m": "mère",
    "a": "famille",
    "t": "tierce personne",
}
STUDY_LABELS = (*VALENCE_NAMES, *PERSON_NAMES)


class FamilyRelationsPipeline(BulkPipeline, TextPipeline):
    """Labels sentences with the persons and the valence of the relations they tell of.

    ```python
    >>> import fratrie
    >>> from transformers import pipeline
    >>> label = pipeline("family-relations", model="runs/demo/model")
    >>> label("Je m'entends bien avec ma mère.")
    {'text': "Je m'entends bien avec ma mère.", 'labels': ['+', 'j', 'm'], 'persons': ['je', 'mère'],
     'valence': ['positive']}
    ```

    A result holds the `text`, the `labels` (the characters of the annotation code), and the same labels by their
    French names: `persons` and `valence`; all in the order of the study, `+ - 0 i j f s p m a t`. With `scores=True`
    it also holds `scores`, the probability of each of the 11 labels.

    Args:
        model: any sequence-classification model with exactly these 11 labels, in any order.
        threshold: the probability that a label must exceed to be given: one for all, or one per label
            (`{"m": 0.3}`, the others keep theirs). By default the `label_thresholds` of the model's config, else
            0.5. Here or in a call.
        scores: return the probabilities. Here or in a call.
        *args, **kwargs: as for Hugging Face's `Pipeline`.

    Raises:
        ValueError: the model has other labels, one label per text only, or thresholds that do not fit; or so has the
            call; or an input is blank, or no text.
        TypeError: a parameter is unknown.
    """

    task_name = "family-relations"
    auto_model = AutoModelForSequenceClassification

    def __init__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        self._columns = label_columns(model.config)
        self._thresholds = config_thresholds(model.config)
        super().__init__(model, *args, **kwargs)

    def _sanitize_parameters(  # type: ignore[override] # each task names its own
        self, threshold: float | Mapping[str, float] | None = None, scores: bool | None = None, **unknown: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if unknown:
            raise TypeError(
                f"The task 'family-relations' has no parameter {', '.join(unknown)}: it has threshold, scores, "
                "batch_size and num_workers; pipeline(…) takes those of Hugging Face's Pipeline too."
            )
        postprocess: dict[str, Any] = {}
        if threshold is not None:
            current = getattr(self, "_postprocess_params", {}).get("thresholds", self._thresholds)
            postprocess["thresholds"] = override_thresholds(current, threshold)
        if scores is not None:
            postprocess["scores"] = scores
        return {}, {}, postprocess

    def preprocess(self, input_: Any) -> dict[str, Any]:  # type: ignore[override]
        """Tokens `(1, T)` of one input, and its text."""
        text = _telling_text(input_)
        return {**self.encode(text), "text": text}

    def preprocess_in_bulk(self, inputs: Sequence[Any], **params: Any) -> list[Row] | None:
        """The same of many inputs."""
        texts = [_telling_text(one) for one in inputs]
        rows = self.tokenize({"text": texts}, verbose=False)
        return rows and [{**self.fit(row, text), "text": text} for row, text in zip(rows, texts, strict=True)]

    def _forward(self, input_tensors: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        text = input_tensors.pop("text")
        return {"logits": self.model(**input_tensors).logits, "text": text}

    def postprocess(  # type: ignore[override]
        self, model_outputs: dict[str, Any], thresholds: dict[str, float] | None = None, scores: bool = False
    ) -> dict[str, Any]:
        """The result of one input, from its logits `(1, 11)`."""
        probabilities = torch.sigmoid(model_outputs["logits"][0].double()).tolist()
        by_label = {label: probabilities[self._columns[label]] for label in STUDY_LABELS}
        limits = thresholds or self._thresholds
        labels = [label for label, probability in by_label.items() if probability > limits[label]]
        result = {
            "text": model_outputs["text"],
            "labels": labels,
            "persons": [PERSON_NAMES[label] for label in labels if label in PERSON_NAMES],
            "valence": [VALENCE_NAMES[label] for label in labels if label in VALENCE_NAMES],
        }
        return {**result, "scores": by_label} if scores else result


def _telling_text(item: Any) -> str:
    text = text_of(item)
    if not text.strip():
        raise ValueError(f"The text {text[:20]!r} is blank, and tells of nobody: leave it out.")
    return text


def label_columns(config: PreTrainedConfig) -> dict[str, int]:
    """The column of each label in the logits.

    Raises:
        ValueError: the labels are not exactly those of the study, or the model gives one label per text.
    """
    labels = _label_names(config)
    way_out = "pipeline('text-classification', model=…, top_k=None) takes any labels."
    if sorted(labels) != sorted(STUDY_LABELS):
        missing = [label for label in STUDY_LABELS if label not in labels]
        others = [label for label in labels if label not in STUDY_LABELS or labels.count(label) > 1]
        raise ValueError(
            f"The task 'family-relations' needs a model with exactly the labels {' '.join(STUDY_LABELS)}, but this "
            f"one ({config.name_or_path or type(config).__name__}) lacks {' '.join(missing) or 'none'} and has "
            f"{', '.join(others[:12]) or 'none'} besides: {way_out}"
        )
    if config.problem_type not in (None, "multi_label_classification"):
        raise ValueError(
            f"The task 'family-relations' gives several labels per text, but the model was trained for problem_type="
            f"{config.problem_type!r}: {way_out}"
        )
    return {label: labels.index(label) for label in STUDY_LABELS}


def config_thresholds(config: PreTrainedConfig) -> dict[str, float]:
    """The threshold of each label: the config's `label_thresholds`, by name or in the order of `id2label`, or 0.5.

    Raises:
        ValueError: there are not as many as labels, or one lies outside [0, 1].
    """
    given = getattr(config, "label_thresholds", None)
    if given is None:
        return dict.fromkeys(STUDY_LABELS, 0.5)
    if not isinstance(given, list | tuple):
        return override_thresholds(dict.fromkeys(STUDY_LABELS, 0.5), given)
    labels = _label_names(config)
    if len(given) != len(labels):
        raise ValueError(
            f"config.label_thresholds has {len(given)} values for {len(labels)} labels: give one per label."
        )
    return override_thresholds({}, dict(zip(labels, given, strict=True)))


def override_thresholds(current: Mapping[str, float], threshold: float | Mapping[str, float]) -> dict[str, float]:
    """The current thresholds, replaced by one for all labels or by those of some labels.

    Raises:
        ValueError: a label is unknown, or a threshold is not a number in [0, 1].
    """
    by_label = threshold if isinstance(threshold, Mapping) else dict.fromkeys(STUDY_LABELS, threshold)
    for label, value in by_label.items():
        if label not in STUDY_LABELS:
            raise ValueError(f"threshold for the unknown label {label!r}: choose from {' '.join(STUDY_LABELS)}.")
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
            raise ValueError(
                f"threshold={threshold!r}: give a probability from 0 to 1, or a dict such as {{'m': 0.3}}."
            )
    return {**current, **by_label}


def _label_names(config: PreTrainedConfig) -> list[str]:
    return [str(label) for _, label in sorted((config.id2label or {}).items())]
