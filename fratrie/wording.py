"""Words that several parts of the package say to people."""


def counted(number: int, noun: str) -> str:
    """A count with its noun: «1 text», «1,318 texts»."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
