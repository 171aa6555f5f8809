"""Weights sharded by FSDP2 over two processes: the same numbers, the same training, and refusals before it starts."""

import os

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_taskinfo.callbacks import (
    FisherTrace,
    HardSamples,
    InformationInWeights,
    LocalMinimum,
    PACBayesCertificate,
)
from lightning_taskinfo.fisher.measure import Measurement
from tests.callbacks.runs import Classifier, digits, fit
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


class Net(Classifier):
    """The same weights in every process; layers of several kinds, sharded one by one and as a rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 4)),
            nn.Conv1d(1, 3, 2),
            nn.Flatten(),
            nn.LayerNorm(9),
            nn.Tanh(),
            nn.Linear(9, 3),
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Sharded(Net):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if not any(hasattr(p, "full_tensor") for p in self.parameters()):
            mesh = self.device_mesh["data_parallel"]
            for module in (self.net[1], self.net[5], self.net):
                fully_shard(module, mesh=mesh)


def probes():
    return [
        FisherTrace(every_n_steps=1, labels="exact", max_samples=24, name="batch"),
        FisherTrace(every_n_steps=1, data="train", max_samples=13, labels="exact", name="uneven"),
        FisherTrace(every_n_steps=1, data="train", max_samples=13, mc_samples=2, name="sampled"),
        FisherTrace(every_n_steps=1, data="train", max_samples=2, labels="exact", name="one each"),
        HardSamples(every_n_steps=1, max_samples=24, name="step"),
        LocalMinimum(every_n_steps=1, max_samples=13),
    ]


def environment(rank):
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": 0,
    }
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {name: str(value) for name, value in names.items()}


def sharded_fit(rank, folder, *callbacks, model=Sharded, strategy=None, **arguments):
    environment(rank)
    strategy = strategy or ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    loader = DataLoader(digits(24), batch_size=12)  # both together: all samples in each step
    return fit(
        folder, *callbacks, model=model, loader=loader, strategy=strategy, devices=2, **arguments
    )


def weights(model):
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for n, p in model.named_parameters()
    }


def watched(rank, folder):
    callbacks = probes()
    model = sharded_fit(rank, folder, *callbacks).lightning_module
    assert all(hasattr(p, "full_tensor") for p in model.parameters()), (
        "a measurement left weights gathered"
    )
    trained = weights(model)
    alone = weights(sharded_fit(rank, folder).lightning_module)
    assert all(torch.equal(trained[name], alone[name]) for name in alone), (
        "watching changed the training"
    )
    return {"weights": trained, "histories": [probe.history for probe in callbacks]}


def test_two_processes_log_what_one_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Measurement, "_affordable", lambda self: 6
    )  # two passes over 7 samples, one over 6
    callbacks = probes()
    model = fit(
        tmp_path, *callbacks, model=Net, loader=DataLoader(digits(24), batch_size=24)
    ).lightning_module
    first, second = on_ranks(watched, tmp_path)
    for name, weight in weights(model).items():
        torch.testing.assert_close(first["weights"][name], weight)
    for alone, a, b in zip(callbacks, first["histories"], second["histories"], strict=True):
        assert len(alone.history) == len(a) == len(b) == 2
        for x, y, z in zip(alone.history, a, b, strict=True):
            assert y == z
            assert y == {key: pytest.approx(value, rel=1e-5) for key, value in x.items()}


class Raw(Sharded):
    """Uses a weight in a way that no hook follows."""

    def forward(self, x):
        return super().forward(x)[:, :2] @ self.net.extra.sin()


def extra():
    model = Raw()
    model.net.register_parameter("extra", nn.Parameter(torch.randn(2, 3)))
    return model


class Half(Sharded):
    def configure_model(self):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


REFUSED = [
    (
        InformationInWeights,
        Sharded,
        "InformationInWeights keeps a centre and a curvature of all weights on every",
    ),
    (
        lambda: PACBayesCertificate(prior_origin="x"),
        Sharded,
        "PACBayesCertificate draws whole networks on every process and",
    ),
    (
        lambda: FisherTrace(max_samples=1),
        Sharded,
        "`max_samples` must be at least 1 for each of 2 processes with sha",
    ),
    (
        FisherTrace,
        extra,
        r"gradients of net\.extra belong to .*; `model` must be unsharded",
    ),
    (
        FisherTrace,
        Half,
        r"`model` must gather its shards in float32 or better, got 'net\.1\.weight' in torch",
    ),
]


def refused(rank, folder):
    for callback, model, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            sharded_fit(rank, folder, callback(), NoStep(), model=model)
    return True


class FSDP1(FSDPStrategy):
    """Lightning's own, on processors: it asks for the number of a GPU, which they do not have."""

    def _setup_model(self, model):
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class TensorParallel(Net):
    def configure_model(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        if not any(hasattr(p, "full_tensor") for p in self.parameters()):
            parallelize_module(self.net[5], self.device_mesh["tensor_parallel"], ColwiseParallel())


class BothParallel(TensorParallel):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        super().configure_model()
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def tensor_parallel():
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)


FOLLOWS = "follows weights of FSDP2 only and cannot work with sharded weights, got"
ORIGIN = "keeps a centre and a curvature of all weights on every process and cannot work with sharded weights, got"
OTHER_SHARDS = [
    (
        FisherTrace,
        Net,
        FSDP1,
        f"FisherTrace {FOLLOWS} FullyShardedDataParallel; use a strategy that keeps them whole",
    ),
    (
        FisherTrace,
        Net,
        lambda: FSDP1(use_orig_params=False),
        f"FisherTrace {FOLLOWS} FullyShardedDataParallel",
    ),
    (LocalMinimum, Net, FSDP1, f"LocalMinimum {FOLLOWS} FullyShardedDataParallel"),
    (InformationInWeights, Net, FSDP1, f"InformationInWeights {ORIGIN} FullyShardedDataParallel"),
    (FisherTrace, TensorParallel, tensor_parallel, f"FisherTrace {FOLLOWS} DTensor"),
    (LocalMinimum, TensorParallel, tensor_parallel, f"LocalMinimum {FOLLOWS} DTensor"),
    (
        InformationInWeights,
        TensorParallel,
        tensor_parallel,
        f"InformationInWeights {ORIGIN} DTensor",
    ),
    (
        FisherTrace,
        BothParallel,
        tensor_parallel,
        r"sharded by `fully_shard` alone, got 'net\.5\..*' sharded in another",
    ),
]


def refused_otherwise(rank, folder):
    for callback, model, strategy, message in OTHER_SHARDS:
        with pytest.raises(ValueError, match=message):
            sharded_fit(rank, folder, callback(), NoStep(), model=model, strategy=strategy())
    return True


class NoStep(pl.Callback):
    def on_before_optimizer_step(self, *_):
        raise AssertionError("training has started")


def test_refusals_come_before_training(tmp_path):
    assert on_ranks(refused, tmp_path) == [True, True]


def test_other_kinds_of_shards_are_refused(tmp_path):
    assert on_ranks(refused_otherwise, tmp_path) == [True, True]


def test_deepspeed_is_refused(tmp_path):
    """Which is not installed: it marks parameters that it shards with a number, and asks for that mark itself."""
    model = Net()
    model.net[1].weight.ds_id = 0
    with pytest.raises(ValueError, match=f"FisherTrace {FOLLOWS} DeepSpeed ZeRO stage 3"):
        fit(tmp_path, FisherTrace(), NoStep(), model=model)
