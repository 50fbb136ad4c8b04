"""How far a step of a study is, and how long it will still take."""

from collections.abc import Callable

from tqdm import tqdm

_FORMAT = "{desc}: {percentage:3.0f}% in {elapsed}, {remaining} left"


class Progress:
    """Progress bars of steps, by name.

    Args:
        hidden: show none.
    """

    def __init__(self, hidden: bool = False) -> None:
        self.hidden = hidden

    def of(self, step: str) -> Callable[[float, float], None]:
        """A function that takes the work done and the work in all, which may change, and shows them."""
        bar: tqdm | None = None

        def show(done: float, total: float) -> None:
            nonlocal bar
            if bar is None:
                bar = tqdm(total=total, desc=step, disable=self.hidden, bar_format=_FORMAT)
            bar.total = total
            bar.n = done
            bar.refresh()
            if done >= total:
                bar.close()

        return show
