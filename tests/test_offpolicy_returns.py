"""V-trace and Retrace: by hand, as sums written out, against rlax, and where they come to rest."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_returns import discounted_returns
from torch import Tensor

from echelon.ops.returns import retrace, vtrace
from echelon.ops.squashed import trace_coefficients

FIXTURE = Path(__file__).parent / "fixtures" / "rlax" / "reference.json"
REFERENCE: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = REFERENCE["cases"]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)[:, None]


class Drawn(NamedTuple):
    r_t: Tensor
    discount_t: Tensor
    v_t: Tensor
    v_next: Tensor
    q_t: Tensor
    log_ratio_t: Tensor
    truncated: Tensor


def drawn(length: int, n: int, seed: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(length, n, generator=generator, dtype=torch.float64)

    def coin(share: float) -> Tensor:
        return torch.rand(length, n, generator=generator) < share

    rewards, values, following, q, ratios = (normal() for _ in range(5))
    return Drawn(
        rewards,
        0.97 * (~coin(0.15)).double(),
        values,
        following,
        q,
        ratios,
        coin(0.15),
    )


def test_retrace_by_hand() -> None:
    # G_1 = 2 + ½·8 = 6. G_0 = 1 + ½·[4 + ¼·(6 − 2)] = 3.5; q_0 and c_0 have no part in it.
    got = retrace(column(1, 2), column(0.5, 0.5), column(4, 8), column(99, 2), column(77, 0.25))
    assert got[:, 0].tolist() == [3.5, 6.0]


def test_retrace_stops_at_a_termination_without_its_value() -> None:
    # The first step ended for good: r alone, whatever follows or was thought of it.
    got = retrace(column(1, 2), column(0, 0.5), column(4, 8), column(9, 2), column(1, 1))
    assert got[:, 0].tolist() == [1.0, 6.0]


def test_retrace_truncated_inside_bootstraps_with_the_state_before_the_new_beginning() -> None:
    # 1 + ½·4, not 1 + ½·[4 + 1·(6 − 2)] = 5: the second step is of another episode.
    got = retrace(
        *(column(1, 2), column(0.5, 0.5), column(4, 8), column(9, 2), column(1, 1)),
        truncated=flags(1, 0),
    )
    assert got[:, 0].tolist() == [3.0, 6.0]


def test_vtrace_by_hand() -> None:
    # ρ = (4 → 2, ½), c = ½·(4 → 1, ½). δ_1 = 2 + ½·8 − 2 = 4, e_1 = ½·4 = 2;
    # δ_0 = 1 + ½·2 − 3 = −1, e_0 = 2·(−1) + ½·½·2 = −1.5.
    got = vtrace(
        *(column(1, 2), column(0.5, 0.5), column(3, 2), column(2, 8)),
        column(math.log(4), math.log(0.5)),
        rho_bar=2.0,
        trace=0.5,
    )
    torch.testing.assert_close(got, column(1.5, 4.0), rtol=1e-14, atol=0.0)


def test_vtrace_bounds_the_trace_by_its_own_c_bar() -> None:
    # As above with c̄ = 2 in the place of 1: e_0 = −2 + ½·½·2·2 = −1.
    got = vtrace(
        *(column(1, 2), column(0.5, 0.5), column(3, 2), column(2, 8)),
        column(math.log(4), math.log(0.5)),
        rho_bar=2.0,
        c_bar=2.0,
        trace=0.5,
    )
    torch.testing.assert_close(got, column(2.0, 4.0), rtol=1e-14, atol=0.0)


def pieces(d: Drawn, b: int) -> list[list[int]]:
    """The steps of sequence b, split where one does not go on from the other."""
    found: list[list[int]] = [[]]
    for t, cut in enumerate(d.truncated[:, b].tolist()):
        found[-1].append(t)
        if cut:
            found.append([])
    return [piece for piece in found if piece]


def retrace_written_out(d: Drawn, trace: float) -> Tensor:
    """Q + Σ_k (Π γ c) (r_k + γ_k V_{k+1} − Q_k), each target by itself."""
    out = torch.zeros_like(d.r_t)
    r, g, _, v_next, q, log_ratio, *_ = (x.tolist() for x in d)
    for b in range(d.r_t.shape[1]):
        for piece in pieces(d, b):
            for start in piece:
                total, weight = q[start][b], 1.0
                for k in piece[piece.index(start) :]:
                    if k > start:
                        weight *= g[k - 1][b] * trace * min(1.0, math.exp(log_ratio[k][b]))
                    total += weight * (r[k][b] + g[k][b] * v_next[k][b] - q[k][b])
                out[start, b] = total
    return out


def vtrace_written_out(d: Drawn, trace: float, rho_bar: float, c_bar: float) -> Tensor:
    """V + Σ_k (Π γ c) ρ_k (r_k + γ_k V_{k+1} − V_k), each target by itself."""
    out = torch.zeros_like(d.r_t)
    r, g, v, v_next, _, log_ratio, *_ = (x.tolist() for x in d)
    for b in range(d.r_t.shape[1]):
        for piece in pieces(d, b):
            for start in piece:
                total, weight = v[start][b], 1.0
                for k in piece[piece.index(start) :]:
                    ratio = math.exp(log_ratio[k][b])
                    error = r[k][b] + g[k][b] * v_next[k][b] - v[k][b]
                    total += weight * min(rho_bar, ratio) * error
                    weight *= g[k][b] * trace * min(c_bar, ratio)
                out[start, b] = total
    return out


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
def test_retrace_equals_the_sum_written_out(length: int, n: int, trace: float, seed: int) -> None:
    d = drawn(length, n, seed)
    c_t = trace_coefficients(d.log_ratio_t, trace)
    got = retrace(d.r_t, d.discount_t, d.v_next, d.q_t, c_t, truncated=d.truncated)
    torch.testing.assert_close(got, retrace_written_out(d, trace), rtol=1e-11, atol=1e-11)


@given(
    st.integers(1, 9),
    st.floats(0.0, 1.0),
    st.floats(0.1, 3.0),
    st.floats(0.0, 3.0),
    st.integers(0, 2**32 - 1),
)
def test_vtrace_equals_the_sum_written_out(
    length: int, trace: float, c_bar: float, more: float, seed: int
) -> None:
    d = drawn(length, 3, seed)
    got = vtrace(
        *(d.r_t, d.discount_t, d.v_t, d.v_next, d.log_ratio_t),
        rho_bar=c_bar + more,
        c_bar=c_bar,
        trace=trace,
        truncated=d.truncated,
    )
    wanted = vtrace_written_out(d, trace, c_bar + more, c_bar)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def of(case: dict[str, Any], name: str) -> Tensor:
    kind = torch.bool if name == "truncated" else torch.float64
    return torch.tensor(case[name], dtype=kind)


def test_reference_comes_from_the_pinned_rlax_and_holds_what_it_should() -> None:
    provenance = REFERENCE["provenance"]
    script = FIXTURE.parents[3] / provenance["script"]
    text = script.read_text(encoding="utf-8")
    assert f'RLAX = "{provenance["rlax"]}"' in text
    assert f'JAX = "{provenance["jax"]}"' in text
    assert {len(case["r_t"]) for case in CASES} == {1, 2, 5, 16}
    assert {case["trace"] for case in CASES} >= {0.0, 0.7, 0.9, 1.0}
    assert {case["rho_bar"] for case in CASES} >= {1.0, 1.3, 3.7}
    terminations = sum(int((of(case, "discount_t") == 0.0).sum()) for case in CASES)
    cuts_inside = sum(int(of(case, "truncated")[:-1].sum()) for case in CASES)
    assert min(terminations, cuts_inside) > 30
    assert FIXTURE.stat().st_size < 200 * 1024


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{len(c['r_t'])}-{c['trace']}-{c['rho_bar']}"
)
def test_vtrace_equals_rlax(case: dict[str, Any]) -> None:
    got = vtrace(
        *(of(case, k) for k in ("r_t", "discount_t", "v_t", "v_next", "log_ratio_t")),
        rho_bar=case["rho_bar"],
        trace=case["trace"],
        truncated=of(case, "truncated"),
    )
    wanted = of(case, "v_t") + of(case, "vtrace_errors")
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{len(c['r_t'])}-{c['trace']}-{c['rho_bar']}"
)
def test_retrace_equals_rlax(case: dict[str, Any]) -> None:
    got = retrace(
        *(of(case, k) for k in ("r_t", "discount_t", "v_next", "q_t")),
        trace_coefficients(of(case, "log_ratio_t"), case["trace"]),
        truncated=of(case, "truncated"),
    )
    torch.testing.assert_close(got, of(case, "returns"), rtol=1e-12, atol=1e-12)
    errors = of(case, "retrace_errors")
    torch.testing.assert_close(got - of(case, "q_t"), errors, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES[-7:], ids=lambda c: f"{c['trace']}-{c['rho_bar']}")
def test_float32_stays_near_rlax(case: dict[str, Any]) -> None:
    got = retrace(
        *(of(case, k).float() for k in ("r_t", "discount_t", "v_next", "q_t")),
        trace_coefficients(of(case, "log_ratio_t").float(), case["trace"]),
        truncated=of(case, "truncated"),
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, of(case, "returns").float(), rtol=1e-5, atol=2e-5)


def test_on_policy_vtrace_is_the_return_with_a_bootstrap() -> None:
    d = drawn(6, 4, 1)
    v = torch.cat([d.v_t, d.v_next[-1:]])  # uncut: the next state is the next step's
    same = torch.zeros_like(d.r_t)
    got = vtrace(d.r_t, d.discount_t, v[:-1], v[1:], same)
    wanted = discounted_returns(d.r_t, d.discount_t, v[-1])
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


def test_on_policy_retrace_is_the_return_with_a_bootstrap_and_known_luck_removed() -> None:
    # With c = 1 the sum is the Monte-Carlo return plus Σ γ (V − Q) at each later state: the luck of
    # the actions drawn there, zero on average, and zero each where V is Q of the action taken.
    d = drawn(6, 4, 2)
    one = torch.ones_like(d.r_t)
    q = torch.cat([d.q_t[:1], d.v_next[:-1]])
    returns = discounted_returns(d.r_t, d.discount_t, d.v_next[-1])
    got = retrace(d.r_t, d.discount_t, d.v_next, q, one)
    torch.testing.assert_close(got, returns, rtol=1e-13, atol=1e-13)

    luck = torch.cat([d.v_next[:-1] - d.q_t[1:], torch.zeros(1, 4, dtype=torch.float64)])
    removed = discounted_returns(d.discount_t * luck, d.discount_t, torch.zeros(4).double())
    got = retrace(d.r_t, d.discount_t, d.v_next, d.q_t, one)
    torch.testing.assert_close(got, returns + removed, rtol=1e-12, atol=1e-12)


def test_trace_zero_is_the_one_step_target() -> None:
    d = drawn(6, 4, 3)
    got = retrace(d.r_t, d.discount_t, d.v_next, d.q_t, torch.zeros_like(d.r_t))
    assert torch.equal(got, d.r_t + d.discount_t * d.v_next)


class World(NamedTuple):
    """All sequences of 3 steps of a world of 3 states and 2 actions, each with its probability.

    states, actions, following[3,B]; chance[B]: of the rest, given the first state and action
    reward, discount[S,A]; moves[S,A,S]; mu, pi[S,A]
    """

    states: Tensor
    actions: Tensor
    following: Tensor
    probability: Tensor
    reward: Tensor
    discount: Tensor
    moves: Tensor
    mu: Tensor
    pi: Tensor

    def at(self, table: Tensor) -> Tensor:
        return table[self.states, self.actions]

    def given_first_pair(self, target: Tensor) -> Tensor:
        """Mean target [S,A] of the first step, by its state and action."""
        out = torch.zeros_like(self.reward)
        out.index_put_(
            (self.states[0], self.actions[0]), self.probability * target[0], accumulate=True
        )
        return out

    def soft_values(self, q: Tensor, alpha: float) -> Tensor:
        return (self.pi * (q - alpha * self.pi.log())).sum(1)

    def exact_q(self, policy: Tensor, alpha: float) -> Tensor:
        """Q = r + γ P V with V = E_π[Q − α log π], solved."""
        n = self.reward.numel()
        ahead = (self.discount[..., None] * self.moves).reshape(n, 3)
        spread = torch.zeros(3, 3, 2, dtype=torch.float64)
        spread[range(3), range(3)] = policy
        bonus = -alpha * (policy * policy.log()).sum(1)
        known = self.reward.reshape(n) + ahead @ bonus
        system = torch.eye(n, dtype=torch.float64) - ahead @ spread.reshape(3, n)
        return torch.linalg.solve(system, known).reshape(3, 2)


@pytest.fixture(scope="module")
def world() -> World:
    rng = np.random.default_rng(3)
    moves = torch.from_numpy(rng.dirichlet(np.ones(3), (3, 2)))
    mu = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.5, 0.5]], dtype=torch.float64)
    pi = torch.tensor([[0.2, 0.8], [0.9, 0.1], [0.35, 0.65]], dtype=torch.float64)
    discount = torch.full((3, 2), 0.9, dtype=torch.float64)
    discount[2, 1] = 0.0  # ends for good
    s0, a0, s1, a1, s2, a2, s3 = (
        torch.tensor(x)
        for x in zip(*itertools.product(*map(range, (3, 2, 3, 2, 3, 2, 3))), strict=True)
    )
    probability = moves[s0, a0, s1] * mu[s1, a1] * moves[s1, a1, s2] * mu[s2, a2]
    return World(
        states=torch.stack([s0, s1, s2]),
        actions=torch.stack([a0, a1, a2]),
        following=torch.stack([s1, s2, s3]),
        probability=probability * moves[s2, a2, s3],
        reward=torch.from_numpy(rng.normal(size=(3, 2))),
        discount=discount,
        moves=moves,
        mu=mu,
        pi=pi,
    )


def mean_retrace(world: World, q: Tensor, c: Tensor, alpha: float) -> Tensor:
    v = world.soft_values(q, alpha)
    target = retrace(
        *(world.at(world.reward), world.at(world.discount), v[world.following]),
        *(world.at(q), world.at(c)),
    )
    return world.given_first_pair(target)


@pytest.mark.parametrize("alpha", [0.0, 0.2])
@pytest.mark.parametrize("trace", [0.0, 0.7, 1.0])
def test_retrace_leaves_the_values_of_pi_as_they_are(
    world: World, alpha: float, trace: float
) -> None:
    q = world.exact_q(world.pi, alpha)
    c = trace_coefficients(world.pi.log() - world.mu.log(), trace)
    torch.testing.assert_close(mean_retrace(world, q, c, alpha), q, rtol=1e-12, atol=1e-12)


def test_retrace_comes_to_the_values_of_pi_from_elsewhere(world: World) -> None:
    c = trace_coefficients(world.pi.log() - world.mu.log(), 1.0)
    q = torch.full((3, 2), 50.0, dtype=torch.float64)
    for _ in range(200):
        q = mean_retrace(world, q, c, 0.2)
    torch.testing.assert_close(q, world.exact_q(world.pi, 0.2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_naive_three_step_target_is_wrong_even_from_exact_values(
    world: World, alpha: float
) -> None:
    q = world.exact_q(world.pi, alpha)
    v = world.soft_values(q, alpha)
    naive = discounted_returns(
        world.at(world.reward), world.at(world.discount), v[world.following[-1]]
    )
    error = (world.given_first_pair(naive) - q).abs()
    assert float(error.max()) > 0.1


def test_naive_target_is_right_where_the_data_is_its_own(world: World) -> None:
    own = world._replace(pi=world.mu)
    q = own.exact_q(own.pi, 0.0)
    v = own.soft_values(q, 0.0)
    naive = discounted_returns(own.at(own.reward), own.at(own.discount), v[own.following[-1]])
    torch.testing.assert_close(own.given_first_pair(naive), q, rtol=1e-12, atol=1e-12)
    one = torch.ones_like(q)
    torch.testing.assert_close(mean_retrace(own, q, one, 0.0), q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rho_bar", [1.0, 1.2, math.inf])
def test_vtrace_leaves_the_values_of_the_bounded_policy_as_they_are(
    world: World, rho_bar: float
) -> None:
    bounded = torch.minimum(rho_bar * world.mu, world.pi)
    policy = bounded / bounded.sum(1, keepdim=True)
    v = (policy * world.exact_q(policy, 0.0)).sum(1)
    target = vtrace(
        *(world.at(world.reward), world.at(world.discount), v[world.states], v[world.following]),
        world.at(world.pi.log() - world.mu.log()),
        rho_bar=rho_bar,
    )
    mean = (world.mu * world.given_first_pair(target)).sum(1)
    torch.testing.assert_close(mean, v, rtol=1e-12, atol=1e-12)
    of_pi = (world.pi * world.exact_q(world.pi, 0.0)).sum(1)
    # DESIGN.md: the bound on ρ moves the fixed point, so that critics of Q must do without it.
    assert bool(((v - of_pi).abs() > 0.05).any()) == (rho_bar < math.inf)


def test_sequences_do_not_mix() -> None:
    d = drawn(5, 3, 5)
    c_t = trace_coefficients(d.log_ratio_t, 1.0)
    before = retrace(d.r_t, d.discount_t, d.v_next, d.q_t, c_t)
    d.r_t[:, 1] += 100.0
    after = retrace(d.r_t, d.discount_t, d.v_next, d.q_t, c_t)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


def test_targets_carry_no_gradient_and_inputs_stay_as_they_were() -> None:
    d = drawn(5, 3, 6)
    values = [x.clone().requires_grad_() for x in (d.r_t, d.discount_t, d.v_t, d.v_next)]
    r, g, v, v_next = values
    assert not vtrace(r, g, v, v_next, d.log_ratio_t.clone().requires_grad_()).requires_grad
    assert not retrace(r, g, v_next, v, v).requires_grad
    for x, old in zip(values, (d.r_t, d.discount_t, d.v_t, d.v_next), strict=True):
        assert torch.equal(x.detach(), old)


def test_ratio_that_overflows_is_bounded_like_any_other() -> None:
    args = (column(1, 2), column(0.5, 0.5), column(3, 2), column(2, 8))
    assert torch.equal(vtrace(*args, column(1e6, 1e6)), vtrace(*args, column(1, 1)))
    assert vtrace(*args, column(-1e6, -1e6)).tolist() == args[2].tolist()


@pytest.mark.parametrize("wrong", range(5))
def test_wrong_shapes_and_kinds_are_refused(wrong: int) -> None:
    good = [torch.zeros(3, 2) for _ in range(5)]
    for bad in (torch.zeros(2, 3), torch.zeros(3), torch.zeros(3, 2).double()):
        args = [bad if i == wrong else x for i, x in enumerate(good)]
        with pytest.raises(AssertionError, match=r"\[L,B\]|float64"):
            retrace(*args)
        with pytest.raises(AssertionError, match=r"\[L,B\]|float64"):
            vtrace(*args)


def test_masks_must_be_bool_and_of_the_same_shape() -> None:
    good = [torch.zeros(3, 2) for _ in range(5)]
    with pytest.raises(AssertionError, match=r"truncated is .*, not bool"):
        retrace(*good, truncated=torch.zeros(3, 2))
    with pytest.raises(AssertionError, match=r"truncated is not \[L,B\]"):
        retrace(*good, truncated=torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(
    "setting", [{"trace": 1.1}, {"trace": -0.1}, {"rho_bar": 0.5}, {"c_bar": 0.0}]
)
def test_settings_out_of_bounds_are_refused(setting: dict[str, float]) -> None:
    good = [torch.zeros(3, 2) for _ in range(5)]
    with pytest.raises(ValueError, match=next(iter(setting))):
        vtrace(*good, **setting)
