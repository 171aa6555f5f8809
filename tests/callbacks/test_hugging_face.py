"""Hugging Face models need no argument: what is measured is a loop over samples with the model's own loss."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights
from lightning_taskinfo.fisher import FisherInformation, fisher_trace
from tests.callbacks.hugging_face import MODELS, Module, Sentences, loader
from tests.callbacks.runs import fit, same, seed_everything

CAUSAL = ("GPT-2", "Llama", "LoRA GPT-2", "LoRA Llama")
models = pytest.mark.parametrize("name", MODELS)


def make(name):
    seed_everything()
    return Module(MODELS[name]())


def loop(model, name, samples):
    """Mean squared gradient norm and mean loss of samples, each by the model's own loss; labels of tokens add up."""
    model = copy.deepcopy(model).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    norms, losses = [], []
    for sample in samples:
        batch = {key: value.unsqueeze(0) for key, value in sample.items()}
        labels = batch["labels"][:, 1:] if name in CAUSAL else batch["labels"]
        loss = model(**batch).loss * (labels != -100).sum()
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        norms.append(sum(g.square().sum().item() for g in gradients if g is not None))
        losses.append(loss.item())
    return sum(norms) / len(norms), sum(losses) / len(losses)


@models
def test_trace_and_loss_are_those_of_the_models_own_loss_and_the_training_keeps_its_bits(
    tmp_path, name
):
    alone, watched = make(name), make(name)
    drawn = FisherTrace(every_n_steps=1)
    trace = FisherTrace(every_n_steps=4, labels="empirical", name="trace")
    information = InformationInWeights()
    fit(tmp_path, model=alone, loader=loader(name), max_epochs=1)
    probes = (drawn, trace, information)
    fit(tmp_path, *probes, model=watched, loader=loader(name), max_epochs=1)
    assert len(drawn.history) == 4
    same(alone.state_dict(), watched.state_dict())

    everything = [*Sentences(name)]
    norm, _ = loop(watched.model, name, everything[-4:])
    _, loss = loop(watched.model, name, everything)
    assert trace.history[-1]["fisher_trace"] == pytest.approx(norm, rel=1e-3)
    assert information.history[-1]["loss_nats"] == pytest.approx(16 * loss, rel=1e-4)


class Popping(Module):
    """Takes the labels out of its batch, as many training steps do."""

    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")
        return torch.nn.functional.cross_entropy(self.model(**batch).logits, labels)


def test_labels_that_a_training_step_pops_are_measured_all_the_same(tmp_path):
    probes = []
    for kind in (Module, Popping):
        probe = FisherTrace(every_n_steps=1, labels="empirical")
        seed_everything()
        module = kind(MODELS["BERT classifier"]())
        fit(tmp_path, probe, model=module, loader=loader("BERT classifier"), max_epochs=1)
        probes.append([row["fisher_trace"] for row in probe.history])
    assert len(probes[0]) == 4
    assert probes[0] == pytest.approx(probes[1])


class Stream(IterableDataset):
    """Sentences that cannot be read by index."""

    def __iter__(self):
        return iter(Sentences("Llama"))


def shortened(samples):
    """Pad to the longest sentence of a batch only, as collators do."""
    batch = default_collate(samples)
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: values[:, :longest] for name, values in batch.items()}


def test_sentences_of_different_lengths_are_one_pool(tmp_path):
    module = make("Llama")
    probe = InformationInWeights(num_samples=16, max_samples=16)
    stream = DataLoader(Stream(), batch_size=2, collate_fn=shortened)
    fit(tmp_path, probe, model=module, loader=stream, max_epochs=1)
    assert (
        len({len(next(iter(shortened([sample]).values()))[0]) for sample in Sentences("Llama")}) > 1
    )
    _, loss = loop(module.model, "Llama", [*Sentences("Llama")])
    (row,) = probe.history[-1:]
    assert row.get("expected_loss", row.get("loss_nats")) == pytest.approx(16 * loss, rel=1e-4)


@pytest.mark.parametrize("name", ["BERT classifier", "Llama", "T5", "ViT"])
def test_functions_and_the_metric_take_a_batch_with_its_labels(name):
    model, samples = make(name).model.eval(), [*Sentences(name, 6)]
    norm, _ = loop(model, name, samples)
    assert fisher_trace(
        model, default_collate(samples), labels="empirical"
    ).item() == pytest.approx(norm, rel=1e-3)
    metric = FisherInformation(labels="empirical")
    for part in (samples[:4], samples[4:]):
        metric.update(model, default_collate(part))
    assert metric.compute().trace.item() == pytest.approx(norm, rel=1e-3)
