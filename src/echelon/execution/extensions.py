"""Features and metrics of the user's own, from files that `execution.extensions` names.

    import numpy as np
    from echelon.execution import History, Past, execution_feature, metric

    @execution_feature("range_10")
    def last_minutes_range(past: Past) -> float:
        recent = past.price[-10:]
        return float(np.log(np.nanmax(recent) / np.nanmin(recent)))

    @metric("first_step_share")
    def first_step_share(history: History):
        return history.steps.executed[:, 0] / history.orders.amount

Loading runs these files with the rights of the caller. Features belong to the configuration that
names the file: two of them in one process never see each other's. Metrics are one table for the
process (`METRICS`), in which a file that is loaded again replaces its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from echelon.config.code import RunCode
from echelon.errors import FeatureError
from echelon.execution.features import FEATURES, Custom
from echelon.execution.metrics import METRICS
from echelon.features.user_files import read_user_file, run_user_file

_collecting: ContextVar[dict[str, Custom] | None] = ContextVar("_collecting", default=None)


@dataclass(frozen=True)
class Extensions:
    """What the files declare.

    features: by name, in their order; digest: of the files' content; empty without files
    """

    features: Mapping[str, Custom] = field(default_factory=lambda: MappingProxyType({}))
    digest: str = ""

    def chosen(self, names: Sequence[str]) -> tuple[list[str] | None, dict[str, Custom]]:
        """`names` apart: (those that are not one's own, one's own).

        Without names: (None, all of one's own), with which `public_features` takes everything.
        """
        if not names:
            return None, dict(self.features)
        own = {name: self.features[name] for name in names if name in self.features}
        return [name for name in names if name not in own], own


def execution_feature(name: str) -> Callable[[Custom], Custom]:
    """Declare the function below as a public feature of execution by this name.

    It is asked once a day and tick, as the tick ends, and handed the past alone (`Past`); NaN
    says that the value is not known. Outside a file that is being loaded it declares nothing.
    """

    def declare(function: Custom) -> Custom:
        target = _collecting.get()
        if target is not None:
            if name in FEATURES or name in target:
                raise FeatureError(
                    f"execution feature {name!r} exists: give yours another name.", name
                )
            target[name] = function
        return function

    return declare


def load_extensions(paths: Iterable[str | Path], run_code: RunCode | None = None) -> Extensions:
    """Run the Python files `paths`: features are returned, metrics join the table of metrics.

    run_code: where a run directory names the files, which run only if the user has named them
    """
    features: dict[str, Custom] = {}
    digest = hashlib.sha256()
    files = [Path(path) for path in paths]
    for path in files:
        content = read_user_file(path, "extension", "execution.extensions", run_code)
        digest.update(hashlib.sha256(content).digest())
        # Named by place, so that a file which was changed replaces its own metrics.
        place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
        module = f"_echelon_extension_{place}"
        known = len(features)
        token = _collecting.set(features)
        try:
            run_user_file(path, content, module, "extension")
        finally:
            _collecting.reset(token)
        measured = any(one.__module__ == module for one in METRICS.values())
        if len(features) == known and not measured:
            raise FeatureError(
                f"{path}: the file declares neither a feature nor a metric. Put "
                '@execution_feature("name") or @metric("name") above a function.'
            )
    return Extensions(MappingProxyType(features), digest.hexdigest()) if files else Extensions()
