"""Task2Vec against a loop over samples and classes, its properties, and how it finds the head."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Generator, nn

from lightning_taskinfo import Task2Vec
from lightning_taskinfo.data import ArrayData
from lightning_taskinfo.tasks import task2vec
from lightning_taskinfo.tasks.ready import fit_linear_head
from lightning_taskinfo.tasks.task2vec import fingerprint


def conv_network(dtype=torch.float64):
    """A small network of each kind of filter: convolution, transposed convolution in groups, matrix."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Tanh(),
        nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Tanh(),
        nn.Flatten(), nn.Linear(6 * 16, 5), nn.Tanh(), nn.Linear(5, 7),
    ).to(dtype)  # fmt: skip


def task(n=24, classes=3, dtype=torch.float64, seed=0):
    g = Generator().manual_seed(seed)
    x = torch.randn(n, 1, 8, 8, generator=g, dtype=dtype)
    score = x.flatten(1)[:, : 2 * classes].unflatten(1, (classes, 2)).sum(2)
    return x, score.argmax(1)


def looped_embedding(model, weights, inputs):
    """Sum p(c|x) times the squared gradient, one sample and one class at a time; then average filter by filter."""
    parameters = dict(model.named_parameters())
    totals = {name: torch.zeros_like(parameters[name]) for name in weights}
    for x in inputs:
        log_p = model(x[None]).log_softmax(-1)[0]
        for c in range(len(log_p)):
            grads = torch.autograd.grad(
                log_p[c], [parameters[name] for name in weights], retain_graph=True
            )
            for name, g in zip(weights, grads, strict=True):
                totals[name] += log_p[c].exp().detach() * g.square() / len(inputs)
    conv, transposed, matrix = totals.values()
    entries = [conv[f].mean() for f in range(4)]
    entries += [transposed[f].mean() for f in range(4)]
    entries += [matrix[f].mean() for f in range(5)]
    return torch.stack(entries)


@pytest.fixture(scope="module")
def embedder():
    return Task2Vec(conv_network(), weight_decay=0.1)


@pytest.mark.parametrize("batch", [512, 10])
def test_equals_a_loop_over_samples_and_classes(embedder, batch, monkeypatch):
    """In one batch, and in three of which the last is smaller."""
    monkeypatch.setattr(task2vec, "BATCH", batch)
    x, y = task()
    embedding = embedder.embed((x, y), name="three")
    weights = ["0.weight", "3.weight", "6.weight"]
    assert embedding.layers == tuple(weights)
    assert embedding.sizes == (4, 4, 5)
    expected = looped_embedding(embedder.network.requires_grad_(True), weights, x)
    embedder.network.requires_grad_(False)
    for name in weights:
        embedder.network.get_parameter(name).requires_grad_(True)
    torch.testing.assert_close(embedding.vector, expected, rtol=1e-9, atol=0)


def test_sampled_labels_agree_with_exact_ones_within_their_error():
    x, y = task(n=40)
    exact = Task2Vec(conv_network(), weight_decay=0.1).embed((x, y), name="a").vector
    draws = torch.stack(
        [
            Task2Vec(conv_network(), weight_decay=0.1, labels="sampled", mc_samples=20, seed=s)
            .embed((x, y), name="a")
            .vector
            for s in range(8)
        ]
    )
    error = draws.std(0) / 8**0.5
    assert (
        (draws.mean(0) - exact) / error
    ).abs().max() < 5  # thirteen entries, Student's t with 7 degrees of freedom
    assert (error < 0.2 * exact).all()


def test_the_head_is_the_logistic_regression_of_scikit_learn():
    g = Generator().manual_seed(0)
    features = (
        torch.randn(200, 5, generator=g, dtype=torch.float64) * torch.tensor([1.0, 5, 0.1, 1, 1])
        + 3
    )
    features[:, 4] = 2.0  # never varies
    labels = (features[:, 0] + torch.randn(200, generator=g, dtype=torch.float64)).gt(3).long() + (
        features[:, 1] > 6
    )
    head = fit_linear_head(features, labels, weight_decay=0.02)
    z = ((features - features.mean(0)) / features.std(0, correction=0).clamp(min=1e-9)).numpy()
    peer = LogisticRegression(C=1 / (0.02 * 200), tol=1e-12, max_iter=10_000).fit(z, labels.numpy())
    torch.testing.assert_close(
        head(features).softmax(-1).detach(),
        torch.from_numpy(peer.predict_proba(z)),
        rtol=0,
        atol=1e-6,
    )


def test_the_order_of_samples_and_the_names_of_classes_do_not_matter(embedder):
    x, y = task(n=60)
    order = torch.randperm(60, generator=Generator().manual_seed(1))
    renamed = torch.tensor([40, 7, 11])[y]  # another order, and gaps
    first = embedder.embed((x, y), name="a")
    second = embedder.embed((x[order], renamed[order]), name="b")
    assert second.num_classes == 3
    torch.testing.assert_close(second.vector, first.vector, rtol=1e-6, atol=0)


def test_labels_matter(embedder):
    x, y = task(n=60)
    first, second = (embedder.embed((x, labels), name="a").vector for labels in (y, y % 2))
    assert (first / second - 1).abs().max() > 0.1


def test_the_norm_grows_with_the_overlap_of_two_classes():
    """A controlled family: two Gaussian classes on a line, ever nearer to each other, seen by a fixed network."""
    torch.manual_seed(0)
    embedder = Task2Vec(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
    g = Generator().manual_seed(0)
    y, noise = torch.arange(400) % 2, torch.randn(400, 2, generator=g)
    tasks = [noise + gap * (2 * y[:, None] - 1) for gap in (3.0, 2.0, 1.5, 1.0)]
    embeddings = [embedder.embed((x, y), name="gap", test=(x, y)) for x in tasks]
    norms, errors = [e.norm for e in embeddings], [e.test_error for e in embeddings]
    assert norms == sorted(norms)
    assert errors == sorted(errors)
    assert norms[-1] > 3 * norms[0]


def test_the_network_stays_as_it_was():
    network = conv_network(torch.float32).train()
    network[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    Task2Vec(network).embed(task(dtype=torch.float32), name="a")
    assert torch.equal(torch.get_rng_state(), state)
    assert network.training
    assert [p.requires_grad for p in network.parameters()] == [False] + [True] * 9
    assert all(p.grad is None for p in network.parameters())
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name


class Named(nn.Module):
    """The head is not the last linear layer in the order of the attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.classifier, self.body = nn.Linear(5, 4), nn.Linear(64, 5)

    def forward(self, x):
        return self.classifier(self.body(x.flatten(1)).tanh())


def test_the_head_is_found_by_name_or_is_the_last_linear_layer():
    assert Task2Vec(Named(), head="classifier").embed(
        task(dtype=torch.float32), name="a"
    ).layers == ("body.weight",)
    assert Task2Vec(conv_network()).head == "8"


@pytest.mark.parametrize("classes", [2, 5])
def test_refuses_a_head_whose_outputs_are_not_the_logits(classes):
    """The last linear layer by name is the body here; with five classes the shapes would fit."""
    network = Named()
    network.classifier = nn.Linear(5, 5)
    with pytest.raises(
        ValueError, match=r"`head` must be the last layer, whose outputs .* '2\.body' is not"
    ):
        Task2Vec(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), network), head="2.body").embed(
            task(n=60, classes=classes, dtype=torch.float32), name="a"
        )


def test_log_probabilities_are_logits_too():
    """A layer behind the head that shifts all logits of a sample changes nothing."""
    plain, shifted = conv_network(), nn.Sequential(*conv_network(), nn.LogSoftmax(-1))
    first, second = (Task2Vec(net).embed(task(n=60), name="a") for net in (plain, shifted))
    torch.testing.assert_close(first.vector, second.vector)


def test_a_whole_module_may_be_the_head():
    network = conv_network()
    network = nn.ModuleDict({"trunk": network[:6], "mlp": network[6:]})
    net = nn.Sequential()
    net.add_module("trunk", network["trunk"])
    net.add_module("mlp", network["mlp"])
    embedding = Task2Vec(net, head="mlp").embed(task(), name="a")
    assert embedding.layers == ("trunk.0.weight", "trunk.3.weight")


def test_at_most_so_many_samples_are_measured_but_all_are_fitted():
    x, y = task(n=64)
    few = Task2Vec(conv_network(), weight_decay=0.1, max_samples=16)
    embedding = few.embed((x, y), name="a")
    assert embedding.samples == 16
    everything = Task2Vec(conv_network(), weight_decay=0.1)
    everything.embed((x, y), name="a")
    torch.testing.assert_close(few.network[8].weight, everything.network[8].weight)
    assert not torch.equal(
        few._pick(64), Task2Vec(conv_network(), max_samples=16, seed=1)._pick(64)
    )


def test_test_error_counts_a_class_that_was_not_fitted_as_wrong(embedder):
    x, y = task(n=40)
    assert np.isnan(embedder.embed((x, y), name="a").test_error)
    embedding = embedder.embed((x, y), name="a", test=(x[:10], torch.full((10,), 9)))
    assert embedding.test_error == 1.0
    with torch.no_grad():
        answers = embedder.network(x).argmax(1)
    assert embedder.embed((x, y + 5), name="a", test=(x, answers + 5)).test_error == 0.0


def test_array_data_brings_its_name_and_its_test_split():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    labels = (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).astype(np.int64)
    data = ArrayData(
        images[:30], labels[:30], images[30:], labels[30:], name="halves", num_classes=2
    )
    embedding = Task2Vec(conv_network(torch.float32)).embed(data)
    assert (embedding.name, embedding.samples, embedding.num_classes) == ("halves", 30, 2)
    assert 0 <= embedding.test_error <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": "empirical"}, "`labels` must be 'exact' or 'sampled', got 'empirical'"),
        ({"mc_samples": 0}, "`mc_samples` must be at least 1, got 0"),
        ({"max_samples": 0}, "`max_samples` must be at least 1, got 0"),
        ({"weight_decay": 0.0}, "`weight_decay` must be positive, got 0.0"),
        ({"head": "fc"}, "`head` must name a module of the network, got 'fc'; there are"),
        ({"head": ""}, "`head` must name a module of the network, got ''; there are"),
    ],
)
def test_refuses_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Task2Vec(conv_network(), **arguments)


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3)), {}, "`head` must name the network's last layer"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
            {},
            "`network` must have a weight with filters beside its head",
        ),
        (
            conv_network(),
            {"head": "6.weight"},
            "`head` must name a module of the network, got '6.weight'",
        ),
    ],
)
def test_refuses_networks(network, arguments, message):
    with pytest.raises(ValueError, match=message):
        Task2Vec(network, **arguments)


@pytest.mark.parametrize(
    ("labels", "name", "message"),
    [
        (torch.zeros(24).long(), "a", "`data` must hold at least two classes, got 1"),
        (
            torch.zeros(24),
            "a",
            r"`data` must have class indices as labels, \[N\], got torch.float32 \[24\]",
        ),
        (
            torch.zeros(24, 2).long(),
            "a",
            r"`data` must have class indices as labels, \[N\], got torch.int64 \[24, 2\]",
        ),
        (torch.arange(24) % 2, None, "`name` must be given for data without a name of its own"),
    ],
)
def test_refuses_data(embedder, labels, name, message):
    with pytest.raises(ValueError, match=message):
        embedder.embed((task()[0], labels), name=name)


@pytest.mark.parametrize("argument", ["data", "test"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * torch.nan, "must be finite, got 1536 values that are not"),
        (
            lambda x: x.byte(),
            r"must hold inputs that the network takes, got torch\.uint8 \[24, 1, 8, 8\] \(",
        ),
        (
            lambda x: x.expand(-1, 3, -1, -1),
            r"must hold inputs that the network takes, got .* \[24, 3, 8, 8\] \(.*channels",
        ),
    ],
    ids=["nan", "bytes", "channels"],
)
def test_refuses_inputs(embedder, argument, change, message):
    x, y = task()
    with pytest.raises(ValueError, match=f"`{argument}` {message}"):
        embedder.embed(**{"data": (x, y), "name": "a", argument: (change(x), y)})


@pytest.mark.parametrize("argument", ["data", "test"])
def test_refuses_a_name_in_place_of_data(embedder, argument):
    message = rf"`{argument}` must be \(inputs, targets\), .* got 'digits'; `tasks.prepare_task\('digits'\)"
    with pytest.raises(ValueError, match=message):
        embedder.embed(**{"data": task(), "name": "a", argument: "digits"})


@pytest.mark.parametrize("head", ["0", "8"])
def test_refuses_a_head_that_does_not_get_one_row_a_sample(head):
    network = conv_network()
    if head == "8":
        network[8] = nn.Linear(5, 5).double()
        network.append(network[8])  # runs twice
    with pytest.raises(
        ValueError, match=rf"`head` must run once a pass, on one tensor \[N, D\], .*; '{head}' got"
    ):
        Task2Vec(network, head=head).embed(task(), name="a")


def test_inputs_of_any_structure_and_a_model_with_logits():
    from tests.callbacks.hugging_face import Sentences, bert_classifier

    torch.manual_seed(0)
    network, fields = bert_classifier(), Sentences("BERT classifier", 24).fields
    labels = fields.pop("labels")
    found = Task2Vec(network).embed((fields, labels), name="sentences")

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = network

        def forward(self, both):
            return self.bert(input_ids=both[:, 0], attention_mask=both[:, 1]).logits

    stacked = torch.stack([fields["input_ids"], fields["attention_mask"]], 1)
    expected = Task2Vec(Stacked()).embed((stacked, labels), name="sentences")
    torch.testing.assert_close(found.vector, expected.vector)
    told = Task2Vec(network, forward_fn=lambda model, inputs: model(**inputs)).embed(
        (fields, labels), name="sentences"
    )
    torch.testing.assert_close(told.vector, expected.vector)


def test_batch_fn_picks_inputs_and_labels_out_of_a_batch():
    x, y = task()
    test_x, test_y = task(seed=1)
    plain = Task2Vec(conv_network()).embed((x, y), name="task", test=(test_x, test_y))
    named = Task2Vec(conv_network(), batch_fn=lambda batch: (batch["image"], batch["kind"]))
    other = named.embed(
        {"image": x, "kind": y}, name="task", test={"image": test_x, "kind": test_y}
    )
    assert torch.equal(other.vector, plain.vector)
    assert other.test_error == plain.test_error


def test_the_fingerprint_is_of_weights_and_buffers_outside_the_head():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    first = fingerprint(net, "2")
    net[2].weight.data += 1
    assert fingerprint(net, "2") == first
    net[1].running_mean += 1
    second = fingerprint(net, "2")
    net[0].weight.data[0, 0] += 1
    assert len({first, second, fingerprint(net, "2")}) == 3


def test_samples_without_a_label_do_not_count(embedder):
    x, y = task(n=40)
    labels = torch.where(torch.arange(40) < 10, -100, y)
    found = embedder.embed((x, labels), name="a", test=(x, labels))
    expected = embedder.embed((x[10:], y[10:]), name="a", test=(x[10:], y[10:]))
    assert (found.num_classes, found.samples, found.test_error) == (3, 30, expected.test_error)
    torch.testing.assert_close(found.vector, expected.vector, rtol=1e-9, atol=0)


@pytest.mark.parametrize("argument", ["data", "test"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y - 1, "must have classes from 0 on, or -100 for none, as labels, got -1"),
        (lambda y: y[:, None], r"must have class indices as labels, \[N\], got .*\[24, 1\]"),
        (lambda y: y.double(), r"must have class indices as labels, \[N\], got torch.float64"),
        (lambda y: 0 * y - 100, "must hold a label that counts, got none"),
    ],
    ids=["negative", "column", "float", "ignored"],
)
def test_refuses_labels(embedder, argument, change, message):
    x, y = task()
    with pytest.raises(ValueError, match=f"`{argument}` {message}"):
        embedder.embed(**{"data": (x, y), "name": "a", "test": (x, y), argument: (x, change(y))})
