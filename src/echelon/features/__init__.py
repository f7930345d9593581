"""Leak-free features: definitions, pipeline, scaler, cache, leakage check."""

from echelon.features.base import Bars
from echelon.features.leakage import check_leakage
from echelon.features.prepare import PrepareReport, prepare
from echelon.features.prepared import Prepared
from echelon.features.registry import factor

__all__ = [
    "Bars",
    "PrepareReport",
    "Prepared",
    "check_leakage",
    "factor",
    "prepare",
]
