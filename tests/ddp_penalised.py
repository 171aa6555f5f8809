"""Train the network with every penalty on two ranks: ``python -m tests.ddp_penalised OUTPUT_FOLDER``."""

import sys
from pathlib import Path

import torch

from lightning_taskinfo.regularizers import Lautum
from lightning_taskinfo.regularizers._ranks import gather_rows
from lightning_taskinfo.variational import noisy_weights
from tests.penalised_net import WEIGHTS, D, K, Net, Pairs, fit


class RecordingLautum(Lautum):
    """Keeps what this rank's first batch gave, beside what the ranks made of it."""

    first = None

    def _averages(self, local):
        averages = super()._averages(local)
        if self.first is None:
            own = [part.detach() for part in local]
            self.first = {"local": own, "average": [self.cov_w.clone(), self.cov_wx.clone()]}
        return averages


class DistributedNet(Net):
    def on_fit_start(self):
        self.lautum = RecordingLautum((D,), K, weight=0.1, decay=0.9)
        self.lautum.fit_inputs([Pairs().x_u[self.global_rank :: 2]])  # each rank brings its part

    def on_train_end(self):
        _, mean, noise = next(noisy_weights(self))
        state = {
            "state": self.state_dict(),
            "first": self.lautum.first,
            "noise": (noise(mean) - mean).detach(),
            "gathered": gather_rows(torch.arange(self.global_rank + 1)),
            "information": (self.information_penalty().detach(), self.information.value),
        }
        torch.save(state, Path(sys.argv[1]) / f"rank{self.global_rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit(DistributedNet(WEIGHTS), strategy="ddp", devices=2, accumulate_grad_batches=2)
