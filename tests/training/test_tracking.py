import sys

import datasets
import pytest

from fratrie.training.tracking import Throughput, pace_bars_of_datasets, progress_bar


class FakeClock:
    now = 100.0

    def __call__(self):
        return self.now


def test_rates_by_a_fake_clock():
    clock = FakeClock()
    meter = Throughput(clock)
    meter.add(tokens=30, samples=2)
    clock.now += 2
    meter.add(tokens=10, samples=0)
    clock.now += 2
    assert meter.read() == {"tokens_per_second": 10.0, "samples_per_second": 0.5}
    meter.add(tokens=3)
    clock.now += 1
    assert meter.read() == {"tokens_per_second": 3.0}


def test_pauses_do_not_count():
    clock = FakeClock()
    meter = Throughput(clock)
    meter.add(tokens=10)
    clock.now += 1
    with pytest.raises(RuntimeError), meter.pause():
        clock.now += 50
        raise RuntimeError
    clock.now += 1
    assert meter.read() == {"tokens_per_second": 5.0}


@pytest.mark.parametrize("minutes", [0.5, 3.1])
def test_off_a_terminal_a_bar_is_a_line_a_minute(capsys, minutes):
    clock = FakeClock()
    with progress_bar(int(600 * minutes), "training") as bar:
        bar._time, bar.start_t, bar.last_print_t = clock, clock.now, clock.now
        for _ in range(int(600 * minutes)):
            clock.now += 0.1
            bar.update()
            bar.set_postfix(loss=1.0, refresh=False)
            if bar.miniters > 1 and clock.now - bar.last_print_t >= bar.maxinterval:  # as the monitor of tqdm looks
                bar.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == int(minutes)
    assert all("training" in line and "loss=1" in line for line in lines)


def test_on_a_terminal_a_bar_moves(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar(10, "training", done=4) as bar:
        bar.update(6)
    assert "4/10" in (shown := capsys.readouterr().err) and "10/10" in shown and "\r" in shown
    with progress_bar(10, "training", hidden=True) as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""


@pytest.fixture
def shown_bars():
    """Bars of datasets, whatever another test has chosen for its process."""
    hidden = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
    yield
    if hidden:
        datasets.disable_progress_bars()


def test_bars_of_datasets_keep_the_pace(shown_bars, monkeypatch):
    monkeypatch.setattr(datasets.config, "PBAR_REFRESH_TIME_INTERVAL", 0.0)
    rows = datasets.Dataset.from_dict({"number": list(range(300))})
    told: list[int] = []
    update = datasets.utils.tqdm.update
    monkeypatch.setattr(
        datasets.utils.tqdm, "update", lambda bar, number=1: [told.append(number), update(bar, number)]
    )

    def count_updates():
        told.clear()
        rows.map(lambda row: {"number": row["number"] + 1})
        return len(told)

    assert count_updates() > 100
    pace_bars_of_datasets()
    assert datasets.config.PBAR_REFRESH_TIME_INTERVAL == 60 and count_updates() <= 2
    monkeypatch.setattr(datasets.config, "PBAR_REFRESH_TIME_INTERVAL", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    pace_bars_of_datasets()
    assert datasets.config.PBAR_REFRESH_TIME_INTERVAL == 0.05
