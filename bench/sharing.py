"""Learning from each other's replay with 5-step targets: naively, corrected, or not at all?

    python -m bench sharing
    python -m bench.sharing --directory DIR --condition corrected
    python -m bench.sharing --directory DIR --summary

Four learners push a point over a plane (`bench/_point.py`), each towards its own corner of a
square, each with a SAC of its own. They cross the same places in different directions: an action
of another is a lesson about the world, what the other did *next* is not what one would do oneself.
Rewards of shared steps are the learner's own, computed anew. Conditions, with the same environment
steps, updates, batches, first weights and starting states:

    own        own data only, Retrace (data grow old: policies of the past differ too)
    naive      everybody's, `SharingConfig(corrected=False)`: traces are never cut. Each step still
               bootstraps with the learner's own values (the Q^π(λ) of Harutyunyan et al., 2016), so
               the values of π remain a fixed point; what is lost is the contraction towards it
    n-step     everybody's, rewards of up to five steps summed as if one had acted oneself: what
               "uncorrected n-step returns" usually means. The fixed point itself is wrong
    corrected  everybody's, Retrace, shared steps dropped beyond a KL of 1 per dimension

Half of each batch is own fresh data, as `experts.sharing` has it; λ = 1, so that targets reach five
steps whole. Policies are judged without noise from fixed states, as a share of what is possible: 0
is doing nothing, 1 the finite-horizon linear-quadratic regulator.

All seeds of a condition run side by side in one batch of networks. No number of one learner enters
another's update: losses are sums over learners, Adam works weight by weight and minds no common
scale, the temperature is fixed. A condition writes one file, DIR/CONDITION.json, whole or not at
all; one that is there is not run again. A whole run, or `--summary`, prints learning curves (mean
over seeds, 95 % t-interval), differences paired by seed, trace coefficients and dropped shares by
source, and writes DIR/summary/result.json. Fails where the interval of corrected − own at the end
lies below zero: correction is there that sharing do no harm. What is found of naive sharing is a
finding, not a condition.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench import _point as point
from bench._control import (
    Drawn,
    Episodes,
    GaussianGroup,
    GaussianMLP,
    Lived,
    TwinGroup,
    TwinMLP,
    core_settings,
)
from echelon.agents.offpolicy import ReplayBatch, SequenceBatch
from echelon.agents.sac import SAC
from echelon.config.hierarchy import SharingConfig
from echelon.evaluation.statistics import SeedInterval, seed_interval
from echelon.files import write_atomic
from echelon.ops.squashed import SourceTraces, by_source, squash_log_det
from echelon.rng import stream

CONDITIONS = ("own", "naive", "n-step", "corrected")
COMPARED = (("corrected", "naive"), ("corrected", "n-step"), ("corrected", "own"), ("naive", "own"))
SEEDS = (0, 1, 2, 3, 4)
GOAL = 0.5
"""Goals are the corners (±GOAL, ±GOAL)."""
CORNERS = ((1, 1), (1, -1), (-1, -1), (-1, 1))
"""Round the square: learners k and k ± 1 agree in one coordinate, k and k + 2 in none."""
K = len(CORNERS)
RELATIONS = {"itself": (0,), "neighbours": (1, 3), "opposite": (2,)}
"""Name → how many corners further on the source stands."""
HIDDEN, LR, GAMMA, TAU, TEMPERATURE = (32, 32), 2e-3, 0.98, 0.01, 0.01
LENGTH, SEQUENCES, OWN_SHARE, FRESH = 5, 32, 0.5, 20
"""Steps and sequences of a batch, the share of own fresh ones, and how many episodes are fresh."""
SHARING = SharingConfig(trace=1.0, kl_limit=1.0)
JUDGED_FROM = 32
"""Fixed starting states, the same for every learner, seed and condition."""

Matrix = NDArray[np.float64]


class Budget(NamedTuple):
    """Of each learner: in a round `episodes` of 50 steps, then `updates`; judged `points` times."""

    rounds: int = 20
    episodes: int = 4
    updates: int = 100
    points: int = 10

    def steps(self, rounds: int) -> int:
        """Environment steps of a learner after some rounds."""
        return rounds * self.episodes * point.STEPS


BUDGET = Budget()


class Outcome(NamedTuple):
    """Learning curves; P points, the first before any learning, S seeds, K learners of each.

    steps[P]; returns[P,S,K]; trace, dropped[P−1,K]: mean coefficient and dropped share since the
    point before, of steps that the learner so many corners further on made; NaN where none was
    """

    steps: list[int]
    returns: Matrix
    trace: Matrix
    dropped: Matrix


class Learners:
    """SACs of S seeds × K learners, G in all, in one; the learner changes fastest in every row."""

    def __init__(self, seeds: Sequence[int], goal: float) -> None:
        self.count = len(seeds) * K
        self.goals = goal * torch.tensor(CORNERS, dtype=torch.float32).repeat(len(seeds), 1)
        actors, critics = [], []
        for seed in seeds:
            for k in range(K):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(int(stream(seed, "weights", k).integers(2**62)))
                    actors.append(GaussianMLP(point.N_OBS, point.N_ACTIONS, HIDDEN))
                    critics.append(TwinMLP(point.N_OBS, point.N_ACTIONS, HIDDEN))
        settings = core_settings(
            lr_actor=LR,
            lr_critic=LR,
            tau=TAU,
            grad_clip=math.inf,
            warmup_updates=0,
            entropy=TEMPERATURE,
        )
        rng = [stream(seeds[0], name, *seeds) for name in ("updates", "actions")]
        drawn = [int(source.integers(2**62)) for source in rng]
        self.core = SAC(GaussianGroup(actors), TwinGroup(critics), *settings, drawn[0])
        self.acting = torch.Generator().manual_seed(drawn[1])
        self.starting = stream(seeds[0], "starts", *seeds)
        self.lots = stream(seeds[0], "lots", *seeds)

    def live(self, n_episodes: int) -> Lived:
        """Episodes [E,T,G,…] of the policies as they are."""
        obs = point.starts(n_episodes * self.count, self.starting)
        steps = []
        for _ in range(point.STEPS):
            made = self.core.act(obs, self.acting, explore=True)
            after = point.advance(obs, made.action)
            told = (made.action, made.raw, made.raw_log_prob, made.mean, made.log_std)
            steps.append(Lived(obs, *told, after))
            obs = after
        parts = (torch.stack(part) for part in zip(*steps, strict=True))
        shape = (point.STEPS, n_episodes, self.count)
        return Lived(*(part.view(*shape, *part.shape[2:]).transpose(0, 1) for part in parts))

    def judge(self, first: Tensor) -> Matrix:
        """Mean return [S,K] without noise from first[E,O]."""

        def law(obs: Tensor, step: int) -> Tensor:
            action = self.core.act(obs.flatten(0, 1), self.acting, explore=False).action
            return action.view(*obs.shape[:2], -1)

        starts = first[:, None].expand(-1, self.count, -1)
        total = point.rollout(self.goals, starts, law).mean(0)
        return total.view(-1, K).double().numpy()

    def learn(self, replay: Episodes, condition: str) -> SourceTraces:
        """One update; how far steps of the learner so many corners further on were believed."""
        drawn = replay.draw(
            SEQUENCES,
            LENGTH,
            self.lots,
            n_own=round(OWN_SHARE * SEQUENCES),
            fresh=FRESH,
            population=1 if condition == "own" else K,
        )
        batch = as_stretches(drawn, self.goals)
        if condition == "n-step":
            self.core.update(n_step(batch, TEMPERATURE), want_metrics=False)
            trace = torch.ones_like(batch.reward)
            dropped = torch.zeros_like(trace, dtype=torch.bool)
        else:
            sharing = SharingConfig(trace=1.0, kl_limit=1.0, corrected=condition != "naive")
            traced = self.core.update_sequences(batch, sharing, want_metrics=False)
            trace, dropped = traced.trace, traced.dropped
        further = (drawn.source - torch.arange(self.count)) % K
        return by_source(further.flatten(), trace, dropped, K)


def as_stretches(drawn: Drawn, goals: Tensor) -> SequenceBatch:
    """Sequences as SAC takes them, B = n·G, paid by each learner's own reward; goals[G,2]."""
    steps = drawn.steps
    reward = point.reward(goals, steps.obs, steps.action).flatten(1)
    shared = drawn.source != torch.arange(len(goals))
    return SequenceBatch(
        obs=steps.obs.flatten(0, 2),
        action=steps.action.flatten(0, 2),
        raw=steps.raw.flatten(0, 2),
        raw_log_prob=steps.raw_log_prob.flatten(1),
        reward=reward,
        discount=torch.full_like(reward, GAMMA),
        truncated=drawn.last.flatten(1),
        next_obs=steps.next_obs.flatten(0, 2),
        # The core takes the mean over all rows: each learner is to have the mean over its own.
        loss_weights=torch.full_like(reward, len(goals)),
        shared=shared.flatten(),
        mean=steps.mean.flatten(0, 2),
        log_std=steps.log_std.flatten(0, 2),
    )


def n_step(batch: SequenceBatch, alpha: float) -> ReplayBatch:
    """Transitions from every step to the end of its sequence, rewards in between summed.

    Soft returns, as if the learner had drawn the actions itself: of every action but the first
    the entropy term is that of the policy that drew it. Cuts are at ends of sequences only.
    """
    log_prob = batch.raw_log_prob - squash_log_det(batch.raw).view_as(batch.reward)
    total, discount = batch.reward.clone(), batch.discount.clone()
    for t in reversed(range(len(total) - 1)):
        total[t] += batch.discount[t] * (total[t + 1] - alpha * log_prob[t + 1])
        discount[t] *= discount[t + 1]
    last = batch.next_obs.view(*total.shape, -1)[-1:].expand(*total.shape, -1)
    return ReplayBatch(
        batch.obs, batch.action, total.view(-1), discount.view(-1), last.flatten(0, 1)
    )


def judged_from() -> Tensor:
    """The fixed starting states [E,O]."""
    return point.starts(JUDGED_FROM, stream(0, "bench sharing", "judged from"))


def run(
    condition: str, seeds: Sequence[int], budget: Budget = BUDGET, goal: float = GOAL
) -> Outcome:
    """Let the learners live and learn; all collect, then all learn."""
    learners = Learners(seeds, goal)
    episodes = budget.rounds * budget.episodes
    replay = Episodes(learners.count, episodes, point.STEPS, point.N_OBS, point.N_ACTIONS)
    first = judged_from()
    due = {round(k * budget.rounds / budget.points) for k in range(1, budget.points + 1)}
    steps, returns, traces = [0], [learners.judge(first)], []
    sums = np.zeros((3, K))  # steps drawn, their coefficients, those dropped
    for done in range(1, budget.rounds + 1):
        replay.add(learners.live(budget.episodes))
        for _ in range(budget.updates):
            told = learners.learn(replay, condition)
            count = told.steps.double()
            means = torch.stack([torch.ones(K), told.mean_trace, told.dropped_share])
            sums += torch.where(count > 0, count * means, 0.0).numpy()
        if done in due:
            steps.append(budget.steps(done))
            returns.append(learners.judge(first))
            with np.errstate(invalid="ignore"):
                traces.append(sums[1:] / sums[0])
            sums[:] = 0.0
    trace, dropped = np.array(traces).transpose(1, 0, 2)
    return Outcome(steps, np.array(returns), trace, dropped)


class Scale(NamedTuple):
    """Returns, means over starts and learners: of doing nothing, and the best possible.

    aimed: share reached by the stationary regulator of the discounted rewards, which is what the
    learners are after; strongest: largest action of the best, 1 being the bound
    """

    nothing: float
    best: float
    aimed: float
    strongest: float

    def share(self, value: Matrix) -> Matrix:
        """Share of what is possible."""
        return (value - self.nothing) / (self.best - self.nothing)


def scale(goal: float = GOAL) -> Scale:
    """The ends of the scale for learners at that distance."""
    goals = goal * torch.tensor(CORNERS, dtype=torch.float32)
    first = judged_from()[:, None].expand(-1, K, -1)
    best = point.regulated(goals, point.regulator(1.0, point.STEPS))
    forever = point.regulator(GAMMA, 20 * point.STEPS)[:1]
    aimed = point.regulated(goals, np.repeat(forever, point.STEPS, axis=0))
    nothing, most, near = (
        float(point.rollout(goals, first, law).mean()) for law in (point.idle, best, aimed)
    )
    ends = Scale(nothing, most, math.nan, float(best(first, 0).abs().max()))
    return ends._replace(aimed=float(ends.share(np.array(near))))


def run_into(
    directory: Path, condition: str, seeds: Sequence[int], budget: Budget, goal: float
) -> None:
    """Run what is not there yet, and write its file."""
    path = directory / f"{condition}.json"
    if path.exists():
        return
    started = time.process_time()
    outcome = run(condition, seeds, budget, goal)
    seconds = time.process_time() - started
    line = {
        "condition": condition,
        "seeds": [*seeds],
        "goal": goal,
        "budget": budget._asdict(),
        "seconds": seconds,
        "steps": outcome.steps,
        "returns": outcome.returns.tolist(),
        "trace": _plain(outcome.trace),
        "dropped": _plain(outcome.dropped),
    }
    write_atomic(path, json.dumps(line) + "\n")
    print(f"{condition}: return {outcome.returns[-1].mean():.3f}, {seconds:.0f} s", flush=True)


def _plain(values: Matrix) -> list[Any]:
    """As JSON has it: null for what was not drawn."""
    return [_plain(x) if np.ndim(x) else None if math.isnan(x) else float(x) for x in values]


def gather(directory: Path) -> dict[str, Any]:
    """All that the runs there say together: curves, differences, traces, as JSON."""
    missing = [c for c in CONDITIONS if not (directory / f"{c}.json").exists()]
    if missing:
        raise SystemExit(f"{directory}: no run of {', '.join(missing)}. Run it first.")
    lines = {c: json.loads((directory / f"{c}.json").read_text()) for c in CONDITIONS}
    same = ("seeds", "goal", "budget", "steps")
    for name in same:
        if len({json.dumps(line[name]) for line in lines.values()}) > 1:
            raise SystemExit(f"{directory}: holds runs of different {name}.")
    told = {name: lines["own"][name] for name in same}
    ends, steps = scale(told["goal"]), told["steps"]
    curves = {c: ends.share(np.array(lines[c]["returns"])).mean(2) for c in CONDITIONS}  # [P,S]
    areas = {c: np.trapezoid(curves[c], steps, axis=0) / steps[-1] for c in CONDITIONS}
    return told | {
        "scale": ends._asdict(),
        "seconds": sum(line["seconds"] for line in lines.values()),
        "curves": {c: [seed_interval(v)._asdict() for v in curves[c]] for c in CONDITIONS},
        "areas": {c: seed_interval(areas[c])._asdict() for c in CONDITIONS},
        "worst": {c: float(np.min(ends.share(np.array(lines[c]["returns"][-1])))) for c in lines},
        "differences": [
            {
                "of": f"{one} − {other}",
                "end": seed_interval(curves[one][-1] - curves[other][-1])._asdict(),
                "area": seed_interval(areas[one] - areas[other])._asdict(),
            }
            for one, other in COMPARED
        ],
        "sources": {c: _sources(lines[c]) for c in ("own", "corrected")},
    }


def _sources(line: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Mean trace and dropped share by relation: of all training, its first part and its last."""
    told: dict[str, dict[str, list[float]]] = {}
    for relation, further in RELATIONS.items():
        for name in ("trace", "dropped"):
            means = np.array(line[name], dtype=float)[:, further].mean(1)  # [P−1]
            if not np.isnan(means).any():
                values = (means.mean(), means[0], means[-1])
                told.setdefault(relation, {})[name] = [float(x) for x in values]
    return told


def show(result: Mapping[str, Any]) -> None:
    """Print the tables."""
    ends, budget = Scale(**result["scale"]), Budget(**result["budget"])
    print(
        f"{len(result['seeds'])} seeds × {K} learners, goals at ±{result['goal']}, "
        f"{budget.rounds * budget.updates:,} updates each; {result['seconds']:.0f} s of processor"
    )
    print(
        f"share of what is possible (return {ends.best:.2f}; 0: doing nothing, {ends.nothing:.2f}; "
        f"the discounted optimum: {ends.aimed:.3f}; its largest action {ends.strongest:.2f})"
    )
    print(f"{'steps each':>10}" + "".join(f"{c + ' [95 %]':>26}" for c in CONDITIONS))
    for k, count in enumerate(result["steps"]):
        cells = (_cell(result["curves"][c][k]) for c in CONDITIONS)
        print(f"{count:>10,}" + "".join(f"{cell:>26}" for cell in cells))
    print(f"{'area':>10}" + "".join(f"{_cell(result['areas'][c]):>26}" for c in CONDITIONS))
    print(f"{'worst':>10}" + "".join(f"{result['worst'][c]:>26.3f}" for c in CONDITIONS))
    print(f"{'difference, paired by seed':<30}{'at the end':>26}{'area under the curve':>26}")
    for row in result["differences"]:
        print(f"{row['of']:<30}{_cell(row['end'], '+'):>26}{_cell(row['area'], '+'):>26}")
    print("mean trace and dropped share, by who made the steps: all (first tenth → last)")
    for condition, relations in result["sources"].items():
        for relation, values in relations.items():
            shown = (f"{name} {v[0]:.2f} ({v[1]:.2f} → {v[2]:.2f})" for name, v in values.items())
            print(f"  {condition:<10} {relation:<11} {', '.join(shown)}")


def _cell(told: Mapping[str, Any], sign: str = "") -> str:
    x = SeedInterval(**told)
    return f"{x.estimate:{sign}.3f} [{x.low:{sign}.3f}, {x.high:{sign}.3f}]"


def summary(directory: Path) -> bool:
    """Print and write what the runs say; whether corrected sharing is not worse than none."""
    result = gather(directory)
    write_atomic(directory / "summary" / "result.json", json.dumps(result, indent=1) + "\n")
    show(result)
    end = next(x["end"] for x in result["differences"] if x["of"] == "corrected − own")
    return not end["high"] < 0.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where runs are kept")
    parser.add_argument("--condition", action="append", choices=CONDITIONS)
    parser.add_argument("--goal", type=float, default=GOAL, help="distance of the goals, ±")
    parser.add_argument("--rounds", type=int, default=BUDGET.rounds)
    parser.add_argument("--summary", action="store_true", help="print the tables of what is there")
    # `python -m bench sharing` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if args.summary and args.directory is None:
        parser.error("--summary needs --directory")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as afresh:
        directory = args.directory or Path(afresh)
        if not args.summary:
            for condition in args.condition or CONDITIONS:
                budget = BUDGET._replace(rounds=args.rounds)
                run_into(directory, condition, SEEDS, budget, args.goal)
        whole = args.condition is None
        return 0 if not (args.summary or whole) or summary(directory) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
