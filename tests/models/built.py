"""Models that many tests build alike: built once in a process of tests, and copied for each of them."""

import copy
from collections import OrderedDict

import torch

KEPT = 400  # models, so that a file's whole list of configurations fits
_built = OrderedDict()


def copy_of(key, build):
    """A copy of the model that `build()` gives, which runs only if none was kept under this key.

    A copy takes a quarter of the time: most of it goes into checking configurations. Copies share no memory, and
    random numbers go on as they do after `build()`, which is to seed them itself.
    """
    if key not in _built:
        _built[key] = build(), torch.get_rng_state()
        if len(_built) > KEPT:
            _built.popitem(last=False)
    _built.move_to_end(key)
    model, random_state = _built[key]
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)
