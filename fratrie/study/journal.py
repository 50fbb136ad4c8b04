"""What the steps of a study have found, each kept in a file as it ends, so that a study goes on where it stopped."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fratrie.checkpoints import read_json
from fratrie.files import write_json
from fratrie.training.fingerprint import differences

logger = logging.getLogger(__name__)

_ORIGIN = "study.json"


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

    def seconds(self) -> dict[str, float]:
        """How long each step took."""
        files = sorted(self.folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        return {file.stem: read_json(file)["seconds"] for file in files if file.name != _ORIGIN}

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"
