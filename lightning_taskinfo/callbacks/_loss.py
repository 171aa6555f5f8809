"""The mean loss beside a measurement."""

import math
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import outputs_of, size, take
from lightning_taskinfo.fisher.draws import NumberedDraws
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.functional.likelihood import Likelihood, as_likelihood

CHUNK = 128  # samples of one forward pass


def mean_loss(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    likelihood: str | Likelihood,
    forward_fn: Forward | None,
) -> float:
    """Return the mean negative log-likelihood of the targets, in nats per sample; NaN without samples or targets."""
    n = size(inputs)
    if targets is None or not n:
        return math.nan
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for start in range(0, n, CHUNK):
            part = itemgetter(slice(start, start + CHUNK))
            outputs = outputs_of(model, take(inputs, part), forward_fn)
            total -= as_likelihood(likelihood).log_prob(outputs, part(targets)).double().sum().cpu()
    return total.item() / n


class LossOnTheWay(NumberedDraws):
    """Draws of labels that also add up the loss of the dataset's labels, from outputs that are there anyway.

    Attributes:
        loss: The sum of the negative log-likelihood so far, in nats; NaN without targets.
    """

    loss: float = 0.0

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:  # once a chunk
        """See that outputs and targets fit the likelihood, and add their loss."""
        super().check(outputs, targets)
        if targets is None:
            self.loss = math.nan
        else:
            self.loss -= self.likelihood.log_prob(outputs.detach(), targets).double().sum().item()
