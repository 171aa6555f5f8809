"""The callback certifies from the start it saw, through checkpoints, and says where it could not see it."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.callbacks.pac_bayes_certificate import PACBayesCertificate
from lightning_taskinfo.certificates import Prior, certify
from tests.callbacks.runs import Classifier, fit, seed_everything
from tests.certificates.conftest import blobs

QUICK = {"draws": 20, "betas": (1.0,), "prior_origin": "random initialisation"}


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(*blobs(64, seed=0)), batch_size=16)


def start() -> Plain:
    seed_everything()
    return Plain()


@pytest.mark.parametrize("bar", [True, False])
def test_draws_a_bar_where_lightning_does(tmp_path, loader, bar, monkeypatch, capsys):
    monkeypatch.setattr("lightning_taskinfo._progress.visible", lambda: True)
    fit(
        tmp_path,
        PACBayesCertificate(**QUICK),
        model=Plain,
        loader=loader,
        enable_progress_bar=bar,
    )
    drawn = capsys.readouterr().err
    assert ("certify draws" in drawn) == bar


def test_certifies_at_the_end_from_the_start(tmp_path, loader):
    callback = PACBayesCertificate(**QUICK)
    trainer = fit(tmp_path, callback, model=Plain, loader=loader)
    certificate = callback.certificate
    assert certificate.valid, certificate.reasons
    model = trainer.lightning_module
    prior = Prior(start(), origin="random initialisation")
    assert certificate == certify(model, blobs(64, seed=0), prior, draws=20, betas=(1.0,))
    assert [row["certificate_bound"] for row in callback.history] == [certificate.bound]
    assert callback.history[0]["certificate_valid"] == 1.0


def test_every_epoch(tmp_path, loader):
    callback = PACBayesCertificate(**QUICK, every_n_epochs=1)
    fit(tmp_path, callback, model=Plain, loader=loader, max_epochs=3)
    assert [row["step"] for row in callback.history] == [4, 8, 12]


def test_training_does_not_notice(tmp_path, loader):
    alone = fit(tmp_path, model=Plain, loader=loader).lightning_module
    watched = fit(
        tmp_path, PACBayesCertificate(**QUICK, every_n_epochs=1), model=Plain, loader=loader
    ).lightning_module
    assert all(
        torch.equal(a, b) for a, b in zip(alone.parameters(), watched.parameters(), strict=True)
    )


def test_a_resumed_run_remembers_the_start(tmp_path, loader):
    whole, first, second = (PACBayesCertificate(**QUICK) for _ in range(3))
    fit(tmp_path, whole, model=Plain, loader=loader, max_epochs=2)
    trainer = fit(tmp_path, first, model=Plain, loader=loader, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(
        tmp_path, second, model=Plain, loader=loader, max_epochs=2, ckpt_path=tmp_path / "half.ckpt"
    )
    assert second.certificate == whole.certificate
    assert second.certificate.valid


def test_a_run_resumed_from_a_checkpoint_without_it_is_not_valid(tmp_path, loader):
    trainer = fit(tmp_path, model=Plain, loader=loader, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    late = PACBayesCertificate(**QUICK)
    fit(tmp_path, late, model=Plain, loader=loader, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert not late.certificate.valid
    assert "not known to be independent of the data" in late.certificate.reasons[0]


def test_a_second_fit_keeps_the_first_start(tmp_path, loader):
    callback, model = PACBayesCertificate(**QUICK, structure="diagonal"), start()
    fit(tmp_path, callback, model=model, loader=loader, max_epochs=1)
    first = callback.certificate
    fit(tmp_path, callback, model=model, loader=loader, max_epochs=2)
    assert callback.certificate.kl > first.kl
    assert callback.certificate.valid


def test_batch_norm_is_named(tmp_path):
    callback = PACBayesCertificate(**QUICK)
    x, y = blobs(64, seed=0)
    with pytest.warns(
        TaskInfoWarning, match="will not be valid: running statistics, like those of 'net.1', learn"
    ):
        fit(
            tmp_path,
            callback,
            model=Classifier,
            loader=DataLoader(TensorDataset(x, y), batch_size=16),
        )
    assert callback.history[-1]["certificate_valid"] == 0.0
    assert "BatchNorm statistic `net.1.running_mean`" in callback.certificate.reasons[0]


def test_several_structures_through_the_callback(tmp_path, loader):
    callback = PACBayesCertificate(**QUICK, structure=["isotropic", "diagonal"])
    fit(tmp_path, callback, model=Plain, loader=loader)
    assert callback.certificate.structures == ("isotropic", "diagonal")


def test_refuses_samples_that_are_repeated_or_left_out(tmp_path):
    dataset = TensorDataset(*blobs(64, seed=0))
    skewed = DataLoader(dataset, batch_size=16, sampler=WeightedRandomSampler(torch.rand(64), 64))
    with pytest.raises(
        ValueError, match=r"PACBayesCertificate needs a training set that can be read by index"
    ):
        fit(tmp_path, PACBayesCertificate(**QUICK), model=Plain, loader=skewed)


@pytest.mark.parametrize(
    ("pick", "targets", "message"),
    [
        (
            lambda y: (y, y),
            torch.int64,
            r"got tuple of Tensor, Tensor; set `forward_fn`",
        ),
        (
            lambda y: y[:, 0],
            torch.int64,
            r"must return logits \[N, C\] of at least 2 classes, got \[2\]; set `forward_fn`",
        ),
        (lambda y: y[:, None].expand(-1, 3, -1), torch.int64, r"got \[2, 3, 2\]; set"),
        (
            lambda y: y,
            torch.float32,
            r"needs class indices \(integers\) .*, got torch\.float32 of shape \[2\]\.",
        ),
    ],
    ids=["tuple", "regression", "sequence", "real targets"],
)
def test_refuses_what_is_no_classifier_before_the_first_step_by_no_argument_it_does_not_have(
    tmp_path, pick, targets, message
):
    class Other(Plain):
        def forward(self, x):
            return pick(self.net(x))

        def training_step(self, batch, batch_idx):
            raise AssertionError("refused too late")

    x, y = blobs(64, seed=0)
    loader = DataLoader(TensorDataset(x, y.to(targets)), batch_size=16)
    with pytest.raises(ValueError, match=message) as refused:
        fit(tmp_path, PACBayesCertificate(**QUICK), model=Other, loader=loader)
    assert "likelihood" not in str(refused.value)


class TwoOutputs(Plain):
    """What was returned by ``Plain``, behind a keyword, in a dict, beside something else."""

    def forward(self, *, left, right):
        return {"features": left, "logits": self.net(torch.cat([left, right], 1))}

    def training_step(self, batch, batch_idx):
        return cross_entropy(
            self(left=batch["left"], right=batch["right"])["logits"], batch["class"]
        )


@pytest.mark.parametrize("structure", ["diagonal", "neuron"])
def test_a_forward_of_its_own_gives_the_certificate_of_the_plain_network(
    tmp_path, loader, structure
):
    x, y = blobs(64, seed=0)
    rows = [{"left": x[i, :1], "right": x[i, 1:], "class": y[i]} for i in range(64)]
    how = {**QUICK, "structure": structure}
    callback = PACBayesCertificate(
        **how,
        batch_fn=lambda batch: ((batch["left"], batch["right"]), batch["class"]),
        forward_fn=lambda module, inputs: module(left=inputs[0], right=inputs[1])["logits"],
    )
    fit(tmp_path, callback, model=TwoOutputs, loader=DataLoader(rows, batch_size=16))
    plain = PACBayesCertificate(**how)
    fit(tmp_path, plain, model=Plain, loader=loader)
    assert callback.certificate == plain.certificate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "nueron"}, "`structure` .*got 'nueron'"),
        ({"structure": ["diagonal", "nueron"]}, "`structure` .*got 'nueron'"),
        ({"structure": []}, "`structure` must name at least one structure, got none"),
        ({"delta": 2}, r"`delta` must be in \(0, 1\), got 2"),
        ({"draws": 0}, "`draws` must be at least 1, got 0"),
        ({"betas": []}, r"`betas` must be positive, got \[\]"),
        ({"prior_origin": ""}, "`prior_origin` must say where the weights come from, got ''"),
    ],
)
def test_wrong_arguments_are_refused_before_training(arguments, message):
    with pytest.raises(ValueError, match=message):
        PACBayesCertificate(**{"prior_origin": "random initialisation", **arguments})


def test_what_counts_as_an_error_is_one_of_three():
    with pytest.raises(ValueError, match=r"`error` .*got 'word'"):
        PACBayesCertificate(**QUICK, error="word")


def test_a_network_of_tokens_is_certified_by_the_share_of_wrong_ones(tmp_path):
    class Tagger(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))

        def forward(self, tokens):
            return self.net(tokens)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    tokens = torch.randint(6, (64, 3), generator=torch.Generator().manual_seed(0))
    callback = PACBayesCertificate(**QUICK, error="token")
    loader = DataLoader(TensorDataset(tokens, tokens % 2), batch_size=16)
    model = fit(tmp_path, callback, model=Tagger, loader=loader).lightning_module
    wrong = (model(tokens).argmax(-1) != tokens % 2).double().mean(1)
    assert callback.certificate.error == "token"
    assert callback.certificate.model_risk == pytest.approx(wrong.mean().item())


class Frozen(Plain):
    """Its first layer is frozen; ``thaw`` and ``change`` say what the training does with it."""

    thaw = False
    change = False

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            if self.change:
                self.net[0].weight.data += 0.1
            self.net[0].requires_grad_(self.thaw)
        return super().training_step(batch, batch_idx)


class Thawed(Frozen):
    thaw = True


class Changed(Frozen):
    change = True


class ChangedAndThawed(Frozen):
    change = True
    thaw = True


@pytest.mark.parametrize(
    ("model", "valid", "kept"),
    [(Frozen, True, 2), (Thawed, True, 4), (Changed, False, 2), (ChangedAndThawed, False, 4)],
)
def test_frozen_weights_are_not_kept_and_still_watched(tmp_path, loader, model, valid, kept):
    callback = PACBayesCertificate(**QUICK)
    fit(tmp_path, callback, model=model, loader=loader, max_epochs=2)
    assert len(callback.state_dict()["prior_center"]) == kept
    assert callback.certificate.valid == valid
    if not valid:
        assert "net.0.weight" in " ".join(callback.certificate.reasons)


def test_copies_of_samples_are_counted_and_not_certified(tmp_path):
    x, y = blobs(32, seed=0)
    twins = TensorDataset(torch.cat([x, x]), torch.cat([y, y]))
    callback = PACBayesCertificate(**QUICK)
    fit(tmp_path, callback, model=Plain, loader=DataLoader(twins, batch_size=16))
    (row,) = callback.history
    assert (row["certificate_repeated_samples"], row["certificate_valid"]) == (64.0, 0.0)
