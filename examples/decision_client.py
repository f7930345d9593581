"""Ask the decision service what to trade: nothing but the standard library, so it runs anywhere.

    export ECHELON_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe(24))")
    echelon serve BUNDLE --store store &
    python examples/decision_client.py bars.json

bars.json: {"time": "2020-01-03", "bars": [{"symbol": "AAPL", "open": …, "close": …}, …]}, and, for
an account of your own, {"account": {"cash": 1000.0, "positions": {"AAPL": 10}}}.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def decide(bars: dict[str, Any], url: str = "http://127.0.0.1:8321") -> dict[str, Any]:
    """Send the bars of one time; sending them again is safe and gets the same answer."""
    headers = {"Authorization": f"Bearer {os.environ['ECHELON_TOKEN']}"}
    headers["Content-Type"] = "application/json"
    data = json.dumps(bars).encode()
    request = urllib.request.Request(f"{url}/v1/bars", data, headers)  # noqa: S310 (http, ours)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            decision: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as refusal:
        raise SystemExit(f"refused ({refusal.code}): {json.load(refusal)['error']}") from None
    return decision


if __name__ == "__main__":
    for order in decide(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))["orders"]:
        sys.stdout.write(f"{order['side']:4} {order['shares']:>12,.2f} {order['symbol']}\n")
