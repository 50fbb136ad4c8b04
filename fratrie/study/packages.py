"""What a step of the study needs beside the package itself."""

from importlib.util import find_spec


def check_package(name: str, purpose: str) -> None:
    """Check that a package of the extra `study` is installed, when the step that uses it begins.

    Raises:
        ValueError: it is not; says how to install it.
    """
    if find_spec(name) is None:
        raise ValueError(f"{purpose} needs the package {name}: pip install 'fratrie[study]'")
