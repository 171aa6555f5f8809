"""The sweep reaches known posteriors, prices information as it should, and continues where it was interrupted."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_taskinfo.functional.likelihood import Categorical
from lightning_taskinfo.tasks.complexity import structure_function
from lightning_taskinfo.tasks.ready import PreparedTask
from lightning_taskinfo.tasks.training import Fit, Training
from tests.tasks import regression

QUICK = Training(pretrain_steps=20, steps=20, draws=4)
BETAS = (10.0, 1.0, 0.1)


def classes(n=60):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def test_equals_the_closed_form_of_bayesian_linear_regression():
    """Mean over trainings against the exact posterior, in standard errors over trainings."""
    X, y = regression.data(0)
    training = Training(
        pretrain_steps=50,
        steps=150,
        batch_size=40,
        learning_rate=0.05,
        log_variance_learning_rate=0.2,
        draws=200,
    )
    curves = [
        structure_function(
            regression.line, (X, y), (3.0, 1.0), prior_std=1.0, likelihood="gaussian",
            training=training, seed=seed,
        )
        for seed in range(4)
    ]  # fmt: skip
    assert curves[0].label_entropy is None
    for index, beta in enumerate((3.0, 1.0)):
        kl, loss = regression.closed_form(X, y, beta)
        for found, exact in (
            ([c.kl[index] for c in curves], kl),
            ([c.loss[index] for c in curves], loss),
            ([c.objective[index] for c in curves], loss + beta * kl),
        ):
            values = torch.tensor(found, dtype=torch.float64)
            assert (values.mean() - exact).abs() < 4 * values.std() / math.sqrt(4), (
                beta,
                exact,
                found,
            )
            assert (values.mean() - exact).abs() < 0.03 * exact


def test_the_prior_point_is_the_loss_of_weights_without_information():
    X, y = regression.data(0)
    training = Training(pretrain_steps=1, steps=1, draws=1000)
    curve = structure_function(
        regression.line,
        (X, y),
        (1.0,),
        prior_std=1.0,
        likelihood="gaussian",
        training=training,
    )
    exact = 0.5 * y.square().sum() + 0.5 * X.square().sum() + 0.5 * len(X) * math.log(2 * math.pi)
    assert abs(curve.prior_loss - exact.item()) < 3 * curve.prior_loss_error
    assert curve.hull()[0] == (0.0, curve.prior_loss)


def test_information_rises_and_loss_falls_as_information_gets_cheaper():
    curve = structure_function(
        network, classes(), BETAS, training=Training(pretrain_steps=100, steps=150)
    )
    assert list(curve.kl) == sorted(curve.kl)
    assert list(curve.loss) == sorted(curve.loss, reverse=True)
    shares = torch.bincount(classes()[1]) / 60
    assert curve.label_entropy == pytest.approx(-(shares * shares.log()).sum().item(), rel=1e-6)
    assert curve.loss[0] > 0.9 * 60 * curve.label_entropy
    assert 0.1 < curve.critical_beta() < 10


def test_the_penalty_is_divided_by_the_samples_and_not_by_the_batch():
    """Ten times the penalty, or a tenth, would leave another amount of information."""
    training = Training(pretrain_steps=0, steps=200, batch_size=10)
    quarter = structure_function(network, classes(), (1.0,), training=training).kl[0]
    whole = structure_function(
        network, classes(), (1.0,), training=Training(pretrain_steps=0, steps=200)
    ).kl[0]
    assert quarter == pytest.approx(whole, rel=0.3)


def test_the_seed_decides_everything_and_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    first = structure_function(network, classes(), BETAS, training=QUICK, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert structure_function(network, classes(), BETAS[::-1], training=QUICK, seed=3) == first
    assert structure_function(network, classes(), BETAS, training=QUICK, seed=4) != first


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupted_sweep_continues_with_the_same_bits(tmp_path, after):
    def stop(done, total, label):
        if done == after:
            raise Interrupted

    whole = structure_function(network, classes(), BETAS, training=QUICK)
    with pytest.raises(Interrupted):
        structure_function(
            network, classes(), BETAS, training=QUICK, folder=tmp_path, progress=stop
        )
    seen, calls = [], []

    def counted():
        model = network()
        model.register_forward_pre_hook(lambda m, _: calls.append(m.training))
        return model

    resumed = structure_function(
        counted,
        classes(),
        BETAS,
        training=QUICK,
        folder=tmp_path,
        progress=lambda *progress: seen.append(progress),
    )
    assert resumed == whole
    assert seen == [(1, 3, "β = 10"), (2, 3, "β = 1"), (3, 3, "β = 0.1")]
    assert sum(calls) == (3 - after) * QUICK.steps  # what was finished is not trained again


def test_a_folder_belongs_to_one_sweep(tmp_path):
    structure_function(network, classes(), (1.0,), training=QUICK, folder=tmp_path)
    x, y = classes()
    for changed in (
        {"prior_std": 0.2},
        {"seed": 1},
        {"data": (x, 2 - y)},
    ):
        arguments = {"data": (x, y), **changed}
        with pytest.raises(
            ValueError,
            match=f"`folder` must be new or of the same configuration.*\n.*{next(iter(changed))}",
        ):
            structure_function(
                network, arguments.pop("data"), (1.0,), training=QUICK, folder=tmp_path, **arguments
            )
    moved = torch.cat([x[:5], x[5:] + 1])  # the network answers to the first ones
    with pytest.raises(ValueError, match=r"same configuration.*\n  data: "):
        structure_function(network, (moved, y), (1.0,), training=QUICK, folder=tmp_path)
    with pytest.raises(
        ValueError, match=r"same configuration.*\n  training\.steps: 20 there, 21 now"
    ):
        structure_function(
            network, (x, y), (1.0,), training=replace(QUICK, steps=21), folder=tmp_path
        )


def test_a_sweep_is_read_without_running_code(tmp_path):
    arguments = {"training": QUICK, "folder": tmp_path}
    structure_function(network, classes(), (1.0,), **arguments)
    torch.save({"rows": [], "model": network()}, tmp_path / "sweep.pt")
    with pytest.raises(ValueError, match=r"sweep\.pt: .* Delete it") as caught:
        structure_function(network, classes(), (1.0,), **arguments)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 100, -9])
def test_a_damaged_sweep_is_named(tmp_path, length):
    arguments = {"training": QUICK, "folder": tmp_path}
    structure_function(network, classes(), (1.0,), **arguments)
    path = tmp_path / "sweep.pt"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"sweep\.pt: .*Delete it"):
        structure_function(network, classes(), (1.0,), **arguments)


def test_a_flipped_byte_of_a_sweep_is_noticed(tmp_path):
    arguments = {"training": QUICK, "folder": tmp_path}
    structure_function(network, classes(), (1.0,), **arguments)
    path = tmp_path / "sweep.pt"
    whole = path.read_bytes()
    place = whole.index(sweep_weights(path))
    path.write_bytes(whole[: place + 3] + bytes([whole[place + 3] ^ 1]) + whole[place + 4 :])
    with pytest.raises(ValueError, match=r"sweep\.pt: .*checksum"):
        structure_function(network, classes(), (1.0,), **arguments)
    path.unlink()  # as the message says
    structure_function(network, classes(), (1.0,), **arguments)


def sweep_weights(path):
    """The bytes of the first tensor."""
    return next(iter(torch.load(path, weights_only=True)["model"].values())).numpy().tobytes()


def test_results_without_a_configuration_are_refused(tmp_path):
    structure_function(network, classes(), (1.0,), training=QUICK, folder=tmp_path)
    (tmp_path / "configuration.json").unlink()
    with pytest.raises(ValueError, match=r"`folder` must .*sweep\.pt"):
        structure_function(network, classes(), (2.0,), training=QUICK, folder=tmp_path)


def test_a_network_is_known_by_its_weights_its_modules_and_what_it_answers_to_two_samples():
    net = nn.Linear(2, 2, bias=False)
    nn.init.eye_(net.weight)
    inputs = torch.tensor([[1.0, -3.0], [4.0, 4.0], [100.0, 100.0]])
    fit = Fit(net, inputs, torch.zeros(3).long(), Categorical(), QUICK)
    known = fit.configuration()["network"]
    assert (known["modules"], known["answers"]) == (repr(net), "3.00e+00")
    nn.init.constant_(net.weight[1, 0], 1e-6)
    changed = fit.configuration()["network"]
    assert {key for key in known if known[key] != changed[key]} == {"weights"}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"betas": (1.0, 0.0)}, r"`betas` must be positive, got 0\.0\."),
        ({"betas": ()}, r"`betas` must be positive, got \(\)\."),
        ({"prior_std": 0.0}, r"`prior_std` must be positive, got 0\.0\."),
        (
            {"likelihood": "poisson"},
            "`likelihood` must be one of categorical, bernoulli, gaussian, got 'poisson'",
        ),
    ],
)
def test_refuses_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        structure_function(network, classes(), **{"betas": (1.0,), "training": QUICK, **arguments})


class Two(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("model_fn", "targets", "likelihood", "match"),
    [
        (
            lambda: nn.Linear(4, 1),
            torch.zeros(16),
            "gaussian",
            r"must have the outputs' shape \[16, 1\], got \[16\]",
        ),
        (
            lambda: nn.Linear(4, 3),
            torch.arange(16) // 4,
            "categorical",
            r"`targets` must lie in \[0, 3\) .* got 3",
        ),
        (
            lambda: nn.Linear(4, 2),
            torch.zeros(16),
            "categorical",
            "must be class indices .*got torch.float32",
        ),
        (
            lambda: Two(4, 2),
            torch.zeros(16).long(),
            "categorical",
            "must return a tensor of outputs, got tuple",
        ),
    ],
    ids=["broadcast", "too few outputs", "real targets", "tuple"],
)
def test_refuses_outputs_that_do_not_fit_the_targets(model_fn, targets, likelihood, match):
    with pytest.raises(ValueError, match=match):
        structure_function(
            model_fn, (torch.zeros(16, 4), targets), (1.0,), training=QUICK, likelihood=likelihood
        )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"pretrain_steps": -1}, "`pretrain_steps` must be non-negative and finite, got -1"),
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"learning_rate": 0.0}, r"`learning_rate` must be positive, got 0\.0"),
        ({"draws": 1}, "`draws` must be at least 2 for a standard error, got 1"),
    ],
)
def test_training_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        Training(**arguments)


def tanh_in_forward():
    class Sequential(nn.Sequential):  # looks like another in print
        def forward(self, x):
            return super().forward(x).tanh()

    return Sequential(*network())


def dropout_inside():
    return nn.Sequential(*network(), nn.Dropout(0.5))  # seen in training only


def tanh_inside():
    return nn.Sequential(*(nn.Tanh() if i == 1 else part for i, part in enumerate(network())))


@pytest.mark.parametrize("other", [tanh_inside, tanh_in_forward, dropout_inside])
def test_a_folder_belongs_to_one_network(tmp_path, other):
    structure_function(network, classes(), [1.0], training=QUICK, folder=tmp_path)
    with pytest.raises(ValueError, match="network"):
        structure_function(other, classes(), [1.0], training=QUICK, folder=tmp_path)


def test_the_callers_own_network_is_left_alone():
    mine = network()
    structure_function(lambda: mine, classes(), [1.0], training=QUICK)
    assert not any(
        isinstance(module, nn.utils.parametrize.ParametrizationList) for module in mine.modules()
    )


@pytest.mark.parametrize(
    ("model_fn", "match"),
    [
        (
            nn.Linear(2, 3),
            "`model_fn` must be a function that makes a network, got a Linear, a network already",
        ),
        (lambda: None, "`model_fn` must return a network, got NoneType"),
    ],
)
def test_refuses_what_makes_no_network(model_fn, match):
    with pytest.raises(ValueError, match=match):
        structure_function(model_fn, classes(), [1.0], training=QUICK)


def test_a_prepared_task_is_data():
    task = PreparedTask("mine", *classes(), num_classes=3)
    found = structure_function(network, task, [1.0], training=QUICK)
    assert found == structure_function(network, classes(), [1.0], training=QUICK)


@pytest.mark.parametrize(("repeats", "ignored"), [(5, 0), (1, 30), (5, 30)])
def test_the_entropy_of_labels_is_the_loss_of_the_best_constant_answer(repeats, ignored):
    """Also of sequences, whose samples have several labels, and where labels are ignored."""
    x, y = classes()
    x, y = (part[:, None].repeat_interleave(repeats, 1) for part in (x, y))
    y[:ignored] = -100
    counted = y[ignored:].flatten()
    answer = (counted.bincount() / len(counted)).log()
    constant = -answer[counted].sum().item()
    found = structure_function(lambda: nn.Linear(4, 3), (x, y), [1.0], training=QUICK)
    assert found.samples * found.label_entropy == pytest.approx(constant, rel=1e-5)


def test_a_training_that_diverges_gives_no_numbers():
    wild = replace(QUICK, learning_rate=1e30)
    with pytest.raises(ValueError, match="`training` must come to finite weights, but"):
        structure_function(network, classes(), [1.0], training=wild)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_classes_of_any_integer_type_are_the_same(dtype):
    x, y = classes()
    found = structure_function(network, (x, y.to(dtype)), [1.0], training=QUICK)
    assert found == structure_function(network, (x, y), [1.0], training=QUICK)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, y: (x[:, :3], y), r"inputs that the network takes, got torch.float32 \[60, 3\]"),
        (lambda x, y: (x.double(), y), r"inputs that the network takes, got torch.float64"),
        (lambda x, y: (x, y * 0 - 100), "a label that counts, got none"),
    ],
    ids=["shape", "dtype", "ignored"],
)
def test_refuses_data_by_name(change, match):
    with pytest.raises(ValueError, match=f"`data` must hold {match}"):
        structure_function(network, change(*classes()), [1.0], training=QUICK)
