"""Names and log lines of a hierarchy, in the reader's language.

Training and risk control write what happens where it happens, in English. What they write is
known here by its form; a text of another form stays as it is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from echelon.report.texts import Words

_EXPERT = re.compile(r"expert (\d+)")
_NAMES = {"portfolio": "who_portfolio", "router": "who_router"}
_NUMBER = r"(-?[\d.]+(?:e[-+]\d+)?|nan)"


class _Saying(NamedTuple):
    """A form of log line, whole, and what it is in Chinese."""

    form: re.Pattern[str]
    chinese: str


def _saying(form: str, chinese: str) -> _Saying:
    """form: `#` stands for a number, which the Chinese names by its place, {0}, {1}, …"""
    return _Saying(re.compile(re.escape(form).replace(r"\#", _NUMBER)), chinese)


_SAYINGS = (
    # risk control
    _saying("masked for the router", "对路由器屏蔽"),
    _saying("released to the router", "重新对路由器开放"),
    _saying("in charge and masked: decided anew", "主导中被屏蔽，重新决策"),
    _saying("all to cash", "全部转为现金"),
    _saying("trading again, with a new peak", "恢复交易，重新计算高点"),
    _saying("position limit times #", "仓位上限乘以 {0}"),
    _saying("position limit restored", "恢复仓位上限"),
    _saying("went #% of the way to the target", "向目标仓位调整了 {0} %"),
    # evolution
    _saying("fitness # is the least of #; on trial", "适应度 {0} 为 {1} 个中最低，试行新参数"),
    _saying("fitness #; on trial", "适应度 {0}，试行新参数"),
    _saying("fitness # → # did not fall", "适应度 {0} → {1}，未下降"),
    _saying("fitness # → # fell", "适应度 {0} → {1}，下降"),
    _saying(
        "MAPD # is under # and this niche is the least fit",
        "MAPD {0} 低于 {1}，且该生态位适应度最低",
    ),
    _saying("its numbers are no longer finite", "数值不再有限"),
    _saying("last quarter (#) copies the first (#)", "末四分位（{0}）复制首四分位（{1}）"),
    _saying("third quarter (#), fitter niche (#)", "第三四分位（{0}），更优的生态位（{1}）"),
    _saying(
        "third quarter (#), outside better (#), slower: weights and hyperparameters",
        "第三四分位（{0}），外部更优（{1}），来自较慢的子种群：权重与超参数",
    ),
    _saying(
        "third quarter (#), outside better (#), faster: weights only",
        "第三四分位（{0}），外部更优（{1}），来自较快的子种群：仅权重",
    ),
    _saying("made anew, and the phase done again", "重新创建进程，并重做该阶段"),
)


def said_name(name: str, words: Words) -> str:
    """What an expert, the portfolio or the router is called; other names are their own."""
    found = _EXPERT.fullmatch(name)
    if found is not None:
        return words("expert_n", n=found[1])
    return words(_NAMES[name]) if name in _NAMES else name


def said(text: str, words: Words) -> str:
    """What a log line says."""
    if words.lang == "en":
        return text
    for form, chinese in _SAYINGS:
        found = form.fullmatch(text)
        if found is not None:
            return chinese.format(*found.groups())
    return text
