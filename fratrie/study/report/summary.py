"""What a study found, in three sentences or four."""

from typing import Any

from fratrie.training.metrics import FEW_GROUPS
from fratrie.wording import counted

from ..names import method_name, quoted
from .tables import Results, drawn_from


def summary(results: Results) -> list[str]:
    """The main score, what it is compared with, and where the model is strong and weak.

    Without a fine-tuned model they tell of the classical method that cross-validation likes best; without any method,
    of the data alone.
    """
    part = results["data"]["parts"]["test"]
    who = "" if part["respondents"] is None else f" of {counted(part['respondents'], 'respondent')}"
    test = f"{counted(part['sentences'], 'test sentence')}{who}"
    if results["finetuned"] is not None:
        return _of_finetuned(results, test)
    if results["classical"]:
        return _of_classical(results, test)
    train = results["data"]["parts"]["train"]["sentences"]
    return [f"The data are {train:,} training and {test}."]


def _of_finetuned(results: Results, test: str) -> list[str]:
    found = results["finetuned"]
    seeds = f", the mean of {len(found['seeds'])} seeds" if len(found["seeds"]) > 1 else ""
    sentences = [
        f"On {test} the fine-tuned {results['study']['model']} reaches a macro-F1 of "
        f"{found['test']['present_macro_f1']:.3f}{_ends(found['test'])}{seeds}."
    ]
    if found.get("comparison") and "macro" in found["comparison"]:
        sentences.append(_beside(found["comparison"]["macro"], *drawn_from(results)))
    if wrong_number := _too_many_or_few(found["test"]):
        sentences.append(wrong_number)
    return [*sentences, _strong_and_weak(found["test"])]


def _too_many_or_few(scores: dict[str, Any]) -> str | None:
    """What tells a model that gives nearly all labels to all sentences, or none, from one that has learnt them."""
    true = sum(scores["support"].values())
    # Of a label that is never given precision is 0, and so are its true positives.
    given = sum(
        recall * scores["support"][label] / scores["precision"][label]
        for label, recall in scores["recall"].items()
        if scores["precision"][label]
    )
    if true / 2 < given < true * 2:
        return None
    how = "many" if given > true else "few"
    return (
        f"It gives about {given:,.0f} labels where people gave {true:,}, far too {how}: it has hardly learnt to tell "
        "them apart, whatever its F1."
    )


def _beside(macro: dict[str, Any], number: int, noun: str) -> str:
    ends = macro["difference_interval"]
    verdict = ""
    if ends is not None:
        says = f"which {'holds' if ends[0] <= 0 <= ends[1] else 'excludes'} zero"
        if number < FEW_GROUPS:
            says = f"drawn from {counted(number, noun)}, too few to rely on it"
        verdict = f" (95 % interval {ends[0]:+.3f} to {ends[1]:+.3f}, {says})"
    return (
        f"The classical method that is best on these sentences, {_within(macro['baseline'])}, reaches "
        f"{macro['baseline_f1']:.3f}; the difference is {macro['difference']:+.3f}{verdict}."
    )


def _of_classical(results: Results, test: str) -> list[str]:
    tried = [
        (found["cross_validated_macro_f1"], f"{method} {features}", found["test"])
        for method, by_features in results["classical"].items()
        for features, found in by_features.items()
    ]
    score, name, scores = max(tried, key=lambda each: each[0])
    which = f"best of {len(tried)} classical methods" if len(tried) > 1 else "classical method"
    return [
        f"The {which} in cross-validation is {_within(name)}, with a macro-F1 of {score:.3f}.",
        f"On {test} it reaches {scores['present_macro_f1']:.3f}{_ends(scores)}.",
        _strong_and_weak(scores),
    ]


def _ends(scores: dict[str, Any]) -> str:
    ends = scores.get("present_macro_f1_interval")
    return f" (95 % interval {ends[0]:.3f} to {ends[1]:.3f})" if ends else ""


def _strong_and_weak(scores: dict[str, Any]) -> str:
    f1 = {label: value for label, value in scores["f1"].items() if scores["support"][label]}
    best, worst = max(f1, key=lambda label: f1[label]), min(f1, key=lambda label: f1[label])
    if best == worst:
        return f"Its F1 on {quoted(best)} is {f1[best]:.3f}."
    ends = f"with an F1 of {f1[best]:.3f}, and worst on {quoted(worst)}, with {f1[worst]:.3f}"
    return f"It is best on {quoted(best)}, {ends}."


def _within(name: str) -> str:
    """The name of a method within a sentence: «gradient boosting», but «SVC»."""
    name = method_name(name)
    return name if name[1:2].isupper() else name[:1].lower() + name[1:]
