"""Every penalty in a LightningModule: it does something, nothing at weight 0, and works in every kind of training."""

import csv
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_taskinfo import TaskInfoWarning, mixins
from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo.regularizers import WeightInformation
from lightning_taskinfo.variational import noisy_weights
from tests.penalised_net import MIXINS, NAMESPACE, NETS, WEIGHTS, N, Net, Pairs, fit, loader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few workers, small log interval


def differences(a: nn.Module, b: nn.Module, parts=("body", "head")) -> list[str]:
    """Names of entries of the state that are not the same, bit for bit."""
    other = b.state_dict()
    picked = {
        name: value for name, value in a.state_dict().items() if name.startswith(tuple(parts))
    }
    return [name for name, value in picked.items() if not same(value, other[name])]


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def without():
    """The network trained with the penalty terms deleted, and the generator's state afterwards."""
    model = Net({})
    fit(model)
    return model, torch.get_rng_state()


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_zero_is_training_without_the_term_bit_for_bit(name, without):
    model, state = without
    zero = Net({name: 0.0})
    fit(zero)
    assert differences(model, zero) == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_changes_the_training(name, without):
    model, _ = without
    weighted = Net({name: WEIGHTS[name]})
    fit(weighted)
    changed = differences(model, weighted)
    assert {
        "body.0.parametrizations.weight.original",
        "body.0.parametrizations.weight.0.log_variance",
    } <= {*changed}
    assert all(p.isfinite().all() for p in weighted.parameters())


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (1, 0.5), (2, 0.5)])
def test_accumulation_and_clipping_are_those_of_a_plain_loop(accumulate, clip):
    trained, plain = Net(WEIGHTS), Net(WEIGHTS)
    fit(trained, accumulate_grad_batches=accumulate, gradient_clip_val=clip, max_epochs=1)
    plain.information.num_samples = N
    optimizer = plain.configure_optimizers()
    for i, batch in enumerate(loader(), start=1):
        (plain.training_step(batch, i) / accumulate).backward()
        if i % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(trained.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_bf16_mixed():
    model = Net(WEIGHTS)
    before = [p.detach().clone() for p in model.parameters()]
    fit(model, precision="bf16-mixed")
    assert model.local_minimum.value > 0
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert p.dtype == torch.float32, name
        assert p.isfinite().all(), name
        assert not torch.equal(p, old), name  # the critic's parameters too


def test_resuming_gives_the_weights_of_the_uninterrupted_run(tmp_path):
    whole, first, resumed = Net(WEIGHTS), Net(WEIGHTS), Net(WEIGHTS)
    fit(whole, max_epochs=4)
    fit(first, max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    with torch.no_grad():
        for p in resumed.parameters():
            p.add_(1.0)  # what is not in the checkpoint would show
    fit(resumed, max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert differences(whole, resumed, parts=("",)) == []


def test_load_from_checkpoint_gives_the_same_module(tmp_path):
    model = Net(WEIGHTS)
    fit(model, max_epochs=1).save_checkpoint(tmp_path / "net.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "net.ckpt", weights=WEIGHTS, weights_only=True)
    assert differences(model, loaded, parts=("",)) == []


def test_a_compiled_backbone_trains_alike():
    torch._dynamo.reset()
    plain, compiled = Net(WEIGHTS), Net(WEIGHTS, compiled=True)
    fit(plain, max_epochs=1), fit(compiled, max_epochs=1)
    for p, q in zip(plain.head.parameters(), compiled.head.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_both_namespaces(namespace):
    model, other = NETS[namespace](WEIGHTS), Net(WEIGHTS)
    fit(model, NAMESPACES[namespace].Trainer, max_epochs=1), fit(other, max_epochs=1)
    assert differences(model, other) == []


def test_mixins_compose_in_any_order_and_override_no_hook():
    base = NAMESPACES[NAMESPACE].LightningModule
    for pair in itertools.permutations(MIXINS, 2):
        assert (
            type("Net", (*pair, base), {})()
            .penalised(torch.tensor(1.0), a=torch.tensor(2.0))
            .item()
            == 3.0
        )
    for mixin in MIXINS:
        own = {
            name for cls in mixin.__mro__[:-1] for name in vars(cls) if not name.startswith("__")
        }
        assert not own & set(dir(base)), mixin


def rows(path) -> list[dict[str, str]]:
    with open(next(path.rglob("metrics.csv"))) as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("accumulate", "expected"), [(1, [0, 3, 6]), (2, [0, 3])])
def test_values_weights_and_gradient_ratios_are_logged(tmp_path, accumulate, expected):
    model = Net(WEIGHTS)
    model.gradient_ratio_every_n_steps = 3
    logger = __import__(f"{NAMESPACE}.loggers", fromlist=["x"]).CSVLogger(tmp_path)
    fit(model, logger=logger, log_every_n_steps=2, accumulate_grad_batches=accumulate)
    stored = rows(tmp_path)
    for name, weight in WEIGHTS.items():
        last = [row for row in stored if row[f"taskinfo/{name}/weight"]][-1]
        assert float(last[f"taskinfo/{name}/weight"]) == pytest.approx(weight)
        assert float(last[f"taskinfo/{name}/quantity"]) != 0.0
        assert last[f"taskinfo/{name}/added_to_loss"]
        assert last["taskinfo/loss_without_penalties"]
        key = f"taskinfo/{name}/gradient_ratio"
        ratios = [(int(row["step"]), float(row[key])) for row in stored if row[key]]
        begun = (
            0 if name != "temporal_ensembling" else len(loader()) // accumulate
        )  # which has nothing to average yet
        assert [step for step, _ in ratios] == [step for step in expected if step >= begun]
        assert all(ratio > 0 for _, ratio in ratios)


def test_the_gradient_ratio_is_the_ratio_of_the_gradients():
    model = Net({})
    x = torch.randn(5, 4)
    loss = model(x).square().mean()
    ratios = model._gradient_ratios(
        loss, {"triple": 3 * loss, "none": torch.zeros((), requires_grad=True)}
    )
    assert ratios == pytest.approx(
        {"taskinfo/triple/gradient_ratio": 3.0, "taskinfo/none/gradient_ratio": 0.0}
    )
    assert all(p.grad is None for p in model.parameters())


def test_measuring_the_ratios_does_not_change_the_training():
    measured, plain = Net(WEIGHTS), Net(WEIGHTS)
    measured.gradient_ratio_every_n_steps, plain.gradient_ratio_every_n_steps = 1, 0
    fit(measured), fit(plain)
    assert differences(measured, plain, parts=("",)) == []


def test_the_number_of_samples_is_that_of_the_labelled_set():
    combined = __import__(f"{NAMESPACE}.utilities", fromlist=["x"]).CombinedLoader
    data = {
        "labeled": torch.utils.data.DataLoader(Pairs(), batch_size=5, drop_last=True),
        "unlabeled": torch.utils.data.DataLoader(range(1000), batch_size=5),
    }
    for train_loader in (data, combined(data, "max_size_cycle"), data["labeled"]):
        trainer = type("Trainer", (), {"train_dataloader": train_loader})
        assert mixins.labeled_samples(trainer) == N


@pytest.mark.parametrize(
    "train_loader",
    [
        DataLoader(Pairs(), sampler=WeightedRandomSampler([1.0] * N, 2 * N)),
        DataLoader(Pairs(), sampler=DistributedSampler(Pairs(), num_replicas=2, rank=0)),
        DataLoader(Pairs(), batch_size=None, sampler=torch.randperm(N).tolist()),
    ],
)
def test_samplers_that_leave_nothing_out_leave_the_number_alone(train_loader):
    assert mixins.labeled_samples(type("Trainer", (), {"train_dataloader": train_loader})) == N


@pytest.mark.parametrize(
    ("train_loader", "found"),
    [
        ([1, 2], "list"),
        ({"unlabeled": loader()}, "NoneType"),
        (None, "NoneType"),
        (DataLoader(Pairs(), sampler=SubsetRandomSampler(range(9))), "DataLoader"),
        (DataLoader(Pairs(), batch_size=None, sampler=range(9)), "DataLoader"),
        (DataLoader(Pairs(), batch_sampler=[[0, 1], [2]]), "DataLoader"),
        (
            DataLoader(Pairs(), sampler=DistributedSampler(range(9), num_replicas=2, rank=0)),
            "DataLoader",
        ),
    ],
)
def test_refuses_loaders_that_do_not_say_how_many_samples_there_are(train_loader, found):
    trainer = type("Trainer", (), {"train_dataloader": train_loader})
    message = "`num_samples` must be given to WeightInformation where no training loader says how many samples"
    with pytest.raises(ValueError, match=f"{message} there are, got {found}"):
        mixins.labeled_samples(trainer)


def test_a_sampler_that_lightning_shares_between_ranks_is_asked_itself():
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[
        NAMESPACE
    ]
    wrapper = __import__(
        f"{fabric}.utilities.distributed", fromlist=["x"]
    ).DistributedSamplerWrapper
    for sampler in (SubsetRandomSampler(range(N)), SubsetRandomSampler(range(9))):
        data = DataLoader(Pairs(), sampler=wrapper(sampler, num_replicas=2, rank=0))
        trainer = type("Trainer", (), {"train_dataloader": data})
        if len(sampler) == N:
            assert mixins.labeled_samples(trainer) == N
            continue
        with pytest.raises(ValueError, match="there are, got DataLoader"):
            mixins.labeled_samples(trainer)


def test_refuses_to_guess_the_number_of_samples_without_a_trainer():
    with pytest.raises(
        ValueError,
        match="`num_samples` must be given to WeightInformation where no training loader",
    ):
        Net({}).information_penalty()


@pytest.mark.parametrize(
    ("penalty", "found"), [(1.0, "float"), (torch.zeros(2), r"torch.Size\(\[2\]\)")]
)
def test_refuses_penalties_that_are_no_scalars(penalty, found):
    with pytest.raises(ValueError, match=f"`lautum` must be a scalar tensor, got {found}"):
        Net({}).penalised(torch.tensor(0.0), lautum=penalty)
    with pytest.raises(ValueError, match=f"`loss` must be a scalar tensor, got {found}"):
        Net({}).penalised(penalty, lautum=torch.tensor(0.0))


def test_a_batch_without_unlabelled_inputs_is_named():
    with pytest.raises(ValueError, match="`inputs` must be a tensor, got NoneType: does the batch"):
        Net({}).mutual_information_penalty(None, torch.zeros(2, 6))


def test_num_samples_may_be_given_without_a_trainer():
    model = Net({})
    model.information = WeightInformation(1.0, num_samples=7)
    assert model.information_penalty().item() == pytest.approx(model.information.value.item() / 7)


class Decaying(Net):
    """Weight decay on everything, or on all but the log-variances."""

    spared = False

    def configure_optimizers(self):
        named = [(name.endswith("log_variance"), p) for name, p in self.named_parameters()]
        groups = [
            {"params": [p for is_variance, p in named if is_variance is which]}
            for which in (False, True)
        ]
        return torch.optim.AdamW(
            [groups[0], {**groups[1], **({"weight_decay": 0.0} if self.spared else {})}]
        )


@pytest.mark.parametrize(
    ("spared", "frozen", "expected"), [(False, False, 1), (True, False, 0), (False, True, 0)]
)
def test_weight_decay_on_log_variances_is_warned_about_once(spared, frozen, expected):
    model = Decaying({"information": 1.0})
    model.spared = spared
    for *_, noise in noisy_weights(model):
        noise.log_variance.requires_grad_(not frozen)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(model, max_epochs=2)
    messages = [str(w.message) for w in seen if issubclass(w.category, TaskInfoWarning)]
    assert len(messages) == expected
    if expected:
        start = "Weight decay pulls the standard deviations of 4 noisy weights to 1, `body.0.weight` among them"
        assert messages[0].startswith(start)
        assert messages[0].endswith("into a param group with `weight_decay=0`.")
