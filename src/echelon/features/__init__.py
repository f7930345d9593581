"""Leak-free features: definitions, pipeline, scaler, cache, leakage check."""

from echelon.features.base import Bars, CrossSection, Feature
from echelon.features.leakage import Leak, LeakageReport, check_leakage
from echelon.features.prepare import PrepareReport, prepare
from echelon.features.prepared import Prepared, Split
from echelon.features.registry import factor
from echelon.features.scaler import Scaler

__all__ = [
    "Bars",
    "CrossSection",
    "Feature",
    "Leak",
    "LeakageReport",
    "PrepareReport",
    "Prepared",
    "Scaler",
    "Split",
    "check_leakage",
    "factor",
    "prepare",
]
