"""Networks written with torch's own layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.torch.zoo.shared import IDS, Maker


class Recurrent(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A recurrent layer of torch's, of which the last state is read out."""

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 3)

    def forward(self, x: Any) -> Any:
        return self.out(self.layer(x)[0][:, -1])


class UNet(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Down, up again, and what was on the way beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: Any) -> Any:
        beside = self.down(x)
        return self.out(torch.cat([self.up(self.inner(beside)), beside], 1))


class Mixture(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two experts and a gate, chosen for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Any) -> Any:
        share, chosen = torch.softmax(self.gate(x), -1).max(-1, keepdim=True)
        both = torch.stack([expert(x) for expert in self.experts], -2)
        return share * torch.take_along_dim(both, chosen[..., None], -2).squeeze(-2)


class Siamese(nn.Module):  # type: ignore[misc]  # torch has no types here
    """One network for two inputs, and how near their results are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, a: Any, b: Any) -> Any:
        return nn.functional.cosine_similarity(self.inner(a), self.inner(b))


class Words(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Bags of words, by one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, ids: Any) -> Any:
        return self.out(self.bag(ids))


class Normed(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Weights that are normed and parametrised anew at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.first(x)))


class Spatial(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A transformer of space: an affine map, found from the image, by which it is sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 6))
        self.out = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        theta = self.find(x).view(-1, 2, 3)
        grid = nn.functional.affine_grid(theta, list(x.shape), align_corners=False)
        return self.out(nn.functional.grid_sample(x, grid, align_corners=False))


class Fourier(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A layer in the frequencies of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        y = torch.fft.rfft(self.inner(x), dim=1)
        return torch.fft.irfft(y * (1 + y.abs()), n=x.shape[1], dim=1)


_ROWS, _STEPS = (torch.linspace(-2, 2, 24).view(4, 6),), (torch.linspace(-1, 1, 48).view(2, 4, 6),)
_PIXELS = (torch.linspace(-3, 3, 2 * 3 * 8 * 8).sin().view(2, 3, 8, 8),)


def _sequential(*layers: Any) -> nn.Module:
    return nn.Sequential(*layers)


LAYERS: dict[str, Maker] = {
    "MLP": lambda: (
        _sequential(nn.Linear(6, 9), nn.ELU(), nn.Linear(9, 4), nn.GELU(), nn.LayerNorm(4)),
        _ROWS,
    ),
    "RNN": lambda: (Recurrent(nn.RNN(6, 5, batch_first=True), 5), _STEPS),
    "LSTM": lambda: (Recurrent(nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True), 10), _STEPS),
    "GRU": lambda: (Recurrent(nn.GRU(6, 5, batch_first=True), 5), _STEPS),
    "U-Net": lambda: (UNet(), _PIXELS),
    "channels last": lambda: (
        _sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ).to(memory_format=torch.channels_last),
        (_PIXELS[0].to(memory_format=torch.channels_last),),
    ),
    "convolutions of one axis": lambda: (
        _sequential(
            nn.Conv1d(4, 8, 3, dilation=2, padding=2),
            nn.InstanceNorm1d(8),
            nn.PReLU(8),
            nn.MaxPool1d(2),
            nn.ConvTranspose1d(8, 4, 2, 2),
        ),
        (_STEPS[0],),
    ),
    "convolutions of three axes": lambda: (
        _sequential(nn.Conv3d(1, 4, 2), nn.LeakyReLU(), nn.AvgPool3d(2), nn.Flatten()),
        (_PIXELS[0].view(2, 1, 3, 8, 8),),
    ),
    "depthwise, shuffled": lambda: (
        _sequential(
            nn.Conv2d(3, 12, 3, groups=3),
            nn.ChannelShuffle(3),
            nn.PixelShuffle(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        ),
        _PIXELS,
    ),
    "autoencoder": lambda: (
        _sequential(
            nn.Flatten(),
            nn.Linear(192, 8),
            nn.Softplus(),
            nn.Linear(8, 192),
            nn.Sigmoid(),
            nn.Unflatten(1, (3, 8, 8)),
        ),
        _PIXELS,
    ),
    "Transformer encoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        (torch.linspace(-1, 1, 80).view(2, 5, 8),),
    ),
    "Transformer": lambda: (
        nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
        (torch.linspace(-1, 1, 80).view(2, 5, 8), torch.linspace(1, -1, 64).view(2, 4, 8)),
    ),
    "mixture of experts": lambda: (Mixture(), _ROWS),
    "siamese": lambda: (Siamese(), (_ROWS[0], _ROWS[0].flip(0))),
    "bags of words": lambda: (Words(), (IDS,)),
    "normed weights": lambda: (Normed(), _ROWS),
    "spatial transformer": lambda: (Spatial(), _PIXELS),
    "Fourier": lambda: (Fourier(), _STEPS),
}
