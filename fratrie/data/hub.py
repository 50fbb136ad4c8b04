"""Names that may mean a repository of a hub."""

import os
import re
from pathlib import Path


def may_be_hub_id(name: str) -> bool:
    """Whether a name that is no folder can mean a repository of a hub, `name` or `owner/name`.

    What stands in a folder that exists is the path of a file or folder, mistyped or missing: no hub is asked for it.
    """
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or os.path.lexists(name):
        return False
    return "/" not in name or not Path(name).parent.exists()
