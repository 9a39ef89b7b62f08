"""A 1-D convolutional network on green bits: two layers of width 16 and kernel 9, then mean and maximum over the text [ours].

Fewer than 5,000 parameters. A learned reference that reads the bits themselves: places, runs, everything but tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from labkit.randomness import frozen, seeded_generator


class _Net(nn.Module):
    def __init__(self, channels: int, width: int = 16, kernel: int = 9):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(channels, width, kernel, padding="same"),
            nn.ReLU(),
            nn.Conv1d(width, width, kernel, padding="same"),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, 1)

    def forward(self, bits: torch.Tensor) -> torch.Tensor:
        """Logits (n,) of bits (n, K, T), centred."""
        hidden = self.body(bits)
        return self.head(torch.cat([hidden.mean(-1), hidden.amax(-1)], dim=-1)).squeeze(-1)


class BitCNN:
    """Classifier of bits (n, K, T), one channel per text of the lineage, with scikit-learn's `fit` and `decision_function`.

    Args:
        epochs: over the training rows, in batches of 128.
        learning_rate: of Adam, falling to zero along a half cosine.
        seed: of the initial weights and the order of the rows.
    """

    def __init__(self, epochs: int = 20, learning_rate: float = 5e-3, seed: int = 0):
        self.epochs, self.learning_rate, self.seed = epochs, learning_rate, seed

    def fit(self, bits: np.ndarray, labels: np.ndarray) -> BitCNN:
        """Train from scratch on bits (n, K, T) and labels (n,) in {0, 1}."""
        inputs, targets = _centred(bits), torch.tensor(labels, dtype=torch.float32)
        generator = seeded_generator(self.seed, "cnn")
        with frozen(self.seed):
            self.net_ = _Net(inputs.shape[1])
        optimiser = torch.optim.Adam(self.net_.parameters(), self.learning_rate, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.epochs)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(inputs), generator=generator).split(128):
                loss = nn.functional.binary_cross_entropy_with_logits(self.net_(inputs[rows]), targets[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            schedule.step()
        return self

    @torch.no_grad()
    def decision_function(self, bits: np.ndarray) -> np.ndarray:
        """Log-odds (n,)."""
        return self.net_(_centred(bits)).numpy().astype(float)


def _centred(bits: np.ndarray) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.float32) - 0.5
