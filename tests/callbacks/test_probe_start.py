"""The measurement before training: of weights that no step has moved, once, and on any data."""

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from lightning_taskinfo.callbacks import FisherTrace, LocalMinimum, PACBayesCertificate
from lightning_taskinfo.fisher import fisher_trace
from tests.callbacks.runs import PROBES, Classifier, digits, fit, read_csv

MEASURED_AT_START = True
pytestmark = pytest.mark.usefixtures("no_pictures")


def test_every_probe_measures_before_the_first_step(tmp_path):
    def make(**arguments):
        return [
            probe(every_n_steps=4, data=data, name=data, **arguments)
            for probe in PROBES.values()
            for data in ("train_batch", "train")
        ]

    callbacks, later, logger = make(), make(at_start=False), CSVLogger(tmp_path)
    fit(tmp_path, *callbacks, logger=logger)
    fit(tmp_path, *later)
    for callback, other in zip(callbacks, later, strict=True):
        key = f"{callback.name}/{callback.headline[0]}"
        assert [row["step"] for row in callback.history] == [0, 4, 8]
        assert [row["step"] for row in read_csv(logger) if key in row] == [0, 4, 8]
        assert other.history == callback.history[1:], "it changes nothing else"


def test_it_is_that_of_the_untrained_weights(tmp_path):
    callback = FisherTrace(data="train", labels="exact", every_n_epochs=2)
    model = Classifier()
    expected = fisher_trace(model.eval(), digits().tensors[0], labels="exact").item()
    fit(tmp_path, callback, model=model.train())
    assert callback.history[0]["fisher_trace"] == pytest.approx(expected)
    assert callback.history[0]["sgd_temperature"] == pytest.approx(0.05 / 8)


def test_a_training_that_goes_on_has_no_start(tmp_path):
    loader = DataLoader(digits(), batch_size=8)
    whole, first, second = (FisherTrace(every_n_steps=4, data="train") for _ in range(3))
    model = {"model": lambda: Classifier(dropout=0.0), "loader": loader}
    fit(tmp_path, whole, **model)
    fit(tmp_path, first, max_epochs=1, **model).save_checkpoint(tmp_path / "half.ckpt")
    fit(tmp_path, second, ckpt_path=tmp_path / "half.ckpt", **model)
    assert second.history == whole.history
    assert [row["step"] for row in whole.history] == [0, 4, 8]


def test_what_is_still_to_be_collected_has_no_start(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(digits())

    callback = FisherTrace(data="train", every_n_steps=4, max_samples=16)
    fit(tmp_path, callback, loader=DataLoader(Stream(), batch_size=8))
    assert [row["step"] for row in callback.history] == [4, 8]


def test_a_certificate_of_an_untrained_network_is_not_made(tmp_path):
    class Plain(Classifier):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 3))

    callback = PACBayesCertificate(prior_origin="random initialisation", draws=10, betas=(1.0,))
    fit(tmp_path, callback, model=Plain)
    assert [row["step"] for row in callback.history] == [8]


def test_what_is_measured_at_the_end_alone_has_no_start(tmp_path):
    at_the_end, asked = LocalMinimum(), LocalMinimum(at_start=True, name="asked")
    trainer = fit(tmp_path, at_the_end, asked)
    assert [row["step"] for row in at_the_end.history] == [trainer.global_step]
    assert [row["step"] for row in asked.history] == [0, trainer.global_step]
