"""Where the results of a run come from: hashes, versions, conventions, commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.files import blaming, read_json
from echelon.report.rules import idle_text, recorded_rules, rules_text
from echelon.report.run.gather import RunData
from echelon.report.texts import DASH, Words
from echelon.training.run import LEARNER_FACTS, read_learner_facts, seed_directory

_REMEDY = "Train the run again."
CODE = (
    *("fact_data", "fact_prepared", "fact_config", "fact_code", "fact_command"),
    *("fact_evaluate", "fact_report", "fact_directory"),
)
"""Facts that are set in a fixed width."""

FactRows = list[tuple[str, Sequence[str]]]
"""Keys of titles, and lines of plain text."""


def run_facts(run: RunData, words: Words, command: str) -> FactRows:
    about = run.main.facts
    facts = about["run"]
    spans = [
        f"{words(f'split_{name}')}: {first} {words('to')} {last}"
        for name in ("train", "valid", "test")
        for first, last in [getattr(run.config.split, name)]
    ]

    def by_split(fact: str) -> list[str]:
        return [f"{words(f'split_{s.name}')}: {s.facts[fact]}" for s in run.splits]

    versions = ", ".join(f"{k} {v}" for k, v in sorted(facts.get("libraries", {}).items()))
    scores = encoder_lines(run.path, words)
    # Of any seed: all are made alike.
    trained = next((r.seed for r in run.main.agents if r.seed is not None), None)
    data, code = data_facts(facts, words)
    return [
        data,
        ("fact_prepared", [short_hash(facts, "prepared", words)]),
        ("fact_config", [short_hash(facts, "config_hash", words)]),
        code,
        ("fact_seeds", [", ".join(str(r.seed) for r in run.main.agents)]),
        ("fact_assets", [str(len(run.main.agents[0].tables.weights.columns) - 1)]),
        ("fact_splits", spans),
        ("fact_fill", [words.term("ledger", about["ledger"]["fill"])]),
        ("fact_prices", [words.term("ledger", about["ledger"]["prices"])]),
        *rules_facts(recorded_rules(about, run.config), words),
        ("fact_actions", [words("greedy" if about["deterministic"] else "sampled")]),
        ("fact_year", [f"{about['periods_per_year']:,.6g}"]),
        ("fact_reads", by_split("reads")),
        ("fact_evaluated", by_split("evaluated")),
        ("fact_command", [str(facts.get("command", words("unknown")))]),
        ("fact_evaluate", [f"echelon evaluate {run.path} --split {s.name}" for s in run.splits]),
        ("fact_report", [command]),
        *([("fact_encoder", scores)] if scores else []),
        *(learner_lines(seed_directory(run.path, trained), words) if trained is not None else []),
        ("fact_versions", [versions or words("unknown")]),
    ]


def data_facts(facts: Mapping[str, Any], words: Words) -> FactRows:
    """The dataset and the code. facts: of run.json"""
    data, unknown = facts.get("data", {}), words("unknown")
    content = short_hash(data, "content_hash", words)
    return [
        ("fact_data", [f"{data.get('name', unknown)} · {content}"]),
        ("fact_code", [f"Echelon {facts.get('echelon', unknown)} · {facts.get('code', unknown)}"]),
    ]


def short_hash(tree: Mapping[str, Any], key: str, words: Words) -> str:
    """As much of a hash as tells it from any other; run.json has it whole."""
    return str(tree[key])[:20] if key in tree else words("unknown")


def rules_facts(rules: Mapping[str, Any], words: Words) -> FactRows:
    """The rules in force and, where there are such, those that cannot act."""
    idle = idle_text(rules, words)
    rows: FactRows = [("fact_rules", [rules_text(rules, words)])]
    return [*rows, ("fact_idle", [idle])] if idle else rows


def encoder_lines(run: Path, words: Words) -> list[str]:
    """What the pre-trained encoder foresees out of sample, a line a target; none without one."""
    file = run / "encoder" / "encoder.json"
    if not file.is_file():
        return []
    tree, lines = read_json(file, dict[str, Any], _REMEDY), []
    with blaming(file, _REMEDY):
        if not tree["facts"]["enabled"]:
            return [words("encoder_drawn")]
        scores = {tuple(name.rsplit("_", 1)): own for name, own in tree["facts"]["scores"].items()}
        for kind, bars in sorted(scores, key=lambda target: (target[0], int(target[1]))):
            score = scores[kind, bars]
            if not score["cells"]:
                continue
            if kind == "rank":
                lines.append(_rank_line(f"{kind}_{bars}", score, words))
                continue
            # Errors are in units of the target's variance; shown is a share of the ridge's.
            r2, gain, ridge = score["r2"], score["over_linear"], score["mse"]["linear"]
            shares = {"own": r2["encoder"], "linear": r2["linear"], "last": r2["last"]}
            for name, key in (("gain", "estimate"), ("low", "low"), ("high", "high")):
                shares[name] = None if gain[key] is None else gain[key] / ridge
            shown = {k: DASH if v is None else f"{100 * v:.2f} %" for k, v in shares.items()}
            lines.append(words("encoder_score", target=f"{kind}_{bars}", **shown))
        for name, ics in tree["facts"].get("cross_fit", {}).items():
            shown = {k: DASH if v is None else f"{v:.3f}" for k, v in ics.items()}
            lines.append(words("encoder_folds", target=name, **shown))
    return lines


def _rank_line(target: str, score: Mapping[str, Any], words: Words) -> str:
    """Daily rank IC out of sample, that of the rivals, and what the encoder is ahead of them."""
    shown: dict[str, Any] = {"icir": score["icir"]["encoder"]}
    for name, own in (("encoder", "own"), ("linear", "linear"), ("boosted", "boosted")):
        shown[own] = score["ic"][name]
        for key in ("estimate", "low", "high") if name != "encoder" else ():
            shown[f"{name}_{key}"] = score[f"over_{name}"][key]
    texts = {k: DASH if v is None else f"{v:.3f}" for k, v in shown.items()}
    return words("encoder_ranks", target=target, **texts)


def learner_lines(directory: Path, words: Words) -> FactRows:
    adapter, replay, dropped = read_learner_facts(directory)
    rows: FactRows = []
    if adapter is not None:
        with blaming(directory / LEARNER_FACTS, _REMEDY):
            share = f"{100 * adapter.share:.1f}"
        numbers = {"trained": f"{adapter.trained:,}", "whole": f"{adapter.whole:,}", "share": share}
        rows.append(("fact_adapter", [words("adapter_share", **numbers)]))
    if replay is not None:
        size, capacity = (f"{number:,}" for number in replay)
        line = words("replay_size", size=size, capacity=capacity, whole=replay.whole)
        rows.append(("fact_replay", [line]))
    if dropped:
        line = words("dropped_rules", names=", ".join(dropped))
        rows.append(("fact_dropped", [line]))
    return rows
