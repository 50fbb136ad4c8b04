"""Cells of tables, of whatever type, as text."""

import datetime
import json
import math
from typing import Any


def readable(cell: Any) -> str:
    """A cell as text: dates as ISO 8601 has them, bytes as UTF-8 or else hexadecimal, lists and the like as json.

    An absent number (NaN) is empty, as an absent cell is.
    """
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, str):
        return whole(cell)
    if isinstance(cell, datetime.date | datetime.time):
        return cell.isoformat()
    if isinstance(cell, bytes):
        try:
            return cell.decode()
        except UnicodeDecodeError:
            return f"0x{cell.hex()}"
    return as_json(cell) if isinstance(cell, bool | list | tuple | dict) else str(cell)


def as_json(value: Any) -> str:
    """The value on one line; what json does not know is a readable string, and NaN is null."""
    return whole(json.dumps(_finite(value), ensure_ascii=False, default=readable, allow_nan=False))


def _finite(value: Any) -> Any:
    """The value without the numbers that Python writes into json, and that no other reader takes."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return (readable(value) or None) if isinstance(value, float) and not math.isfinite(value) else value


def whole(text: str) -> str:
    """The text with halves of characters, which no file can hold, as `\\udc80`."""
    return text.encode(errors="backslashreplace").decode()
