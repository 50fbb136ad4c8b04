"""What the tables of a report hold, read off the results of a study."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fratrie.data.tables import row_noun
from fratrie.wording import counted

from ..names import FEATURES, method_name, step_name
from .table import PLACE, Cell, Column, Features, Interval, Table

Results = Mapping[str, Any]
MEANS = {"macro mean": "present_macro", "micro mean": "micro"}  # of the labels that test holds; of all decisions
MEASURES = {"f1": "F1", "precision": "Precision", "recall": "Recall"}
_NARROWEST = 6  # characters of a column of the table of methods
_WIDEST = 90  # characters of its columns together; beyond, labels stand in the rows
_MOST_PAIRS = 20


def all_tables(results: Results) -> dict[str, Table]:
    """Every table that the results have something for, by name."""
    makers: dict[str, Callable[[Results], Iterator[Table]]] = {
        "data": _data,
        "classical": _classical,
        "finetuned": _finetuned,
        "search": _search,
        "calibration": _calibration,
        "learning_curve": _learning_curve,
        "errors": _errors,
        "agreement": _agreement,
        "published": _published,
    }
    made = [table for key, make in makers.items() if results.get(key) is not None for table in make(results)]
    return {table.name: table for table in [*made, *_methods(results), *_study(results)] if table.rows}


def has_states(results: Results) -> bool:
    """Whether a classical method has learnt from the pooled states of the encoder."""
    return any("states" in found for found in (results["classical"] or {}).values())


def drawn_from(results: Results) -> tuple[int, str]:
    """How many respondents of test the intervals are drawn from, or sentences where none are known, and their name."""
    part = results["data"]["parts"]["test"]
    return (part["sentences"], "sentence") if part["respondents"] is None else (part["respondents"], "respondent")


def place_in(results: Results, part: str) -> str:
    """What the sentences of a part are counted by in their file: «Row», or «Line» of a .txt."""
    return row_noun(results["data"]["parts"][part]["file"]).capitalize()


def interval(ends: Sequence[float] | None) -> Interval | None:
    """`[low, high]` of the results as a cell."""
    return None if ends is None else Interval(*ends)


def _data(results: Results) -> Iterator[Table]:
    data = results["data"]
    parts, names = data["parts"], data["label_names"]
    columns = [Column(title) for title in ("Part", "Sentences", "Respondents", "Tokens")]
    rows = [[name, part["sentences"], part["respondents"], part["tokens"]] for name, part in parts.items()]
    yield Table("parts", "The two parts of the data", columns, rows)
    columns = [Column("Label"), *[Column("Meaning")] * bool(names), *map(Column, parts)]
    meanings = {label: [names.get(label, "")] * bool(names) for label in data["labels"]}
    rows = [[label, *meanings[label], *(p["support"][label] for p in parts.values())] for label in data["labels"]]
    yield Table("labels", "Sentences that carry each label", columns, rows)
    yield from _repeats(results)


def _repeats(results: Results) -> Iterator[Table]:
    found = results["data"]["repeats"]
    names = {"train": "train", "test": "test", "both": "test, where train holds them"}
    counts = [(names[where], count["same"], count["other"]) for where, count in found["counts"].items()]
    columns = [Column(title) for title in ("Part", "With the same labels", "With other labels")]
    rows = [list(row) for row in counts if any(row[1:])]
    yield Table("repeats", "Sentences that stand there before", columns, rows)
    columns = [Column(title) for title in ("Text", "Place", "Labels", "Earlier place", "Earlier labels")]
    rows = [
        [conflict["text"], *(cell for each in ("again", "before") for cell in _said(results, conflict[each]))]
        for conflict in found["conflicts"]
    ]
    yield Table("conflicts", "Sentences that stand there before with other labels", columns, rows)


def _said(results: Results, place: Mapping[str, Any]) -> list[str]:
    """Where a sentence stands, and its labels there."""
    where = f"{place['part']}, {place_in(results, place['part']).lower()} {place['row']}"
    return [where, ", ".join(place["labels"]) or "no label"]


def _methods(results: Results) -> Iterator[Table]:
    """The table of the study, for each measure."""
    tested = {
        name: {features: found["test"] for features, found in tried.items()}
        for name, tried in (results["classical"] or {}).items()
    }
    if results["finetuned"] is not None:
        tested = {"finetuned": {"words": results["finetuned"]["test"]}} | tested
    data = results["data"]
    for measure, title in MEASURES.items() if tested else ():
        columns = [*data["labels"], *MEANS]

        def scores_of(test: Mapping[str, Any], measure: str = measure) -> list[float]:
            means = [test[f"{mean}_{measure}"] for mean in MEANS.values()]
            return [*(test[measure][label] for label in data["labels"]), *means]

        rows = {
            name: {features: scores_of(test) for features, test in by_features.items()}
            for name, by_features in tested.items()
        }
        states = ": on words and, in parentheses, on the encoder's pooled states" if has_states(results) else ""
        caption = f"{title} on the test part{states}"
        support = [*data["parts"]["test"]["support"].values(), "", ""]
        yield _side_by_side(f"methods_{measure}", caption, columns, rows, support)


def _side_by_side(
    name: str,
    caption: str,
    titles: Sequence[str],
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    support: Sequence[Cell],
) -> Table:
    """Methods in rows and labels in columns, as the study has it; turned where the labels are many or long.

    Args:
        name, caption: of the table.
        titles: the labels, and means behind them.
        scores: one for each title, by method and features.
        support: one for each title.
    """
    rows: list[list[Cell]] = [["Support", *support]]
    for method, by_features in scores.items():
        nothing: Sequence[float | None] = [None] * len(titles)
        words, states = (by_features.get(features, nothing) for features in FEATURES)
        rows.append([method_name(method), *map(Features, words, states)])
    if sum(max(len(title), _NARROWEST) for title in titles) <= _WIDEST:
        return Table(name, caption, [Column("Method"), *map(Column, titles)], rows, "of a column")
    heads, *turned = zip(["Label", *titles], *rows, strict=True)
    return Table(name, caption, [Column(str(head)) for head in heads], turned, "of a row")


def _classical(results: Results) -> Iterator[Table]:
    titles = ("Method", "Features", "Chosen setting", "Macro-F1, cross-validated", "Macro-F1, test", "95 % interval")
    rows = [
        [
            method_name(method),
            FEATURES.get(features, features),
            _setting(found["parameters"]),
            found["cross_validated_macro_f1"],
            found["test"]["present_macro_f1"],
            interval(found["test"].get("present_macro_f1_interval")),
        ]
        for method, tried in results["classical"].items()
        for features, found in tried.items()
    ]
    caption = f"The setting of each classical method; interval over {counted(*drawn_from(results))}"
    yield Table("classical", caption, [Column(title) for title in titles], rows)


def _setting(parameters: Mapping[str, Any]) -> str:
    shown = {
        name.rsplit("__")[-1]: f"{value:g}" if isinstance(value, float) else value
        for name, value in parameters.items()
    }
    return ", ".join(f"{name} = {value}" for name, value in shown.items())


def _finetuned(results: Results) -> Iterator[Table]:
    test, comparison = results["finetuned"]["test"], results["finetuned"].get("comparison")
    order = {measure: MEASURES[measure] for measure in ("precision", "recall", "f1")}
    columns = [Column(title) for title in ("Label", *order.values(), "F1, 95 % interval", "Support")]
    intervals = test.get("f1_interval") or {}
    rows: list[list[Cell]] = [
        [label, *(test[measure][label] for measure in order), interval(intervals.get(label)), test["support"][label]]
        for label in results["data"]["labels"]
    ]
    total = sum(test["support"].values())
    for title, mean in MEANS.items():
        ends = interval(test.get(f"{mean}_f1_interval"))
        rows.append([title, *(test[f"{mean}_{measure}"] for measure in order), ends, total])
    drawn = f"intervals over {counted(*drawn_from(results))}"
    yield Table("scores", f"Fine-tuned model on the test part; {drawn}", columns, rows)
    if comparison:
        yield _comparison(comparison, drawn)


def _comparison(comparison: Mapping[str, Any], drawn: str) -> Table:
    titles = ("Label", "F1", "Best classical method", "Its F1")
    columns = [*map(Column, titles), Column("Difference", "+.3f"), Column("Difference, 95 % interval", "+.3f")]
    rows = [
        [
            "macro mean" if name == "macro" else name,
            found["f1"],
            method_name(found["baseline"]),
            found["baseline_f1"],
            found["difference"],
            interval(found["difference_interval"]),
        ]
        for name, found in comparison.items()
    ]
    caption = f"Fine-tuned model beside the classical method that is best on test; {drawn}"
    return Table("comparison", caption, columns, rows)


def _search(results: Results) -> Iterator[Table]:
    columns = [
        Column("Trainable layers"),
        Column("Learning rate", "g"),
        Column("Epochs"),
        Column("Macro-F1, cross-validated"),
        Column("Seconds", ",.0f"),
        Column("Chosen"),
    ]
    chosen = results["search"]["chosen"]
    setting = ("depth", "learning_rate", "epochs")
    rows = [
        [
            *(tried[name] for name in setting),
            tried["cross_validated_macro_f1"],
            tried["seconds"],
            "chosen" if all(tried[name] == chosen[name] for name in setting) else "",
        ]
        for tried in results["search"]["tried"]
    ]
    yield Table("search", "Settings of fine-tuning that were tried", columns, rows)


def _calibration(results: Results) -> Iterator[Table]:
    found, ece = results["calibration"], results["calibration"]["ece"]
    temperatures = found.get("temperatures")
    titles = ["Label", "Threshold", *["Temperature"] * bool(temperatures), "ECE before", "ECE after"]
    rows: list[list[Cell]] = [
        [
            label,
            (found["thresholds"] or {}).get(label),
            *([temperatures.get(label)] if temperatures else []),
            ece["before"][label],
            ece["after"][label],
        ]
        for label in results["data"]["labels"]
    ]
    rows.append(["mean", *[""] * (len(titles) - 3), ece["mean_before"], ece["mean_after"]])
    caption = "Thresholds, and expected calibration error (ECE) on the test part"
    yield Table("calibration", caption, [Column(title) for title in titles], rows)
    columns = [Column("Stage"), Column("Probabilities", ".1f")]
    columns += [Column(title) for title in ("Mean probability", "Share with the label", "Count")]
    bins = [
        [stage, Interval(b["low"], b["high"]), b["confidence"], b["frequency"], b["count"]]
        for stage in ("before", "after")
        for b in found["reliability"][stage]
    ]
    yield Table("reliability", "What the reliability diagram shows", columns, bins)


def _learning_curve(results: Results) -> Iterator[Table]:
    curve = results["learning_curve"]
    columns = [Column("Sentences")]
    for method in curve["methods"]:
        columns += [Column(method_name(method)), Column(f"{method_name(method)}, lowest to highest")]
    rows = [
        [size, *(cell for draws in drawn for cell in (fmean(draws), Interval(min(draws), max(draws))))]
        for size, *drawn in zip(curve["sizes"], *curve["methods"].values(), strict=True)
    ]
    draws = f"mean of {curve['draws']} draws" if curve["draws"] > 1 else "one draw"
    decided = "at a threshold of 0.5, before calibration"
    caption = f"Macro-F1 on test by sentences learnt from, {decided}: {draws} of each size"
    yield Table("learning_curve", caption, columns, rows)


def _errors(results: Results) -> Iterator[Table]:
    found = results["errors"]["confusion"]
    labels, counts = found["labels"], found["missed_given"]
    rows: list[list[Cell]] = [[label, *row] for label, row in zip(labels, counts, strict=True)]
    caption = "Sentences in which the label of the row was missed and that of the column wrongly given"
    yield Table("confusion", caption, [Column("Missed"), *map(Column, labels)], rows)
    rows = [list(row) for row in zip(labels, found["missed"], found["given"], strict=True)]
    columns = [Column(title) for title in ("Label", "Missed", "Wrongly given")]
    yield Table("error_counts", "Errors by label", columns, rows)
    pairs = [(count, labels[i], labels[j]) for i, row in enumerate(counts) for j, count in enumerate(row) if count]
    rows = [[missed, given, count] for count, missed, given in sorted(pairs, key=lambda pair: -pair[0])[:_MOST_PAIRS]]
    columns = [Column(title) for title in ("Missed", "Wrongly given", "Sentences")]
    yield Table("pairs_of_errors", "The most frequent pairs of errors in one sentence", columns, rows)
    yield _confident_errors(results["errors"]["confident"], place_in(results, "test"))
    yield _label_issues(results["errors"]["label_issues"], place_in(results, "train"))


def _confident_errors(errors: Sequence[Mapping[str, Any]], place: str) -> Table:
    titles = ("Respondent", "Label", "Error", "Probability", "Labels", "Predicted")
    rows: list[list[Cell]] = [
        [
            error["text"],
            error["row"],
            "" if error["respondent"] is None else str(error["respondent"]),
            error["label"],
            "missed" if error["truth"] else "wrongly given",
            error["probability"],
            ", ".join(error["labels"]),
            ", ".join(error["predicted"]),
        ]
        for error in errors
    ]
    columns = [Column("Text"), Column(place, PLACE), *map(Column, titles)]
    return Table("confident_errors", "The most confident errors on test", columns, rows)


def _label_issues(issues: Sequence[Mapping[str, Any]], place: str) -> Table:
    titles = ("Label", "Annotation", "Quality")
    one_label = any(issue["instead"] is not None for issue in issues)
    rows: list[list[Cell]] = [
        [
            issue["text"],
            issue["row"],
            issue["label"],
            "given" if issue["given"] else "not given",
            issue["quality"],
            *[issue["instead"]] * one_label,
        ]
        for issue in issues
    ]
    columns = [Column("Text"), Column(place, PLACE), *map(Column, (*titles, *["Likelier label"] * one_label))]
    return Table("label_issues", "The likeliest mistakes of annotation", columns, rows)


def _agreement(results: Results) -> Iterator[Table]:
    found = results["agreement"]
    kappa, ends = found["kappa"], found["kappa_interval"]
    rows: list[list[Cell]] = [[label, kappa[label], interval(ends[label])] for label in results["data"]["labels"]]
    rows.append(["mean", found["mean_kappa"], interval(found["mean_kappa_interval"])])
    rows.append(["Krippendorff's alpha of the label sets", found["alpha"], interval(found["alpha_interval"])])
    columns = [Column(title) for title in ("Label", "Cohen's kappa", "95 % interval")]
    noun = "sentence" if results["data"]["parts"]["test"]["respondents"] is None else "respondent"
    caption = f"Agreement of the two annotators; intervals over {counted(found['interval_groups'], noun)}"
    yield Table("agreement", caption, columns, rows)


def _published(results: Results) -> Iterator[Table]:
    published, labels = results["published"], results["data"]["labels"]
    rows = {
        method: {features: [*(f1[label] for label in labels), fmean(f1.values())] for features, f1 in by.items()}
        for method, by in published["rows"].items()
    }
    support = published["support"]
    caption = f"{published['title']}: F1 on another corpus"
    titles = [*labels, "macro mean"]
    yield _side_by_side("published", caption, titles, rows, [*(support[label] for label in labels), ""])


def _study(results: Results) -> Iterator[Table]:
    study = results["study"]
    columns = [Column("Step"), Column("Seconds", ",.0f")]
    rows: list[list[Cell]] = [[step_name(key), seconds] for key, seconds in study["seconds"].items()]
    yield Table("seconds", "Seconds of each step", columns, rows)
    columns = [Column("Package"), Column("Version")]
    yield Table("versions", "Software", columns, [list(row) for row in study["versions"].items()])
