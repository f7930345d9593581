"""Every word of a certificate, in English and Chinese, and how its numbers are written."""

from __future__ import annotations

import math
from typing import get_args

from echelon.errors import UsageError
from echelon.proving.certificate import Bar, Certificate, Check
from echelon.report.texts import Lang, catalogue


class CertificateWords:
    """The texts of one language."""

    def __init__(self, lang: str) -> None:
        if lang not in get_args(Lang):
            raise UsageError(f"no certificate in language {lang!r}: choose en or zh.")
        self.lang = lang
        self._texts = catalogue(lang)

    def __call__(self, key: str, **fields: object) -> str:
        """The text of `key`, its fields filled in."""
        return self._texts[f"proof_{key}"].format(**fields)

    def policy(self, name: str) -> str:
        """What a policy is called."""
        if name.startswith(("momentum ", "reversal ", "relative ")):
            kind, bars = name.rsplit(" ", 1)
            return self("rule", kind=self._texts[f"policy_{kind}"], bars=bars)
        return self._texts[f"policy_{name}"]

    def mode(self, certificate: Certificate) -> str:
        """How large a proof it is."""
        sizes, pace = (certificate.about.get(name, {}) for name in ("sizes", "pace"))
        said = self(f"mode_{certificate.mode}", **{name: f"{n:,}" for name, n in sizes.items()})
        return said + (self("mode_pace", **pace) if pace else "")

    def number(self, value: float | None, unit: str) -> str:
        """As read: shares in per cent, Sharpe ratios to two places."""
        if value is None or not math.isfinite(value):
            return "–"
        return f"{value:.1%}" if unit == "share" else f"{value:.2f}"

    def result(self, check: Check) -> str:
        """The estimate of a check."""
        if check.unit == "names":
            return ", ".join(check.names) or self("nothing")
        if check.count is not None:
            k, n = check.count
            return self("k_of_n", k=k, n=n, share=self.number(check.estimate, "share"))
        return self.number(check.estimate, check.unit)

    def interval(self, check: Check) -> str:
        """Its interval; a dash without one."""
        if check.low is None or check.high is None:
            return "–"
        low, high = (self.number(end, check.unit) for end in (check.low, check.high))
        return self("interval", low=low, high=high)

    def bar(self, check: Check) -> str:
        """What it is held to."""
        if check.unit == "names":
            return self("bar_names")
        if not check.bars:
            return self("information")
        return self("and").join(self._bar(bar, check) for bar in check.bars)

    def verdict(self, passed: bool | None) -> str:
        """Passed, failed, or neither."""
        if passed is None:
            return "–"
        return self("passed" if passed else "failed")

    def _bar(self, bar: Bar, check: Check) -> str:
        value = f"{bar.value:.0%}" if check.unit == "share" else f"{bar.value:g}"
        return self(f"bar_{bar.of}", side=self(bar.side), value=value)
