"""How far a step of a study is, and how long it will still take."""

import sys
from collections.abc import Callable

from tqdm import tqdm

_FORMAT = "{desc}: {percentage:3.0f} % in {elapsed}, {remaining} left"
_SECONDS_ON_A_TERMINAL, _SECONDS_IN_A_FILE = 0.5, 60.0  # where each line stays


class Progress:
    """Progress bars of steps, by name.

    Args:
        hidden: show none.
    """

    def __init__(self, hidden: bool = False) -> None:
        self.hidden = hidden

    def of(self, step: str) -> Callable[[float, float], None]:
        """A function that takes the work done and the work in all, which may change, and shows them."""
        interval = _SECONDS_ON_A_TERMINAL if sys.stderr.isatty() else _SECONDS_IN_A_FILE
        bar: tqdm | None = None

        def show(done: float, total: float) -> None:
            nonlocal bar
            if bar is None:
                bar = tqdm(total=total, desc=step, disable=self.hidden, bar_format=_FORMAT, mininterval=interval)
            if bar.disable:
                return
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.close()

        return show
