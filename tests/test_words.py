"""The words of the code: what GLOSSARY retired does not come back as a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "echelon"
RETIRED = {
    "chance": "rng (numpy), generator (torch) or probability",
    "told": "metrics, config, reported: what it is",
    "found": "what was found: rows, metrics, match, missing",
    "anew": "restart",
    "begun": "start",
    "beside": "comparison",
    "deeds": "actions",
    "whims": "what they are",
    "chooser": "RouterPolicy",
    "choosers": "router_policies",
}
IRREGULAR = frozenset(
    (
        *("begun", "bought", "built", "chosen", "done", "drawn", "found", "given", "gone", "held"),
        *("kept", "known", "laid", "left", "lost", "made", "meant", "paid", "said", "seen", "sent"),
        *("shown", "sold", "spent", "sought", "taken", "told", "written", "whole", "plain"),
        *("alike", "apart", "alone", "alive", "own"),
    )
)
PARTICIPLE = re.compile(r"^_*[a-z]+(?:ed|wn)$")
VERBS = frozenset(
    {
        "embed",
        "feed",
        "seed",
        "shed",
        "speed",
        "exceed",
        "proceed",
        "need",
        "bed",
        "reseed",
        "markdown",
    }
)

MISNAMED = re.compile(
    r"[Ss]eeds? 00\d|[Ss]eed (?:document|note)|the seed(?:'s own settings|s? ha(?:s|ve) it)|"
    r"(?:chosen|written|given) by the seed\b"
)
"""The documents that this began with, as they were once called."""
TERMS = {"账本": "账户", "数据仓库": "存储", "测试窗口": "测试集", "训练窗口": "训练集"}
TERMS |= {"验证窗口": "验证集", "固定份额": "Fixed-Share 在线加权", "基线": "基准策略"}
"""A second Chinese word for a thing → the one that we use."""


def _words(name: str) -> list[str]:
    return [part.lower() for part in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name) if part]


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every identifier that the module itself gives, and its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name, line
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg, line
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, line
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.attr, line
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.rpartition(".")[2], line


def _loop_variables(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            for inner in ast.walk(node.target):
                if isinstance(inner, ast.Name):
                    yield inner.id, inner.lineno


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions and methods, without properties: an attribute may be an adjective."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
            if not decorators & {"property", "cached_property", "functools.cached_property"}:
                yield node


def _faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for name, line in _names(tree):
        for word in _words(name):
            if word in RETIRED and "NotFound" not in name:
                yield line, f"{name!r}: say {RETIRED[word]}"
    for name, line in _loop_variables(tree):
        if name in ("one", "other", "each"):
            yield line, f"{name!r} as a loop variable: say what it is"
    for function in _functions(tree):
        words = _words(function.name)
        bare = len(words) == 1 and words[0] not in VERBS
        if bare and (words[0] in IRREGULAR or PARTICIPLE.match(words[0])):
            yield function.lineno, f"{function.name!r}: a participle or adjective as a function"
        if function.name == "of":
            yield function.lineno, "'of' as a constructor: say from what"


def faults(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sorted({f"{path}:{line}: {fault}" for line, fault in _faults(tree)})


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_retired_words_stay_out(path: Path) -> None:
    assert not faults(path)
    assert not set(_words(path.stem)) & set(RETIRED)


def test_source_documents_are_design_notes() -> None:
    """A seed is a random seed, in everything that is read."""
    root = SOURCE.parents[1]
    read = [*root.glob("*.md"), *root.glob("configs/**/*.yaml"), *root.glob("docs/**/*.md")]
    misnamed = [
        f"{path}: {match.group()}"
        for path in (*read, *SOURCE.rglob("*.py"))
        for match in re.finditer(MISNAMED, path.read_text(encoding="utf-8"))
    ]
    assert len(read) > 30
    assert not misnamed


@pytest.mark.parametrize(
    "code",
    [
        "def draw(chance): ...",
        "self.told = 1",
        "rows_found = 1",
        "class RouterChooser: ...",
        "import numpy as deeds",
        "call(anew=True)",
        "def _believed(): ...",
        "for one in runs: ...",
        "names = [other for other in runs]",
        "class A:\n    def of(cls): ...",
    ],
)
def test_retired_word_is_noticed_wherever_a_name_is_given(code: str) -> None:
    assert list(_faults(ast.parse(code)))


def test_one_chinese_term_for_each_thing() -> None:
    root = SOURCE.parents[1]
    text = (root / "README.zh-CN.md").read_text(encoding="utf-8")
    catalogue = (SOURCE / "report" / "catalogue" / "zh.yaml").read_text(encoding="utf-8")
    # A ledger (of prices) is not a book (an account).
    text += catalogue.replace("账本价格", "")
    assert not {term: ours for term, ours in TERMS.items() if term in text}
