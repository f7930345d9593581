"""TimesNet: a slow twin, periods that neither future nor batch can choose, chunks, learning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from torch import Tensor
from worlds import make_config, make_world

from echelon.agents.a2c import A2C
from echelon.config import Config
from echelon.errors import ConfigError, DataError
from echelon.models import timesnet
from echelon.models.encoders import build_encoder
from echelon.models.timesnet import TimesNet, choose_periods

S, N, F, W, D = 26, 3, 5, 12, 16
PERIODS = (12, 5, 4)
"""One row; rows that have to be filled up; rows that have not."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _encoder(window: int = W, seed: int = 3, **settings: Any) -> TimesNet:
    settings = {"d_model": D, "n_layers": 2, "dropout": 0.0, "periods": PERIODS, **settings}
    keys = [f"model.{name}={_shown(value)}" for name, value in settings.items()]
    config = make_config(f"window={window}", "model.encoder=TimesNet", *keys)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TimesNet(config, F)


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _loud(encoder: TimesNet) -> TimesNet:
    """Biases and places that are not zero, so that one left out would show."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        for name, parameter in encoder.named_parameters():
            if "bias" in name or "place" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    return encoder


def _draws(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _waves(rows: int, *periods: int) -> Tensor:
    """x[rows, N, F] of sines at these periods, the first the strongest, over a little noise."""
    t = torch.arange(rows, dtype=torch.float32)[:, None, None]
    phase = 6.3 * torch.rand(N, F, generator=torch.Generator().manual_seed(5))
    x = 0.1 * _draws(rows, N, F)
    for k, period in enumerate(periods):
        x += 2.0**-k * torch.sin(2 * math.pi * t / period + phase)
    return x


# A slow twin: one window of one asset, picture by picture, convolution by convolution


def _slow_stem(encoder: TimesNet, window: np.ndarray) -> np.ndarray:
    """Design note 000's stem on a window [W, F]: four padded convolutions side by side: [W, D]."""
    parts = []
    for kernel, scale in zip(encoder.stem.kernels, encoder.stem.scales, strict=True):
        weight = scale.weight.detach().view(kernel, -1, F).permute(1, 2, 0)
        x = torch.from_numpy(window).T[None]
        parts.append(fn.conv1d(x, weight, padding=kernel // 2)[0].T)
    return (torch.cat(parts, dim=1) + encoder.stem.place.detach()).numpy()


def _slow_block(block: timesnet.TimesBlock, h: np.ndarray, periods: tuple[int, ...]) -> np.ndarray:
    """A TimesBlock on h [W, D], with explicit pictures."""
    window, size = len(h), timesnet.INCEPTION_KERNELS[-1]
    width = len(block.bias)
    inner = block.inner.weight.detach().view(size, size, width, D).permute(2, 3, 0, 1)
    outer = block.outer.weight.detach().view(D, size, size, width).permute(0, 3, 1, 2)
    amplitudes, pictures = [], []
    for period in periods:
        cycles = math.ceil(window / period)
        missing = cycles * period - window
        # The bin of a transform over whole cycles whose frequency is exactly one per period.
        spectrum = np.fft.rfft(h - h.mean(axis=0), n=cycles * period, axis=0)
        amplitudes.append(np.abs(spectrum[cycles]).mean() / math.sqrt(window))
        picture = torch.zeros(1, D, cycles, period)
        filled = torch.zeros(1, 1, cycles, period)
        for t in range(window):
            row, column = divmod(t + missing, period)
            picture[0, :, row, column] = torch.from_numpy(h[t])
            filled[0, 0, row, column] = 1.0
        middle = fn.gelu(fn.conv2d(picture, inner, block.bias.detach(), padding=size // 2)) * filled
        result = fn.conv2d(middle, outer, block.outer.bias.detach(), padding=size // 2)
        pictures.append(result[0].flatten(1).T[missing:].numpy())
    powers = np.exp(np.array(amplitudes) - max(amplitudes))
    update = sum(p / powers.sum() * y for p, y in zip(powers, pictures, strict=True))
    total = h + update
    centred = total - total.mean(axis=1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + block.norm.eps)
    return scaled * block.norm.weight.detach().numpy() + block.norm.bias.detach().numpy()


@pytest.mark.parametrize("periods", [PERIODS, (7,), (2, 3, 11)])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_an_embedding_equals_that_of_the_slow_twin(n_layers: int, periods: tuple[int, ...]) -> None:
    encoder, x = _loud(_encoder(n_layers=n_layers, periods=periods)), _draws(S, N, F)
    z = encoder(x).detach().numpy()
    for k, n in ((0, 0), (7, 1), (S - W, 2)):
        h = _slow_stem(encoder, x[k : k + W, n].numpy())
        for block in encoder.blocks:
            h = _slow_block(block, h, periods)
        np.testing.assert_allclose(z[k, n], h[-1], atol=1e-5, rtol=1e-5)


def test_an_inception_equals_the_sum_of_its_convolutions() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        merged = timesnet._inception(D, 4, 1.0).view(4, D, 3, 3)
        torch.manual_seed(9)
        single = [
            torch.randn(4, D, size, size) / math.sqrt(2 * D * size**2)
            for size in timesnet.INCEPTION_KERNELS
        ]
    picture = _draws(2, D, 3, 5)
    apart = sum(fn.conv2d(picture, kernel, padding=kernel.shape[-1] // 2) for kernel in single)
    torch.testing.assert_close(fn.conv2d(picture, merged, padding=1), apart, atol=1e-5, rtol=1e-5)


def test_gradients_equal_finite_differences() -> None:
    encoder = _loud(_encoder(n_layers=2)).double()
    encoder.requires_grad_(False)
    x = _draws(W + 2, 2, F, seed=2).double()
    names = ("stem.scales.3.weight", "blocks.0.inner.weight", "blocks.1.outer.weight")
    some = [encoder.get_parameter(name).requires_grad_() for name in names]
    weights = _draws(3, 2, D).double()

    def loss() -> Tensor:
        return (encoder._encode(x) * weights).sum()

    slopes = torch.autograd.grad(loss(), some)
    for parameter, slope in zip(some, slopes, strict=True):
        towards = _draws(*parameter.shape, seed=8).double()
        with torch.no_grad():
            parameter.add_(towards, alpha=1e-6)
            above = loss()
            parameter.add_(towards, alpha=-2e-6)
            below = loss()
            parameter.add_(towards, alpha=1e-6)
        expected = float(above - below) / 2e-6
        assert math.isclose(float((slope * towards).sum()), expected, rel_tol=1e-5)


# One window, one embedding, whatever else is in the batch


def test_a_batch_of_one_equals_a_batch_of_many() -> None:
    encoder, x = _encoder(periods=()), _draws(S, N, F)
    encoder.fit(_draws(200, N, F, seed=7))
    encoder.eval()
    z = encoder(x)
    for k in range(S - W + 1):
        for n in range(N):
            alone = encoder(x[k : k + W, n : n + 1])
            torch.testing.assert_close(alone[0, 0], z[k, n], atol=1e-6, rtol=1e-6)


def test_the_batch_cannot_choose_periods() -> None:
    """A window is encoded the same beside windows that swing at quite another period."""
    encoder = _encoder(periods=(), n_periods=1)
    encoder.fit(_waves(240, 4))
    before = encoder.periods.clone()
    one = _draws(W, 1, F)
    others = 100.0 * _waves(W, 12)
    together = encoder(torch.cat([one, others], dim=1))
    torch.testing.assert_close(together[:, :1], encoder(one), atol=1e-6, rtol=1e-6)
    grouped = encoder(torch.stack([one.expand(W, N, F), others]))
    torch.testing.assert_close(grouped[0, :, :1], encoder(one), atol=1e-6, rtol=1e-6)
    assert encoder.periods.tolist() == before.tolist() == [4]


@pytest.mark.parametrize("windows", [1, 7, 10_000])
def test_chunks_of_any_size_give_the_same_embeddings_and_gradients(
    windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, x = _encoder(), _draws(2, W + 3, 2, F)

    def run() -> list[Tensor]:
        encoder.zero_grad()
        z = encoder(x)
        z.square().mul(_draws(*z.shape)).sum().backward()
        return [z.detach(), *(p.grad.clone() for p in encoder.parameters() if p.grad is not None)]

    expected = run()
    assert len(expected) == 1 + len(list(encoder.parameters()))
    monkeypatch.setattr(timesnet, "_CHUNK_WINDOWS", windows)
    for kept in (2 << 30, 0):
        monkeypatch.setattr(timesnet, "_KEPT_BYTES", kept)
        for one, other in zip(run(), expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_a_window_without_movement_has_finite_gradients() -> None:
    encoder = _encoder()
    with torch.no_grad():
        encoder.stem.place.zero_()
    encoder(torch.zeros(W, N, F)).square().sum().backward()
    for parameter in encoder.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_shares_follow_the_amplitudes_of_the_window_itself() -> None:
    t = torch.arange(W)[:, None]
    level, slow, fast = torch.full((W, D), 9.0), torch.cos(t / 2), torch.cos(2 * math.pi * t / 4)
    h = torch.stack([level, level + slow.expand(W, D), level + fast.expand(W, D)])
    shares = timesnet.amplitude_shares(h, timesnet._basis(PERIODS, W).float())
    torch.testing.assert_close(shares[0], torch.full((3,), 1 / 3))
    assert shares[1].argmax() == 0
    assert shares[2].argmax() == 2
    torch.testing.assert_close(shares.sum(1), torch.ones(3))


# Periods


def test_planted_periods_are_found_strongest_first() -> None:
    assert choose_periods(_waves(240, 4, 12, 3), window=12, count=3) == (4, 12, 3)
    assert choose_periods(_waves(240, 10), window=20, count=1) == (10,)


@pytest.mark.parametrize("window", [2, 3, 5, 9, 20, 64])
def test_periods_are_distinct_and_fit_the_window(window: int) -> None:
    every = choose_periods(_draws(4 * window, N, F), window, count=window)
    assert len(set(every)) == len(every) > 0
    assert all(2 <= period <= window for period in every)
    encoder = _encoder(window, periods=(), n_periods=window)
    encoder.fit(_draws(4 * window, N, F))
    assert tuple(encoder.periods.tolist()) == every
    assert torch.isfinite(encoder(_draws(window + 1, N, F))).all()


def test_choosing_in_pieces_equals_a_plain_mean_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _draws(5 + 6 * W, N, F).cumsum(0)
    windows = x[5:].numpy().astype(np.float64).reshape(6, W, N, F)
    spectrum = np.abs(np.fft.rfft(windows, axis=1)).mean(axis=(0, 2, 3))[1:]
    expected = list(dict.fromkeys(math.floor(W / k + 0.5) for k in np.argsort(-spectrum) + 1))
    monkeypatch.setattr(timesnet, "_FIT_BYTES", 1)
    assert choose_periods(x, W, 4) == tuple(expected[:4])


def test_periods_are_not_guessed_before_fit() -> None:
    encoder = _encoder(periods=())
    with pytest.raises(ConfigError, match=r"no periods yet.*encoder\.fit.*model\.periods"):
        encoder(_draws(S, N, F))
    with pytest.raises(DataError, match=r"windows of 12 bars, and there are 11"):
        encoder.fit(_draws(W - 1, N, F))


def test_given_periods_are_kept_by_fit() -> None:
    encoder = _encoder(periods=(5, 3))
    encoder.fit(_waves(240, 4))
    assert encoder.periods.tolist() == [5, 3]


def test_a_state_carries_its_periods() -> None:
    fitted, fresh = _encoder(periods=()), _encoder(periods=(), seed=4)
    fitted.fit(_waves(240, 4, 12, 3))
    fresh.load_state_dict(fitted.state_dict())
    assert fresh.periods.tolist() == [4, 12, 3]
    x = _draws(S, N, F)
    assert torch.equal(fresh(x), fitted(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"periods": (30,)}, r"model\.periods = \[30\].* window = 12"),
        ({"periods": (4, 4)}, r"model\.periods = \[4, 4\] names a period twice"),
        ({"window": 1, "periods": ()}, r"window = 1 is too short for TimesNet"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _encoder(**settings)


def test_a_width_that_kernels_cannot_share_is_refused() -> None:
    config = Config.model_validate({"model": {"encoder": "TimesNet", "d_model": 18}})
    with pytest.raises(ConfigError, match=r"model\.d_model = 18 .* 4 kernels.* 20"):
        build_encoder(config, F)


# In the learner

SMALL = (
    *("window=6", "model.encoder=TimesNet", "model.d_model=8", "model.n_layers=2"),
    *("model.hidden=8", "model.dropout=0.1", "model.n_periods=2", "model.shared_encoder=false"),
    *("train.rollout_steps=5", "train.books=6", "train.offset_groups=2", "train.lr_actor=0.01"),
    *("train.lr_critic=0.01", "reward.scale=100"),
)


def _learner(**world: Any) -> A2C:
    return A2C(make_config(*SMALL), make_world(window=6, **world), seed=7)


def test_a2c_trains_with_timesnet_and_goes_on_where_it_stopped() -> None:
    straight, first, second = _learner(), _learner(), _learner()
    begun = {name: value.clone() for name, value in straight.net.state_dict().items()}
    for _ in range(4):
        straight.train_once()
    for _ in range(2):
        first.train_once()
    second.restore(*first.state())
    for _ in range(2):
        second.train_once()
    trained = straight.net.state_dict()
    for name, value in second.net.state_dict().items():
        assert torch.equal(value, trained[name]), name
    for name in ("encoder.stem.place", "critic_encoder.blocks.0.inner.weight"):
        assert not torch.equal(trained[name], begun[name])
    assert torch.equal(trained["encoder.periods"], begun["encoder.periods"])


def test_what_comes_after_the_train_window_changes_no_period() -> None:
    """Training features that swing at one period, later ones at another and a hundred times it."""
    x = np.concatenate([_waves(36, 3).numpy(), 100.0 * _waves(24, 6).numpy()])
    chosen = []
    for future in (1.0, 0.0, -50.0):
        changed = np.concatenate([x[:36], future * x[36:]])
        agent = _learner(x=changed, n_assets=N)
        assert agent.world.splits["train"] == range(36)
        chosen.append(agent.net.encoder.state_dict()["periods"].tolist())
    assert chosen[0] == chosen[1] == chosen[2]
    assert chosen[0][0] == 3
    everything = choose_periods(torch.from_numpy(x), 6, 2)
    assert everything[0] == 6, "the future would have chosen otherwise"
