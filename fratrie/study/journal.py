"""What the steps of a study have found, each kept in a file as it ends, so that a study goes on where it stopped."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fratrie.checkpoints import read_json
from fratrie.files import write_json
from fratrie.training.fingerprint import differences

logger = logging.getLogger(__name__)

_ORIGIN = "study.json"
_FIT = "_fit_"


class Journal:
    """Results of steps, one JSON file each, in a folder that belongs to one study.

    Args:
        folder: of the files; it is made where there is none.
        origin: what the results follow from, by name: data, model, options.

    Raises:
        ValueError: the folder holds the steps of another study, or files that are damaged.
    """

    def __init__(self, folder: Path, origin: dict[str, Any]) -> None:
        self.folder = folder
        file = folder / _ORIGIN
        if not file.exists():
            write_json(file, origin)
        elif changed := differences(read_json(file), origin):
            raise ValueError(
                f"{folder} holds the steps of another study ({'; '.join(changed)}): choose another --output_dir, or "
                "begin anew with --overwrite_output_dir"
            )

    def step(self, name: str, find: Callable[[], Any]) -> Any:
        """What a step has found: read, if it ended before; else found now and kept. JSON must be able to hold it."""
        if (known := self.read(name)) is not None:
            logger.info("%s: done before", name)
            return known
        logger.info("%s …", name)
        start = time.perf_counter()
        found = find()
        self.write(name, found, time.perf_counter() - start)
        return self.read(name)

    def read(self, name: str) -> Any:
        """What was found under this name; `None` if nothing was."""
        file = self._file(name)
        return read_json(file)["found"] if file.exists() else None

    def write(self, name: str, found: Any, seconds: float) -> None:
        """Keep what was found in so many seconds."""
        write_json(self._file(name), {"seconds": round(seconds, 1), "found": found})

    def fits(self, name: str) -> "Fits":
        """The models that a step has fitted one by one, by their keys."""
        return Fits(self, name)

    def seconds_of(self, name: str) -> float:
        """How long it took to find what was found under this name."""
        return read_json(self._file(name))["seconds"]

    def seconds(self) -> dict[str, float]:
        """How long each step took, in the order of their ends; the time of models is their step's."""
        files = [file for file in self.folder.glob("*.json") if file.name != _ORIGIN and _FIT not in file.stem]
        return {
            file.stem: self.seconds_of(file.stem) for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)
        }

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


class Fits(Mapping[Any, tuple[NDArray[np.float32], float]]):
    """Logits `(N, L)` that models gave, and the seconds that each of them took, by keys of one number or several."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal, self._name = journal, name

    def keep(self, key: Any, logits: NDArray[np.float32], seconds: float) -> None:
        """Keep what a model found."""
        self._journal.write(self._entry(key), {"key": key, "logits": logits.tolist()}, seconds)

    def __getitem__(self, key: Any) -> tuple[NDArray[np.float32], float]:
        entry = self._entry(key)
        found = self._journal.read(entry)
        if found is None:
            raise KeyError(key)
        return np.array(found["logits"], dtype=np.float32), self._journal.seconds_of(entry)

    def __iter__(self) -> Iterator[Any]:
        for file in sorted(self._journal.folder.glob(f"{self._entry('')}*.json")):
            key = self._journal.read(file.stem)["key"]
            yield tuple(key) if isinstance(key, list) else key

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _entry(self, key: Any) -> str:
        parts = key if isinstance(key, tuple) else (key,)
        return f"{self._name}{_FIT}{'_'.join(map(str, parts))}"
