"""Run directories: what a result was made from, written so that it can be made again."""

from echelon.runs.directory import RunDirectory

__all__ = ["RunDirectory"]
