"""What runs in one process of tests must not hand to the next."""

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerate():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
