"""What the steps of a study have found, each kept in a file as it ends, so that a study goes on where it stopped."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fratrie.checkpoints import read_json
from fratrie.files import write_json
from fratrie.training.fingerprint import differences

from .names import step_name

logger = logging.getLogger(__name__)

_ORIGIN = "study.json"


def holds_study(folder: Path) -> bool:
    """Whether this is the folder of a journal."""
    return (folder / _ORIGIN).exists()


class Journal:
    """Results of steps, one JSON file each, in a folder that belongs to one study.

    Args:
        folder: of the files; it is made where there is none.
        origin: what the results follow from, by name: data, model, options. What else a step depends on belongs into
            its name.

    Attributes:
        seconds: that each step has taken, by name, in the order in which this process asked for them.

    Raises:
        ValueError: the folder holds the steps of another study, or files that are damaged.
    """

    def __init__(self, folder: Path, origin: dict[str, Any]) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        file = folder / _ORIGIN
        if not holds_study(folder) or list(folder.glob("*.json")) == [file]:  # no step has ended yet
            write_json(file, origin)
        elif changed := differences(read_json(file), origin):
            raise ValueError(
                f"{folder} holds the steps of another study ({'; '.join(changed)}): choose another --output_dir, or "
                "begin anew with --overwrite_output_dir"
            )

    def step(self, name: str, find: Callable[[], Any]) -> Any:
        """What a step has found: read, if it ended before; else found now and kept. JSON must be able to hold it."""
        if known := self.read(name):
            logger.info("%s: done before", step_name(name))
        else:
            logger.info("%s …", step_name(name))
            start = time.perf_counter()
            found = find()
            self.write(name, found, time.perf_counter() - start)
            known = self.read(name)
        assert known is not None
        found, self.seconds[name] = known
        return found

    def read(self, name: str) -> tuple[Any, float] | None:
        """What was found under this name, and the seconds that it took; `None` if nothing was.

        Raises:
            ValueError: the file is damaged.
        """
        file = self.folder / f"{name}.json"
        if not file.exists():
            return None
        try:
            kept = read_json(file)
            return kept["found"], float(kept["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it, and what it held is found anew") from error

    def write(self, name: str, found: Any, seconds: float) -> None:
        """Keep what was found in so many seconds."""
        write_json(self.folder / f"{name}.json", {"seconds": round(seconds, 1), "found": found})

    def fits(self, name: str) -> "Fits":
        """The models that a step has fitted one by one, by their keys."""
        return Fits(self, name)


class Fits:
    """Logits `(N, L)` that models gave, and the seconds that each of them took, by keys of one part or several."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal, self._name = journal, name

    def keep(self, key: Any, logits: NDArray[np.float32], seconds: float) -> None:
        """Keep what a model found."""
        self._journal.write(self._entry(key), logits.tolist(), seconds)

    def get(self, key: Any) -> tuple[NDArray[np.float32], float] | None:
        """What a model found before, and in how many seconds."""
        if (known := self._journal.read(self._entry(key))) is None:
            return None
        logits, seconds = known
        return np.array(logits, dtype=np.float32), seconds

    def _entry(self, key: Any) -> str:
        parts = key if isinstance(key, tuple) else (key,)
        return f"{self._name}_fit_{'_'.join(map(str, parts))}"
