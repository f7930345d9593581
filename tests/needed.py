"""Services and programs that a test cannot do without."""

from __future__ import annotations

import os

import pytest

from scripts.services import Document, Program, Service


def need(*services: Service | Program | Document) -> None:
    """Skip the test where a service cannot run here; on CI, where all must be there, fail it."""
    for service in services:
        reason = service.missing()
        if reason is not None:
            if os.environ.get("CI"):
                pytest.fail(f"{reason}. On CI a missing service is a failure.")
            pytest.skip(reason)
