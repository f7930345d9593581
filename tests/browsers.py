"""A page as a browser shows it: headless chromium, which may reach nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from needed import need

from scripts.services import BROWSER


def draw_page(page: Path, profile: Path) -> str:
    """The page's DOM after its script ran to the end without a complaint.

    profile: a directory for what the browser keeps; skips the test where there is no browser
    """
    need(BROWSER)
    browser = BROWSER.path()
    assert browser is not None
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={profile}", "--virtual-time-budget=10000"),
            *("--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *("--disable-background-networking", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints
    assert 'data-drawn="true"' in done.stdout
    return done.stdout


def drawn_charts(dom: str) -> set[str]:
    """Keys of the charts that plotly.js has drawn."""
    return set(re.findall(r'class="chart[^"]* js-plotly-plot" data-chart="([^"]+)"', dom))
