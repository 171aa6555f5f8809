"""A local-minimum penalty that would stay 0 for want of a scheduler says so, once."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_taskinfo import LocalMinimumMixin, LocalMinimumRegularizer, TaskInfoWarning
from tests.callbacks.runs import digits, make_trainer


class Net(LocalMinimumMixin, pl.LightningModule):
    def __init__(self, start, *, scheduled):
        super().__init__()
        self.net, self.scheduled = nn.Linear(4, 3), scheduled
        self.local_minimum = LocalMinimumRegularizer(start=start)

    def loss_of(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.penalised(
            self.loss_of(batch), local_minimum=self.local_minimum_penalty(self.loss_of, batch)
        )

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return (
            ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)])
            if self.scheduled
            else optimizer
        )


@pytest.mark.filterwarnings("ignore:.*workers", "ignore:.*LeafSpec", "ignore:.*logging interval")
@pytest.mark.parametrize(
    ("start", "scheduled", "times"),
    [("learning_rate_drop", False, 1), ("learning_rate_drop", True, 0), (0, False, 0)],
)
def test_warns_once_where_nothing_can_start_it(tmp_path, start, scheduled, times):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path).fit(
            Net(start, scheduled=scheduled), DataLoader(digits(), batch_size=8)
        )
    told = [str(w.message) for w in caught if issubclass(w.category, TaskInfoWarning)]
    assert len(told) == times
    assert all("no scheduler" in message and "set `start`" in message for message in told)
