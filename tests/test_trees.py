"""Boosted trees: the kernel against LightGBM's own predictions, determinism, and forged arrays."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.ops.trees import Trees, fit_booster, fit_trees, predict_trees, trees_of_booster
from echelon.types import Floats, Floats32


def samples(n: int = 3_000, n_features: int = 6) -> tuple[Floats32, Floats]:
    """Features, one of them with few values and one constant, and what hangs on two of them."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, n_features)).astype(np.float32)
    x[:, 1] = rng.integers(0, 3, n)
    x[:, 2] = 0.0
    return x, np.where(x[:, 0] > 0.3, 1.0, -1.0) * x[:, 1] + rng.standard_normal(n)


def test_the_kernel_predicts_bit_for_bit_what_lightgbm_does() -> None:
    x, y = samples()
    booster = fit_booster(x, y, trees=40, seed=3)
    trees = trees_of_booster(booster)
    assert len(trees.root) == 40
    rng = np.random.default_rng(6)
    fresh = np.concatenate([x, 3.0 * rng.standard_normal(x.shape).astype(np.float32)])
    # On the very thresholds too, as float32 has them.
    edges = np.repeat(trees.threshold.astype(np.float32)[:, None], x.shape[1], axis=1)
    for each in (fresh, edges, np.nextafter(edges, np.float32(9e9)), np.zeros_like(x[:1])):
        assert np.array_equal(predict_trees(each, trees), booster.predict(each))
    foreseen = predict_trees(x, trees)
    assert np.corrcoef(foreseen, y)[0, 1] > 0.6


def test_the_same_samples_give_the_same_trees_and_another_seed_gives_others() -> None:
    x, y = samples()
    first, again, other = (fit_trees(x, y, trees=10, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.feature, other.feature)


def test_where_no_split_helps_the_trees_are_leaves() -> None:
    x, _ = samples(200)
    booster = fit_booster(x, np.zeros(200), trees=5, seed=0)
    trees = trees_of_booster(booster)
    assert len(trees.feature) == 0
    assert np.array_equal(predict_trees(x, trees), booster.predict(x))
    assert trees.problem(6) is None


def test_a_tree_by_hand() -> None:
    ints = np.int32
    trees = Trees(
        feature=np.array([1, 0], ints),
        threshold=np.array([0.5, -1.0]),
        left=np.array([1, ~0], ints),
        right=np.array([~2, ~1], ints),
        root=np.array([0, ~3], ints),
        value=np.array([1.0, 2.0, 4.0, 10.0]),
    )
    x = np.array([[-2.0, 0.0], [0.0, 0.5], [0.0, 0.6]], dtype=np.float32)
    assert trees.problem(2) is None
    assert predict_trees(x, trees).tolist() == [11.0, 12.0, 14.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"left": [0]}, "left points to no node"),
        ({"right": [7]}, "right points to no node"),
        ({"left": [-9]}, "left points to no node"),
        ({"root": [1]}, "root points to no node"),
        ({"feature": [2]}, "none of the 2"),
        ({"feature": [-1]}, "none of the 2"),
        ({"threshold": [np.nan]}, "not a number"),
        ({"value": [1.0, np.inf]}, "not a number"),
        ({"right": [-1, -1]}, "right is [2], expected [1]"),
    ],
)
def test_forged_arrays_are_no_trees(changes: dict[str, list[float]], words: str) -> None:
    sound: dict[str, list[float]] = {
        "feature": [0],
        "threshold": [0.0],
        "left": [-1],
        "right": [-2],
        "root": [0],
        "value": [1.0, 2.0],
    }
    floats = ("threshold", "value")
    parts = {
        name: np.array(part, np.float64 if name in floats else np.int32)
        for name, part in (sound | changes).items()
    }
    assert Trees(**{n: np.array(p, parts[n].dtype) for n, p in sound.items()}).problem(2) is None
    assert words in str(Trees(**parts).problem(2))
