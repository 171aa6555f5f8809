"""Two callbacks without an argument on models of Hugging Face, in modules as their documentation writes them."""

import copy

import pytest
import torch
from torch.utils.data import default_collate

from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights
from lightning_taskinfo.functional.likelihood import NumberedDraws
from tests.callbacks.hugging_face import MODELS, Module, Sentences, loader
from tests.callbacks.runs import fit, seed_everything

MEASURED_AT_START = True
CAUSAL = ("GPT-2", "Llama")
PROMISED = ("BERT classifier", "token classifier", *CAUSAL, "ViT", "LoRA")


def make(name):
    seed_everything()
    return Module(MODELS[name]())


def own_losses(model, name, batch):
    """Loss of each sample by the model's own loss; those of tokens add up, as their negative log-likelihood does."""
    for sample in zip(*(values.split(1) for values in batch.values()), strict=True):
        one = dict(zip(batch, sample, strict=True))
        labels = one["labels"][:, 1:] if name in CAUSAL else one["labels"]
        yield model(**one).loss * (labels != -100).sum()


def with_labels(name, batch, drawn):
    """Return the batch with other labels where it has any; those of a causal model say what the next token is."""
    labels = batch["labels"]
    if name in CAUSAL:
        drawn = torch.cat([labels[:, :1], drawn[:, : labels.shape[1] - 1]], 1)
    return {**batch, "labels": torch.where(labels == -100, labels, drawn)}


@pytest.fixture
def drawn(monkeypatch):
    """The labels that are drawn from a model, one tensor a measurement."""
    seen, sample = [], NumberedDraws.sample

    def noting(self, outputs, generator=None):
        seen.append(sample(self, outputs, generator))
        return seen[-1]

    monkeypatch.setattr(NumberedDraws, "sample", noting)
    return seen


@pytest.mark.filterwarnings("ignore:.*gaussian_misfit", "ignore:.*has measured nothing")
@pytest.mark.parametrize("name", PROMISED)
def test_two_lines_alone(tmp_path, name, drawn):
    """Trace and loss are those of a loop over samples with the model's own loss, before a training and after it."""
    module, samples = make(name), [*Sentences(name)]
    untrained = copy.deepcopy(module.model)
    trace, information = FisherTrace(), InformationInWeights()
    fit(tmp_path, trace, information, model=module, loader=loader(name), max_epochs=1)

    model = untrained.eval()
    labels = next(labels for labels in drawn if len(labels) == 4)  # of the first batch
    batch = with_labels(name, default_collate(samples[:4]), labels)
    trained = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for loss in own_losses(model, name, batch):
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        norms.append(sum(g.square().sum().item() for g in gradients if g is not None))
    assert trace.history[0]["step"] == 0
    assert trace.history[0]["fisher_trace"] == pytest.approx(sum(norms) / 4, rel=1e-3)
    loss = sum(own_losses(module.model.eval(), name, default_collate(samples))).item()
    assert information.history[-1]["step"] == 4
    assert information.history[-1]["loss_nats"] == pytest.approx(loss, rel=1e-4)
