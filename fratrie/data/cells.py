"""Cells of tables, of whatever type, as text."""

import datetime
import json
from typing import Any


def readable(cell: Any) -> str:
    """A cell as text: dates as ISO 8601 has them, bytes as UTF-8 or else hexadecimal, lists and the like as json."""
    if cell is None:
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
    return as_json(cell) if isinstance(cell, bool | int | float | list | tuple | dict) else str(cell)


def as_json(value: Any) -> str:
    """The value on one line; what json does not know is a readable string."""
    return whole(json.dumps(value, ensure_ascii=False, default=readable))


def whole(text: str) -> str:
    """The text with halves of characters, which no file can hold, as `\\udc80`."""
    return text.encode(errors="backslashreplace").decode()
