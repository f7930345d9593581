"""What the server imports before it forks workers: everything of Echelon, and what that loads."""

from __future__ import annotations

import importlib
import pkgutil

import echelon

for _module in pkgutil.walk_packages(echelon.__path__, "echelon."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
