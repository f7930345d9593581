"""Leak-free features: definitions, pipeline, scaler, cache, leakage check."""

from echelon.features.base import Bars
from echelon.features.leakage import check_leakage
from echelon.features.prepare import PrepareReport, prepare
from echelon.features.prepared import Prepared
from echelon.features.registry import factor
from echelon.features.stream import FeatureRow, FeatureStream

__all__ = [
    "Bars",
    "FeatureRow",
    "FeatureStream",
    "PrepareReport",
    "Prepared",
    "check_leakage",
    "factor",
    "prepare",
]
