"""The steps of a study, in order, and what each of them adds to the results.

Everything is chosen on train: settings by cross-validation over respondents, calibration and thresholds on the labels
that models gave to sentences which they had not learnt. Test is labelled once, by what was chosen.

Shapes: S seeds, N sentences, L labels.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fratrie.checkpoints import CONFIG, read_json
from fratrie.files import remove_folder, write_json
from fratrie.training.baselines import folds_of
from fratrie.training.classifiers import load_classifier
from fratrie.training.fingerprint import digest_of, fingerprint_files
from fratrie.training.metrics import MULTI_LABEL, multilabel_scores, probabilities
from fratrie.training.schedules import LEAST_STEPS, enough_epochs

from . import errors
from .calibration import calibrated, compare_calibration, learn_points, learn_thresholds, temperatures
from .classical import name_of, score_classical
from .data import StudyData
from .finetuning import Recipe, Setting, finetune, finetuned_logits, search
from .journal import Fits, Journal
from .learning_curve import Rows, best_classical, classical_curve, subsets
from .options import ProtocolOptions
from .progress import Progress
from .scores import compare_with_classical, decisions, score
from .words import words_for_labels

Results = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A study under way.

    Attributes:
        data: sentences of train and test.
        options: of the protocol.
        encoder: folder of the pretrained encoder.
        models: folder of the final models, one folder below it for each seed.
        journal: keeps what each step found.
        progress: tells how far a step is.
        max_length: tokens at most; longer sentences are cut.
    """

    data: StudyData
    options: ProtocolOptions
    encoder: Path
    models: Path
    journal: Journal
    progress: Progress
    max_length: int | None = None

    def run(self) -> Results:
        """Take all steps that are not left out, each once.

        Returns:
            What they found by the keys of results.json: `classical`, `search`, `finetuned`, `calibration`,
            `learning_curve`, `errors` and `words`; `None` for what was left out.
        """
        return {
            "classical": self._found("classical", lambda: _without_predictions(self.classical)),
            "search": self._found("finetuning", lambda: {name: self.search[name] for name in ("tried", "chosen")}),
            "finetuned": self._found("finetuning", self._finetuned),
            "calibration": self._found("finetuning", self._calibration),
            "learning_curve": self._found("learning_curve", self._learning_curve),
            "errors": self._found("errors", self._errors),
            "words": self._found("words", self._words),
        }

    def _found(self, part: str, find: Any) -> Any:
        needs_models = part in ("errors", "words")
        left_out = {part, "finetuning"} if needs_models else {part}
        return None if left_out & set(self.options.leave_out) else find()

    @cached_property
    def folds(self) -> list[Any]:
        """Of the cross-validation, the same for all methods."""
        return folds_of(self.data.train, self.options.folds, self.options.seed)

    @cached_property
    def recipe(self) -> Recipe:
        """What the search tries."""
        own, sentences = self.options, min(len(learnt) for learnt, _ in self.folds)
        epochs = own.epochs or enough_epochs(Recipe.epochs, Recipe().steps_per_epoch(sentences))
        return Recipe(
            depths=own.depths,
            learning_rate=own.learning_rate,
            epochs=epochs,
            rate_factors=own.rate_factors,
            other_epochs=[3 * epochs // 2] if own.other_epochs is None else own.other_epochs,
            max_length=self.max_length,
        )

    @cached_property
    def classical(self) -> dict[str, Any]:
        """By method and features: parameters, scores and predictions on test."""
        return score_classical(
            *(self.data, self.encoder, self.folds, self.options.methods),
            seed=self.options.seed,
            workers=self.options.processes,
            max_length=self.max_length,
            step=self.journal.step,
            progress=self.progress.of("classical methods"),
        )

    @cached_property
    def search(self) -> dict[str, Any]:
        """What `fratrie.study.finetuning.search` found, its logits as lists."""
        name = f"search-{digest_of(asdict(self.recipe))[:8]}"
        found = self.journal.step(name, self._search)
        self.journal.seconds[name] = sum(entry["seconds"] for entry in found["tried"])  # also those before it stopped
        return found

    def _search(self) -> dict[str, Any]:
        fits = self.journal.fits("fold")
        found = search(
            self.data,
            self.encoder,
            self.folds,
            self.recipe,
            seed=self.options.seed,
            workers=self.options.processes,
            known=fits.get,
            keep=fits.keep,
            progress=self.progress.of("search"),
        )
        return found | {"out_of_fold_logits": found["out_of_fold_logits"].tolist()}

    @cached_property
    def setting(self) -> Setting:
        """What the search has chosen."""
        chosen = self.search["chosen"]
        return Setting(chosen["depth"], chosen["learning_rate"], chosen["epochs"])

    @property
    def setting_name(self) -> str:
        """The setting in the names of the steps that depend on it."""
        return "-".join(map(str, vars(self.setting).values()))

    @cached_property
    def seeds(self) -> list[int]:
        """Of the final models."""
        return [self.options.seed + number for number in range(self.options.seeds)]

    @cached_property
    def raw_logits_SNL(self) -> NDArray[np.float64]:
        """Logits of test before calibration, by the final models, each of which is trained where it is not there."""
        name = f"models-{self.setting_name}"
        folders, fits = {seed: self.models / f"seed{seed}" for seed in self.seeds}, self.journal.fits(name)
        for folder in set(self.models.glob("seed*")) - set(folders.values()):  # of another setting, perhaps
            remove_folder(folder)

        def key(seed: int) -> tuple[int, str]:
            weights = sorted(folders[seed].glob("*.safetensors"))
            return seed, digest_of(fingerprint_files([*map(str, weights)]))[:8]

        logits_SNL = finetune(
            *(self.data, self.encoder, self.setting, folders, self.recipe),
            workers=self.options.processes,
            known=lambda seed: fits.get(key(seed)),
            keep=lambda seed, *found: fits.keep(key(seed), *found),
            progress=self.progress.of("models"),
        )
        self._note_seconds(name, fits, map(key, self.seeds))
        return logits_SNL.astype(np.float64)

    def _note_seconds(self, name: str, fits: Fits, keys: Iterable[Any]) -> None:
        """Of models that were fitted side by side, the time of all together."""
        self.journal.seconds[name] = sum(found[1] for key in keys if (found := fits.get(key)))

    @cached_property
    def out_of_fold_logits_NL(self) -> NDArray[np.float64]:
        """Logits of train by models that had not seen its sentences, calibrated."""
        return calibrated(np.array(self.search["out_of_fold_logits"]), self.points)

    @cached_property
    def points(self) -> Any:
        """Of the calibration."""
        raw_NL = np.array(self.search["out_of_fold_logits"])
        return learn_points(raw_NL, self.data.train.labels, self.options.calibration, self.data.task.problem_type)

    @cached_property
    def thresholds(self) -> list[float] | None:
        """Of the labels, for several labels per sentence."""
        if self.data.task.problem_type != MULTI_LABEL:
            return None
        values_NL = probabilities(self.out_of_fold_logits_NL, MULTI_LABEL)
        return learn_thresholds(values_NL, self.data.train.labels, self.folds)

    @cached_property
    def logits_SNL(self) -> NDArray[np.float64]:
        """Logits of test, calibrated."""
        return np.stack([calibrated(logits_NL, self.points) for logits_NL in self.raw_logits_SNL])

    @cached_property
    def predictions_SNL(self) -> NDArray[np.int64]:
        """Decisions about test."""
        return decisions(self.logits_SNL, self.data.task, self.thresholds)

    def _finetuned(self) -> Results:
        predictions_SNL = self.predictions_SNL  # with which the models are there
        for seed in self.seeds:
            _write_decisions(self.models / f"seed{seed}", self.points, self.thresholds)
        labels, test = self.data.task.labels, self.data.test
        uncalibrated_SNL = decisions(self.raw_logits_SNL, self.data.task)
        classical = {} if "classical" in self.options.leave_out else self.classical
        baselines = {
            f"{method} {features}": np.array(found["predictions"])
            for method, by_features in classical.items()
            for features, found in by_features.items()
        }
        return {
            "seeds": self.seeds,
            "test": score(predictions_SNL, test, labels),
            "test_by_seed": [multilabel_scores(run, test.labels)["present_macro_f1"] for run in predictions_SNL],
            "uncalibrated_test": score(uncalibrated_SNL, test, labels),
            "comparison": compare_with_classical(predictions_SNL, baselines, test, labels) if baselines else None,
        }

    def _calibration(self) -> Results:
        labels, test, method = self.data.task.labels, self.data.test, self.options.calibration
        # The decisions of all seeds together: a bin then holds more of them.
        truth_NL = np.concatenate([test.labels] * len(self.seeds))
        before_NL, after_NL = np.concatenate(self.raw_logits_SNL), np.concatenate(self.logits_SNL)
        return {
            "method": method,
            "thresholds": dict(zip(labels, self.thresholds, strict=True)) if self.thresholds else None,
            "temperatures": dict(zip(labels, temperatures(self.points), strict=True))
            if method == "temperature"
            else {},
            **compare_calibration(before_NL, after_NL, truth_NL, labels, self.data.task.problem_type),
        }

    def _learning_curve(self) -> Results | None:
        """Of the best classical method and of fine-tuning, on draws of respondents and on all of train."""
        own, whole = self.options, len(self.data.train.texts)
        sizes = sorted({size for size in own.curve_sizes if size < whole})
        if not sizes:
            return None
        parts = subsets(self.data.train, sizes, own.curve_draws, own.seed)
        name = "-".join(map(str, ("curve", *sizes, own.curve_draws)))
        methods: dict[str, list[list[float]]] = {}
        if "classical" not in own.leave_out:
            method, features = best_classical(self.classical)
            methods[f"{method} {features}"] = self.journal.step(
                f"{name}-{name_of(method, features)}", lambda: self._classical_curve(method, features, parts)
            )
        if "finetuning" not in own.leave_out:
            methods["finetuned"] = self._finetuned_curve(f"{name}-{self.setting_name}-{LEAST_STEPS}", parts)
        return {"sizes": [*sizes, whole], "draws": own.curve_draws, "methods": methods}

    def _classical_curve(self, method: str, features: str, parts: Sequence[Sequence[Rows]]) -> list[list[float]]:
        found = self.classical[method][features]
        curve = classical_curve(
            *(self.data, method, features, found["parameters"], parts, self.encoder),
            seed=self.options.seed,
            workers=self.options.processes,
            max_length=self.max_length,
        )
        return [*curve, [found["test"]["present_macro_f1"]]]

    def _finetuned_curve(self, name: str, parts: Sequence[Sequence[Rows]]) -> list[list[float]]:
        fits = self.journal.fits(name)
        logits_PNL = finetuned_logits(
            *(self.data, self.encoder, self.setting, [rows for draws in parts for rows in draws], self.recipe),
            seed=self.options.seed,
            workers=self.options.processes,
            known=fits.get,
            keep=fits.keep,
            progress=self.progress.of("learning curve"),
        )
        self._note_seconds(name, fits, range(len(logits_PNL)))
        scores = iter(self._macro_f1(logits_PNL))
        by_size = [[next(scores) for _ in draws] for draws in parts]
        return [*by_size, self._macro_f1(self.raw_logits_SNL)]

    def _macro_f1(self, logits_SNL: NDArray[np.floating[Any]]) -> list[float]:
        """Of the decisions of each model at a probability of 0.5, on test."""
        runs = decisions(logits_SNL, self.data.task)
        return [multilabel_scores(run, self.data.test.labels)["present_macro_f1"] for run in runs]

    def _errors(self) -> Results:
        """Of the first model on test, and doubtful labels of train, by the models that had not seen them."""
        task, train, test = self.data.task, self.data.train, self.data.test
        predicted_NL = self.predictions_SNL[0]
        values_NL = probabilities(self.logits_SNL[0], task.problem_type)
        unseen_NL = probabilities(self.out_of_fold_logits_NL, task.problem_type)
        return {
            "confusion": errors.confusion(predicted_NL, test.labels, task.labels),
            "confident": errors.confident_errors(values_NL, predicted_NL, test.labels, test, task.labels),
            "label_issues": errors.label_issues(
                unseen_NL, train.labels, train, task.labels, problem_type=task.problem_type
            ),
        }

    def _words(self) -> Results:
        values_NL = probabilities(self.logits_SNL[0], self.data.task.problem_type)
        own = self.options
        model_name = f"{self.setting_name}-{own.calibration}"

        def find() -> Results:
            model, tokenizer, task = load_classifier(self.models / f"seed{self.seeds[0]}")
            return words_for_labels(
                *(model, tokenizer, self.data.test, task, values_NL, self.predictions_SNL[0], own.words_per_label),
                step=lambda sentence, explain: self._once(f"words_of-{model_name}-{sentence}", explain),
                progress=self.progress.of("words"),
            )

        return self.journal.step(f"words-{model_name}-{own.words_per_label}", find)

    def _once(self, name: str, find: Callable[[], Any]) -> Any:
        """A part of a step, which is found again if the step was interrupted."""
        if known := self.journal.read(name):
            return known[0]
        began = time.perf_counter()
        found = find()
        self.journal.write(name, found, time.perf_counter() - began)
        return found


def _without_predictions(classical: dict[str, Any]) -> Results:
    return {
        method: {
            features: {name: value for name, value in found.items() if name != "predictions"}
            for features, found in by_features.items()
        }
        for method, by_features in classical.items()
    }


def _write_decisions(folder: Path, points: Any, thresholds: list[float] | None) -> None:
    """Let a saved model decide as the study found best."""
    file = folder / CONFIG
    config = read_json(file)
    wanted = config | {"label_calibration": points, "label_thresholds": thresholds}
    if config != wanted:
        write_json(file, wanted)
