"""Bad input: refused when a probe is made or a fit starts, and otherwise a gap in the history with one warning."""

import math
import pickle
import warnings
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo._batches import read_batch
from lightning_taskinfo.callbacks import FisherTrace, LocalMinimum, PACBayesCertificate
from lightning_taskinfo.callbacks.probe import check_finite
from lightning_taskinfo.fisher import fisher_trace
from tests.callbacks.runs import PROBES, Classifier, digits, fit

all_probes = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)


@all_probes
@pytest.mark.parametrize(
    "argument", ["every_n_steps", "every_n_epochs", "max_samples", "mc_samples"]
)
def test_refuses_non_positive(probe, argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be at least 1, got 0"):
        probe(**{argument: 0})


@all_probes
@pytest.mark.parametrize("argument", ["every_n_steps", "every_n_epochs", "max_samples"])
@pytest.mark.parametrize("value", ["5", 2.5], ids=repr)
def test_refuses_what_is_no_whole_number(probe, argument, value):
    with pytest.raises(TypeError, match=f"`{argument}` must be a whole number.*, got {value!r}"):
        probe(**{argument: value})


@all_probes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": "true"}, "`labels` must be one of .*, got 'true'"),
        ({"likelihood": "poisson"}, "`likelihood` must be one of .*, got 'poisson'"),
        ({"data": "test"}, "`data` must be one of train_batch, train, val.*, got 'test'"),
        (
            {"every_n_steps": 1, "every_n_epochs": 2},
            "`every_n_epochs` must be left out beside `every_n_steps`, got 2",
        ),
    ],
    ids=str,
)
def test_refuses_wrong_arguments_when_made(probe, arguments, message):
    with pytest.raises(ValueError, match=message):
        probe(**arguments)


@all_probes
def test_refuses_a_module_without_trainable_parameters(tmp_path, probe):
    class Still(Classifier):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

    with pytest.raises(ValueError, match="needs a parameter with `requires_grad=True`, got none"):
        fit(tmp_path, probe(), model=Still())


class Regression(Classifier):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()


@all_probes
@pytest.mark.parametrize("data", ["train_batch", "train"])
def test_refuses_a_likelihood_that_does_not_fit_before_the_first_step(tmp_path, probe, data):
    real = TensorDataset(torch.randn(16, 4), torch.randn(16, 3))
    model = Regression()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match=r"`targets` must be class indices .* got torch.float32 of shape \[2, 3\]"
    ):
        fit(tmp_path, probe(data=data), model=model, loader=DataLoader(real, batch_size=8))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@all_probes
def test_weights_that_are_not_finite_leave_a_gap_and_one_warning(tmp_path, probe):
    class Diverging(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 2:
                nn.init.constant_(self.net[4].weight, torch.nan)

    callback = probe(every_n_steps=1, data="train_batch")
    with pytest.warns(
        UserWarning,
        match="could not measure at step 3 .*`weights` must hold finite .* in 'net.0.weight'",
    ):
        fit(tmp_path, callback, model=Diverging())
    assert [row["step"] for row in callback.history] == [1, 2]


@all_probes
@pytest.mark.parametrize("schedule", [{"every_n_steps": 1000}, {"every_n_epochs": 50}], ids=str)
def test_a_training_too_short_to_be_measured_says_so(tmp_path, probe, schedule):
    ((name, value),) = schedule.items()
    callback = probe(data="train_batch", **schedule)
    message = f"{probe.__name__} has measured nothing .* after . steps, with .*`{name}={value}`"
    with pytest.warns(UserWarning, match=message):
        fit(tmp_path, callback)
    assert callback.history == []


def test_a_probe_of_batches_without_a_schedule_says_so(tmp_path):
    with pytest.warns(
        UserWarning,
        match="measured nothing .*`every_n_steps=None`, `every_n_epochs=None` .*set one of",
    ):
        fit(tmp_path, LocalMinimum(data="train_batch"))


def test_a_subset_that_was_never_full_is_named(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(digits())

    with pytest.warns(
        UserWarning,
        match="measured nothing .* after 1 steps, .*`max_samples=20`: .* or less",
    ):
        fit(
            tmp_path,
            FisherTrace(data="train", max_samples=20),
            loader=DataLoader(Stream(), batch_size=8),
            max_steps=1,
        )


def test_a_trial_run_of_one_step_is_no_reason_to_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has measured nothing")
        fit(tmp_path, FisherTrace(), fast_dev_run=True)


@all_probes
def test_an_empty_loader_measures_nothing(tmp_path, probe):
    callback = probe(every_n_steps=1)
    fit(tmp_path, callback, loader=DataLoader(digits()), limit_train_batches=0)
    assert callback.history == []


class Plain(Classifier):
    """Without a batch norm, which cannot train on one sample."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)


@all_probes
@pytest.mark.parametrize("data", ["train_batch", "train"])
def test_batch_size_one(tmp_path, probe, data):
    callback = probe(every_n_steps=1, data=data, max_samples=1)
    fit(tmp_path, callback, model=Plain(), loader=DataLoader(digits(4), batch_size=1), max_epochs=1)
    assert len(callback.history) == 4
    assert all(math.isfinite(row[callback.headline[0]]) for row in callback.history)
    if probe is FisherTrace:  # one sample has none
        assert all(math.isnan(row["fisher_trace_standard_error"]) for row in callback.history)


def test_more_samples_than_there_are(tmp_path):
    everything = {"train_batch": 8, "train": 32}
    probes = {}
    for kind, probe in PROBES.items():
        for data, size in everything.items():
            for samples in (10_000, size, size - 1):
                name = f"{kind} {data} {samples}"
                probes[name] = probe(every_n_steps=2, data=data, max_samples=samples, name=name)
    loader = DataLoader(digits(), batch_size=8)
    fit(tmp_path, *probes.values(), loader=loader, max_epochs=1)
    for kind in PROBES:
        for data, size in everything.items():
            more, all_of_them, fewer = (
                probes[f"{kind} {data} {samples}"].history for samples in (10_000, size, size - 1)
            )
            assert more == all_of_them != fewer
            assert len(more) == 2


@all_probes
def test_an_empty_dataset_measures_nothing(tmp_path, probe):
    callback, nothing = (
        probe(every_n_steps=1),
        TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)),
    )
    fit(tmp_path, callback, loader=DataLoader(nothing))
    assert callback.history == []


@all_probes
def test_a_summary_that_fails_leaves_a_gap(tmp_path, probe):
    class Broken(probe):
        def summarise(self, observed, samples):
            values = super().summarise(observed, samples)
            self.calls = getattr(self, "calls", 0) + 1
            return values if self.calls == 2 else 1 / 0

    callback = Broken(every_n_steps=1, data="train_batch")
    with pytest.warns(
        UserWarning, match=r"could not measure at step 1 \(ZeroDivisionError: division by zero\)"
    ) as caught:
        fit(tmp_path, callback)
    assert [row["step"] for row in callback.history] == [2]
    assert len([w for w in caught if "could not measure" in str(w.message)]) == 1


def test_a_batch_that_cannot_be_collected_is_a_warning(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(digits())

    def fails_later(batch, seen=[]):  # noqa: B006
        seen.append(1)
        return read_batch(batch if len(seen) < 5 else None)

    callback = FisherTrace(every_n_steps=1, data="train", max_samples=30, batch_fn=fails_later)
    with pytest.warns(
        UserWarning, match="could not measure at step .*got NoneType; set `batch_fn`"
    ):
        trainer = fit(tmp_path, callback, loader=DataLoader(Stream(), batch_size=8))
    assert trainer.global_step == 8


def test_a_module_without_forward_is_told_to_set_forward_fn(tmp_path):
    class NoForward(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ValueError, match=r"failed .*set `forward_fn`"):
        fit(tmp_path, FisherTrace(), model=NoForward())
    callback = FisherTrace(
        every_n_steps=8, forward_fn=lambda module, x: module.layer(x), labels="exact"
    )
    model = NoForward()
    fit(tmp_path, callback, model=model, loader=DataLoader(digits(), batch_size=8))
    expected = fisher_trace(model.layer, digits().tensors[0][-8:], labels="exact")
    assert callback.history[-1]["fisher_trace"] == pytest.approx(expected.item())


@all_probes
def test_refuses_complex_weights(tmp_path, probe):
    class Spectral(Classifier):
        def __init__(self):
            super().__init__()
            self.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
            self.later = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))

    with pytest.raises(ValueError, match="needs real parameters, got complex 'spectrum'"):
        fit(tmp_path, probe(), model=Spectral)


class Graph:
    """Inputs that say nothing about their samples."""

    def __init__(self, x):
        self.x = x


@all_probes
def test_inputs_without_tensors_are_named(tmp_path, probe):
    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return Graph(x), y

    class Net(Classifier):
        def forward(self, graph):
            return super().forward(graph.x)

    loader = DataLoader(digits(), batch_size=8, collate_fn=collate)
    with pytest.raises(ValueError, match=r"tensors.* got Graph; set `batch_fn`"):
        fit(tmp_path, probe(data="train_batch", every_n_steps=1), model=Net, loader=loader)


@all_probes
def test_inputs_without_an_axis_of_samples_are_refused(tmp_path, probe):
    def with_a_number(batch):
        return (batch[0], torch.tensor(2.0)), batch[1]

    callback = probe(
        every_n_steps=1, batch_fn=with_a_number, forward_fn=lambda module, inputs: module(inputs[0])
    )
    with pytest.raises(
        ValueError,
        match=r"`inputs` must hold tensors with the same, positive number of samples.*\[0, (8|32)\]",
    ):
        fit(tmp_path, callback)


@all_probes
def test_a_forward_that_fails_in_any_way_is_told_to_set_forward_fn(tmp_path, probe):
    class Net(Classifier):
        def forward(self, batch):
            return super().forward(batch.past)

    with pytest.raises(
        ValueError, match=r"failed \(AttributeError: .*'past'\); set `forward_fn`"
    ) as caught:
        fit(tmp_path, probe(), model=Net)
    assert isinstance(
        caught.value.__cause__, AttributeError
    )  # whose traceback leads into the forward


@all_probes
def test_probabilities_in_place_of_logits_are_warned_about(tmp_path, probe):
    class Net(Classifier):
        def forward(self, x):
            return super().forward(x).softmax(-1)

        def training_step(self, batch, batch_idx):
            return nn.functional.nll_loss(self(batch[0]).log(), batch[1])

    with pytest.warns(
        TaskInfoWarning, match=r"takes outputs for logits, .* are probabilities: set `forward_fn`"
    ):
        fit(tmp_path, probe(every_n_steps=4), model=Net)
    fit(tmp_path, probe(every_n_steps=4, forward_fn=lambda module, x: module(x).log()), model=Net)


def test_shares_that_add_up_to_1_are_no_probabilities_where_outputs_are_real_values(tmp_path):
    class Shares(Classifier):
        def forward(self, x):
            return super().forward(x).softmax(-1)

        def training_step(self, batch, batch_idx):
            return (self(batch[0]) - batch[1]).square().mean()

    real = TensorDataset(torch.randn(16, 4), torch.rand(16, 3))
    callback = FisherTrace(every_n_steps=2, likelihood="gaussian")
    fit(
        tmp_path, callback, model=Shares, loader=DataLoader(real, batch_size=8), max_epochs=1
    )  # warnings are errors
    assert len(callback.history) == 1


def test_large_weights_whose_sum_overflows_are_finite():
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 3e38)
    check_finite(model)
    with torch.no_grad():
        model.weight[1, 1] = -math.inf
    with pytest.raises(
        ValueError, match="`weights` must hold finite numbers, got others in 'weight'"
    ):
        check_finite(model)


@all_probes
def test_another_module_is_told_and_the_same_one_is_not(tmp_path, probe):
    callback, model = probe(data="train_batch", every_n_steps=4), Classifier()
    fit(tmp_path, callback, model=model)
    fit(tmp_path, callback, model=model)
    with pytest.warns(
        TaskInfoWarning,
        match="was used for another module before: its history goes on with this one",
    ):
        fit(tmp_path, callback)
    pickle.dumps(callback)  # other processes get it


UNREADABLE = {  # batch, forward, what to say
    "batch": (
        lambda x, y: [x, y, y],
        lambda net, x: net(x),
        "got list of Tensor, Tensor, Tensor; set `batch_fn`",
    ),
    "logits": (lambda x, y: (x, y), lambda net, x: {"scores": net(x)}, "scores; set `forward_fn`"),
    "labels": (lambda x, y: (x, y[:, None].expand(-1, 5)), lambda net, x: net(x), r"\[2, 5\]"),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize(
    "probe",
    [*PROBES.values(), partial(PACBayesCertificate, prior_origin="random initialisation")],
    ids=[*PROBES, "PACBayesCertificate"],
)
def test_what_cannot_be_measured_is_one_sentence_before_the_first_step(tmp_path, name, probe):
    batch_of, forward, message = UNREADABLE[name]

    class Other(Plain):
        def forward(self, x):
            return forward(self.net, x)

        def training_step(self, batch, batch_idx):
            raise AssertionError("refused too late")

    def collated(samples):
        return batch_of(*default_collate(samples))

    batches = DataLoader(digits(), batch_size=8, collate_fn=collated)
    with pytest.raises(ValueError, match=message) as refused:
        fit(tmp_path, probe(), model=Other, loader=batches)
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).endswith(".")
