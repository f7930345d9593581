"""Boosted regression trees as plain arrays: fitted by LightGBM, evaluated by a kernel of ours.

1. `fit_trees` lets LightGBM grow shallow trees on one thread, with fixed bins and every choice that
   could depend on the machine or on timing switched off: the same rows give the same trees.
2. What it found is laid out in arrays, nodes of all trees one after the other, each before its
   children. They can be kept in any store of arrays, and to use them takes neither LightGBM nor
   reading anybody's text.
3. `predict_trees` walks them, tree by tree: the sum, in that order, is bit for bit LightGBM's own.

Axes: `S` samples, `F` features, `J` inner nodes of all trees, `K` trees, `L` leaves of all trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from echelon.types import Floats, Floats32

_MODEL: Mapping[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.05,
    "num_leaves": 31,
    "lambda_l2": 1.0,
    # Half of the features for each tree: trees differ more, and take half the time.
    "feature_fraction": 0.5,
    "boost_from_average": False,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "verbosity": -1,
}
_BINS: Mapping[str, Any] = {
    "max_bin": 63,
    "bin_construct_sample_cnt": 50_000,
    "enable_bundle": False,
    "feature_pre_filter": False,
    **{name: _MODEL[name] for name in ("num_threads", "force_row_wise", "verbosity")},
}
_LEAF_SHARE = 300
"""A leaf holds one in so many of the samples at least: returns are nearly all noise."""
_LEAST_LEAF = 20

Nodes = NDArray[np.int32]


class Trees(NamedTuple):
    """At a node: left if x[feature] ≤ threshold, else right. A child c < 0 is the leaf ~c."""

    feature: Nodes  # [J]
    threshold: Floats  # [J]
    left: Nodes  # [J]
    right: Nodes  # [J]
    root: Nodes  # [K]
    value: Floats  # [L]

    def problem(self, n_features: int) -> str | None:
        """Why these arrays, which may be a stranger's, are no trees over F features; None: sound.

        Each node before its children: so a walk ends, and never leaves the arrays.
        """
        shapes = {name: part.shape for name, part in self._asdict().items()}
        n_nodes, n_leaves = len(self.feature), len(self.value)
        for name in ("feature", "threshold", "left", "right"):
            if shapes[name] != (n_nodes,):
                return f"{name} is {list(shapes[name])}, expected [{n_nodes}]"
        for name in self._fields:
            kind = np.float64 if name in ("threshold", "value") else np.int32
            if getattr(self, name).dtype != kind or getattr(self, name).ndim != 1:
                return f"{name} is not a row of {np.dtype(kind)}"
        if n_nodes and not (self.feature.min() >= 0 and self.feature.max() < n_features):
            return f"a node asks for a feature that is none of the {n_features}"
        own = np.arange(n_nodes)
        for name in ("left", "right", "root"):
            child = getattr(self, name)
            before = child <= own if name != "root" else np.zeros(len(child), dtype=bool)
            outside = (child >= n_nodes) | (child < -n_leaves)
            if (outside | (before & (child >= 0))).any():
                return f"{name} points to no node below its own, and to no leaf"
        if not (np.isfinite(self.threshold).all() and np.isfinite(self.value).all()):
            return "a threshold or a leaf is not a number"
        return None


def fit_trees(x: Floats32, y: Floats, *, trees: int, seed: int) -> Trees:
    """At most so many trees that foresee y[S] from x[S,F]; fewer where no split helps."""
    return trees_of_booster(fit_booster(x, y, trees=trees, seed=seed))


def fit_booster(x: Floats32, y: Floats, *, trees: int, seed: int) -> Any:  # noqa: ANN401 (LightGBM's)
    """LightGBM's own model, before it is laid out."""
    import lightgbm

    leaf = max(_LEAST_LEAF, len(y) // _LEAF_SHARE)
    data = lightgbm.Dataset(x, y, params=dict(_BINS))
    settings = {**_MODEL, **_BINS, "min_data_in_leaf": leaf, "seed": seed % 2**31}
    return lightgbm.train(settings, data, num_boost_round=trees)


def trees_of_booster(booster: Any) -> Trees:  # noqa: ANN401 (LightGBM's)
    """The trees of a LightGBM model without categories and missing values."""
    nodes: list[tuple[int, float]] = []
    children: list[list[int]] = []
    leaves: list[float] = []

    def lay(tree: Mapping[str, Any]) -> int:
        if "leaf_value" in tree:
            leaves.append(tree["leaf_value"])
            return ~(len(leaves) - 1)
        assert tree["decision_type"] == "<=", "a split by category"
        number = len(nodes)
        nodes.append((tree["split_feature"], tree["threshold"]))
        children.append([0, 0])
        children[number][:] = lay(tree["left_child"]), lay(tree["right_child"])
        return number

    roots = [lay(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"]]
    pairs = np.array(children, dtype=np.int32).reshape(-1, 2)
    return Trees(
        feature=np.array([feature for feature, _ in nodes], dtype=np.int32),
        threshold=np.array([threshold for _, threshold in nodes], dtype=np.float64),
        left=pairs[:, 0].copy(),
        right=pairs[:, 1].copy(),
        root=np.array(roots, dtype=np.int32),
        value=np.array(leaves, dtype=np.float64),
    )


def predict_trees(x: Floats32, trees: Trees) -> Floats:
    """[S] the sum of all trees at x[S,F], float32 and finite."""
    out = np.zeros(len(x))
    _predict(np.ascontiguousarray(x), trees, out)
    return out


@njit(cache=True)
def _predict(x: Floats32, trees: Trees, out: Floats) -> None:
    feature, threshold, left, right = trees.feature, trees.threshold, trees.left, trees.right
    for k in range(len(trees.root)):
        for s in range(len(out)):
            node = trees.root[k]
            while node >= 0:
                goes_left = np.float64(x[s, feature[node]]) <= threshold[node]
                node = left[node] if goes_left else right[node]
            out[s] += trees.value[~node]
