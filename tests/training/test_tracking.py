import pytest

from fratrie.training.tracking import Throughput


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
