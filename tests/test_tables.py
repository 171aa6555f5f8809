"""Results print themselves: a table of their numbers, one sentence of reading, and a picture."""

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from lightning_taskinfo import Prior, certify
from lightning_taskinfo._tables import text_table
from lightning_taskinfo.tasks import DistanceMatrix, StructureFunction, TaskEmbedding
from lightning_taskinfo.transfer import FeatureOverlap

BETAS = (10.0, 1.0, 0.1)
CURVE = StructureFunction(
    betas=BETAS, kl=(0.0, 40.0, 90.0), loss=(230.0, 120.0, 20.0), loss_error=(1.0, 1.0, 1.0),
    prior_loss=235.0, prior_loss_error=1.0, samples=100, label_entropy=math.log(10), name="digits",
)  # fmt: skip
EMBEDDING = TaskEmbedding(
    "sign", torch.tensor([1.0, 2.0, 9.0], dtype=torch.float64), ("0.weight", "2.weight"), (2, 1), "probe", "exact",
    samples=60, num_classes=2, test_error=0.125,
)  # fmt: skip


def matrix(seeds=2):
    distances = torch.tensor([[[0.0, 5.0, 30.0], [7.0, 0.0, 40.0], [50.0, 60.0, 0.0]]]).double()
    distances = torch.cat([distances + 2 * seed for seed in range(seeds)])
    alone = torch.full((seeds, 3), 100.0, dtype=torch.float64)
    return DistanceMatrix(
        ("a", "b", "c"), 1.0, (9, 9, 9), tuple(range(seeds)), distances, alone
    )  # fmt: skip


@pytest.fixture(scope="module")
def certificate():
    model = torch.nn.Linear(2, 2)
    prior = Prior.of(model, origin="random initialisation")
    model.bias.data += torch.tensor([1.0, -1.0])  # what training would do
    data = torch.randn(100, 2), torch.zeros(100, dtype=torch.long)
    return certify(model, data, prior, draws=10, progress=False)


def test_a_structure_function_shows_every_beta_and_its_two_numbers():
    lines = str(CURVE).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["β", "10", "1", "0.1"]
    assert lines[2].split() == ["1", "40.0", "120.0", "±", "1.0", "1.200"]
    # 120 + 1 · 40 = 160 and 20 + 1 · 90 = 110 nats: the least of all points is the code length
    assert "has 110 nats, the labels alone 230." in lines[-1]
    assert f"less than {CURVE.critical_beta():.3g} nats" in lines[-1]


def test_a_structure_function_says_less_where_less_is_known():
    assert (
        "costs less"
        not in replace(CURVE, betas=(1.0,), kl=(40.0,), loss=(120.0,), loss_error=(1.0,)).reading()
    )
    assert "labels alone" not in replace(CURVE, label_entropy=None).reading()


def test_a_distance_matrix_shows_all_pairs_and_names_the_nearest():
    lines = str(matrix()).splitlines()
    assert lines[2].split("  ")[0] == "b"
    assert lines[2].endswith("8 ± 1   1 ± 1  41 ± 1")
    assert lines[-1].endswith("knows a needs the fewest further nats for b: 6 ± 1.")


def test_a_distance_matrix_of_one_seed_has_no_errors():
    assert "±" not in str(matrix(seeds=1))
    assert "nan" not in str(matrix(seeds=1))


def test_an_embedding_shows_its_layers_and_names_the_largest():
    lines = str(EMBEDDING).splitlines()
    assert lines[1].split() == ["0.weight", "2", "3"]
    assert (
        lines[-1]
        == "sign depends most on 2.weight, with 75% of the norm 12. Its head has a test error of 12.5%."
    )
    _, ax = EMBEDDING.plot()
    assert [bar.get_width() for bar in ax.patches] == [3.0, 9.0]


def test_a_certificate_draws_bounds_above_errors(certificate):
    _, ax = certificate.plot()
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [certificate.bound, certificate.risk, certificate.model_risk]
    assert certificate.reading() in str(certificate)
    assert ax.get_title() == ""
    assert replace(certificate, valid=False, reasons=("no",)).plot()[1].get_title() == "not valid"


OVERLAP = FeatureOverlap(("body", "head"), torch.tensor([0.5, 0.2]), torch.tensor([0.1, 0.05]), 60)


def test_an_overlap_shows_every_layer_and_names_the_one_that_misses_least():
    lines = str(OVERLAP).splitlines()
    assert lines[1].split() == ["body", "0.500", "0.100"]
    assert (
        "of head miss the least: 20.0 % of the labels' variance (standard error 5.0)" in lines[-1]
    )


@pytest.mark.parametrize("result", [CURVE, EMBEDDING, matrix(), OVERLAP], ids=type)
def test_all_that_a_result_holds_is_written_as_json(result):
    written = json.loads(result.to_json())
    for name, value in vars(result).items():
        plain = value.tolist() if isinstance(value, torch.Tensor) else value
        assert written[name] == json.loads(json.dumps(plain)), name


@pytest.mark.parametrize("result", [CURVE, EMBEDDING, matrix(), OVERLAP], ids=type)
def test_a_notebook_shows_the_text_that_is_printed(result):
    shown = ElementTree.fromstring(result._repr_html_())
    assert (shown.tag, shown.text) == ("pre", str(result))


def test_tables_align():
    assert text_table(["a", "b"], [["x", "1"], ["long", "12.5"]]).splitlines() == [
        "a        b",
        "x        1",
        "long  12.5",
    ]
