"""The ready classifier: every method acts in its stage, in both namespaces, and freezing freezes."""

import json
import math

import pytest
import torch
from torch import nn

from lightning_taskinfo._lightning import NAMESPACES, Callback
from lightning_taskinfo.transfer import BACKBONES, CLASSES, PENALTIES, TransferClassifier
from lightning_taskinfo.transfer.ready.module import (
    acting,
    all_weights,
    feature_dim,
    make_backbone,
    parse_method,
)
from lightning_taskinfo.transfer.training import quiet
from lightning_taskinfo.variational import noisy_weights
from tests.transfer.tiny import tiny_data, tiny_net

SHAPE = (1, 8, 8)


def classifier(method="standard", stage="pretrain", data=None, kind=TransferClassifier, **options):
    torch.manual_seed(0)
    data = data or tiny_data()
    data.setup()
    net = kind(
        tiny_net(SHAPE), 3, SHAPE, method=method, stage=stage, num_labeled=9, num_unlabeled=len(data.unlabeled),
        num_indices=data.num_indices, epochs=2, **options,
    )  # fmt: skip
    if "lautum" in net.penalties:
        net.lautum.fit_inputs([data.unlabeled.x.float() / 255])
    return net, data.use(stage)


def fit(net, data, namespace="pytorch_lightning", **options):
    with quiet():
        trainer = NAMESPACES[namespace].Trainer(
            max_epochs=2, logger=False, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(net, datamodule=data)
    return trainer


@pytest.mark.parametrize(
    ("method", "stage"), [(name, stage) for name, stages in PENALTIES.items() for stage in stages]
)
def test_every_method_changes_the_training_of_its_stages(method, stage):
    plain, penalised = classifier(stage=stage)[0], classifier(method, stage)[0]
    metrics = fit(penalised, classifier(stage=stage)[1]).callback_metrics
    fit(plain, classifier(stage=stage)[1])
    assert f"taskinfo/{method}/added_to_loss" in metrics
    plain_weight = plain.backbone[1].weight
    penalised_weight = penalised.backbone[1].weight
    assert not torch.equal(plain_weight, penalised_weight)


class Seen(Callback):
    """Writes down which samples each rank was given in the last epoch."""

    def __init__(self, folder):
        self.folder, self.labeled, self.unlabeled = folder, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.labeled, self.unlabeled = batch["labeled_index"].tolist(), []
        self.unlabeled += batch["unlabeled_index"].tolist()

    def on_train_end(self, trainer, pl_module):
        (self.folder / f"{trainer.global_rank}.json").write_text(
            json.dumps([self.labeled, self.unlabeled])
        )


def test_ranks_share_the_samples_also_where_a_share_fills_no_batch(tmp_path):
    """20 labels in batches of 16: each of two ranks has 10."""
    net, data = classifier("temporal_ensembling", "fine_tune", tiny_data(labels=20))
    fit(net, data, strategy="ddp_fork", devices=2, callbacks=[Seen(tmp_path)])
    labeled, unlabeled = zip(
        *(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)), strict=True
    )
    assert [len(part) for part in labeled] == [10, 10]
    assert sorted(labeled[0] + labeled[1]) == sorted(data.labeled.index.tolist())
    assert not set(unlabeled[0]) & set(unlabeled[1])


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_class_of_each_namespace_runs_in_its_trainer(namespace):
    net, data = classifier("mk_mmd", kind=CLASSES[namespace])
    assert isinstance(net, NAMESPACES[namespace].LightningModule)
    trainer = fit(net, data, namespace)
    assert "train_loss" in trainer.callback_metrics


def test_noise_is_added_once_and_to_what_is_trained():
    net, data = classifier("information", "fine_tune")
    net.backbone.requires_grad_(False)
    for _ in range(2):
        fit(net, data)
    assert [name for name, *_ in noisy_weights(net)] == ["head.weight", "head.bias"]


def test_target_inputs_do_not_move_batch_statistics_while_pretraining():
    torch.manual_seed(0)
    net = TransferClassifier(
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)), 3, SHAPE, method="mk_mmd"
    )
    x = torch.randn(16, *SHAPE)
    net.train()._penalties({"unlabeled": x + 5}, net.features(x), torch.zeros(16, 3))
    assert net.backbone[1].running_mean.abs().max() < 0.2


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_put_out_features_for_any_channels(name):
    shape = (3, 20, 24)
    net = BACKBONES[name](shape)
    assert net(torch.zeros(2, *shape)).shape == (2, feature_dim(net, shape))


def test_names_of_methods():
    assert parse_method("mutual_information + lautum") == ("lautum", "mutual_information")
    assert acting("lautum+temporal_ensembling", "fine_tune") == ("temporal_ensembling",)
    assert all_weights({"lautum": 3.0})["lautum"] == 3.0
    assert all_weights({"lautum": 0})["lautum"] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_method("laplace"), "`method` must be one of temporal_.*, got 'laplace'"),
        (lambda: parse_method("lautum+mk_mdd"), "`method` must be one of .*, got 'mk_mdd'"),
        (lambda: parse_method("lautum+lautum"), "`method` must not repeat a value"),
        (lambda: all_weights({"laplace": 1.0}), "`weights` must be one of .* got 'laplace'"),
        (
            lambda: all_weights({"lautum": -1.0}),
            "`lautum` must be non-negative and finite, got -1.0",
        ),
        (lambda: all_weights({"lautum": math.inf}), "must be non-negative and finite, got inf"),
        (lambda: all_weights({"lautum": math.nan}), "must be non-negative and finite, got nan"),
        (lambda: make_backbone("vgg", SHAPE), "`backbone` must be one of mlp, .* got 'vgg'"),
        (
            lambda: make_backbone(lambda shape: 3, SHAPE),
            "`backbone` must make an nn.Module, got int",
        ),
        (
            lambda: make_backbone("small_cnn", (1, 8, 7)),
            r"height and width of at least 8, got \(1, 8, 7\)",
        ),
        (
            lambda: TransferClassifier("mlp", 2, SHAPE, stage="test"),
            "`stage` must be .* got 'test'",
        ),
        (
            lambda: TransferClassifier("mlp", 2, SHAPE, learning_rate=0.0),
            "`learning_rate` must be positive, got 0.0",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
