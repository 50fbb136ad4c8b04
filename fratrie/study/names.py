"""How a study calls its methods, features, labels and steps."""

import re

from fratrie.training.metrics import one_line

METHODS = {
    "finetuned": "Fine-tuning",
    "logistic_regression": "Elastic-net logistic regression",
    "gradient_boosting": "Gradient boosting",
    "random_forest": "Random forest",
    "svc": "SVC",
    "linear_svc": "Linear SVC",
    "kernel_svc": "Kernel SVC",
}
FEATURES = {"words": "words", "states": "pooled states"}
_STEPS = {
    "classical": "classical methods",
    "search": "search for the setting of fine-tuning",
    "models": "final models",
    "curve": "learning curve",
    "words": "words that speak for a label",
}
_WITH_FEATURES = re.compile(rf"({'|'.join(METHODS)})\W+({'|'.join(FEATURES)})\W*")


def method_name(name: str) -> str:
    """`linear_svc` as «Linear SVC», `linear_svc states` as «Linear SVC on pooled states», others as they are."""
    if found := _WITH_FEATURES.fullmatch(name):
        return f"{METHODS[found[1]]} on {FEATURES[found[2]]}"
    return METHODS.get(name, one_line(name))


def step_name(key: str) -> str:
    """The key of a step in words: `models-6-0.0004-12` as «final models»."""
    kind, *_ = key.split("-")
    which = _WITH_FEATURES.search(key)
    name = _STEPS.get(kind, one_line(key))
    if kind == "curve" and not which:
        return f"{name}: {METHODS['finetuned']}"
    return f"{name}: {method_name(which[0])}" if which else name


def shortened(name: str, most: int = 24) -> str:
    """A name for the margin of a figure, on one line."""
    name = one_line(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def quoted(label: str) -> str:
    """A label within a sentence."""
    return f"«{one_line(label)}»"
