"""The options of a study's protocol."""

from dataclasses import dataclass, field
from typing import Literal

from fratrie.training.options import check_ranges
from fratrie.training.schedules import LEAST_STEPS

from .classical import CLASSICAL_METHODS

CLASSICAL = tuple(CLASSICAL_METHODS)
PARTS = ("classical", "finetuning", "learning_curve", "errors", "words")


@dataclass(kw_only=True)
class ProtocolOptions:
    """What a study compares and how, for `HfArgumentParser`."""

    folds: int = field(default=5, metadata={"help": "Folds of the cross-validation over respondents."})
    seed: int = field(default=0, metadata={"help": "Of splits, draws, weights and the order of sentences."})
    methods: list[str] = field(
        default_factory=lambda: list(CLASSICAL), metadata={"help": f"Classical methods, of: {', '.join(CLASSICAL)}."}
    )
    depths: list[int] = field(
        default_factory=lambda: [0, 1, 2, 3, 6, 12],
        metadata={"help": "Numbers of trained layers to choose from, from the top; at most all of the encoder's."},
    )
    learning_rate: float = field(
        default=4e-4, metadata={"help": "Peak rate of the top layer, to compare depths at; a head alone has 0.1."}
    )
    epochs: int | None = field(
        default=None,
        metadata={
            "help": "Passes over the sentences, to compare depths at; by default 8, or of few sentences as many as "
            f"make {LEAST_STEPS} steps."
        },
    )
    rate_factors: list[float] = field(
        default_factory=lambda: [0.5], metadata={"help": "Further rates, times the first, at the depth chosen."}
    )
    other_epochs: list[int] | None = field(
        default=None,
        metadata={
            "help": "Further numbers of epochs, at the depth and rate chosen; by default one and a half times as many."
        },
    )
    seeds: int = field(default=3, metadata={"help": "Final models, whose scores on test are averaged."})
    calibration: Literal["temperature", "isotonic", "none"] = field(
        default="temperature", metadata={"help": "How probabilities are fitted to frequencies, out of fold."}
    )
    curve_sizes: list[int] = field(
        default_factory=lambda: [100, 200, 400, 800],
        metadata={"help": "Sentences to learn from in the learning curve, beside all of them."},
    )
    curve_draws: int = field(default=3, metadata={"help": "Draws of each size in the learning curve."})
    words_per_label: int = field(default=3, metadata={"help": "Sentences per label whose words are weighed."})
    leave_out: list[str] = field(
        default_factory=list, metadata={"help": f"Parts of the study to leave out, of: {', '.join(PARTS)}."}
    )
    processes: int | None = field(
        default=None, metadata={"help": "Models fitted side by side; by default as many as cores and memory allow."}
    )

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: names the option, its value and the way out.
        """
        ranges = {"folds": (2, 100), "seed": (0, 2**31 - 1), "depths": (0, 1000), "learning_rate": (1e-9, 1)}
        check_ranges(self, ranges | {"rate_factors": (1e-6, 1e6), "epochs": (1, 1000), "other_epochs": (1, 1000)})
        check_ranges(self, {"seeds": (1, 100), "curve_sizes": (2, 10**9)})
        check_ranges(self, {"curve_draws": (1, 100), "words_per_label": (1, 100), "processes": (1, 256)})
        for name, known in (("methods", CLASSICAL), ("leave_out", PARTS)):
            if wrong := [each for each in getattr(self, name) if each not in known]:
                raise ValueError(f"{name}: {wrong[0]!r} is not one of {', '.join(known)}")
        if not self.methods and "classical" not in self.leave_out:
            raise ValueError("methods: none is given; name some, or say --leave_out classical")
