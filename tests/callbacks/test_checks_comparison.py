"""One warning where what is measured is clearly not what is trained, and none where it is."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import MultiKernelMMDMixin, TaskInfoWarning
from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights
from lightning_taskinfo.regularizers import MultiKernelMMD
from tests.callbacks.runs import Classifier, fit


class Scaled(Classifier):
    """Trains on another loss than its outputs and labels have."""

    def training_step(self, batch, batch_idx):
        return 10 * super().training_step(batch, batch_idx)


def test_another_loss_is_told_once_and_stops_nothing(tmp_path):
    callbacks = FisherTrace(every_n_steps=1), InformationInWeights()
    with pytest.warns(
        TaskInfoWarning, match="`training_step`.*`batch_fn`, `forward_fn` and `likelihood`"
    ) as caught:
        trainer = fit(tmp_path, *callbacks, model=Scaled)
    assert trainer.global_step == 8
    assert len([w for w in caught if "training_step" in str(w.message)]) == 1
    assert len(callbacks[0].history) == 8


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_dropout_and_batch_norm_do_the_same_in_both(tmp_path, accumulate, reduction):
    class Reduced(Classifier):
        def training_step(self, batch, batch_idx):
            return cross_entropy(self(batch[0]), batch[1], reduction=reduction)

    fit(tmp_path, FisherTrace(every_n_steps=4), model=Reduced, accumulate_grad_batches=accumulate)


def test_a_mean_over_tokens_is_the_same_loss(tmp_path):
    class Tokens(Classifier):
        def training_step(self, batch, batch_idx):
            return cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

        def forward(self, x):
            return self.net[0](x)

    data = TensorDataset(torch.randn(16, 5, 4), torch.randint(8, (16, 5)))
    fit(
        tmp_path,
        FisherTrace(every_n_steps=2),
        model=Tokens,
        loader=DataLoader(data, batch_size=8),
        max_epochs=1,
    )


class Penalised(MultiKernelMMDMixin, Classifier):
    def __init__(self):
        super().__init__()
        self.mk_mmd = MultiKernelMMD(weight=100.0)

    def training_step(self, batch, batch_idx):
        penalty = 10 + self.mk_mmd_penalty(batch[0][:4], batch[0][4:])
        return self.add(super().training_step(batch, batch_idx), penalty)


@pytest.mark.parametrize("named", [True, False])
def test_penalties_of_mixins_are_left_out(tmp_path, named):
    class Net(Penalised):
        def add(self, loss, penalty):
            return self.penalised(loss, mk_mmd=penalty) if named else loss + penalty

    fit(tmp_path, FisherTrace(every_n_steps=4), model=Net)


def test_a_penalised_loss_is_still_compared(tmp_path):
    class Net(Penalised):
        def add(self, loss, penalty):
            return self.penalised(10 * loss, mk_mmd=penalty)

    with pytest.warns(TaskInfoWarning, match="`batch_fn`"):
        fit(tmp_path, FisherTrace(every_n_steps=4), model=Net)
