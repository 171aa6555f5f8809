"""All commands on a LightningModule and a DataModule of a user's own file, beside the functions they call."""

import json
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_taskinfo import (
    FineTuning,
    Prior,
    Task2Vec,
    TransferReport,
    certify,
    rank_starts,
    structure_function,
    task_distance,
)
from lightning_taskinfo.cli import COMMANDS, main
from lightning_taskinfo.cli._own import Network, _loader
from lightning_taskinfo.tasks import Training
from lightning_taskinfo.transfer import StartRanking, transfer
from tests.cli.conftest import FILE

QUICK = ["--training.pretrain_steps=2", "--training.steps=3"]
NET = ["--model=mine.Net", "--model.width=6"]
SHIFTED = "--tasks={shifted: {class_path: mine.Data, init_args: {shift: 2}}}"


def loaded(data, part="train"):
    data.setup("fit" if part == "train" else part)
    return getattr(data, f"{part}_dataloader")()


def tensors(data, samples):
    """The samples that tasks are made of, in their order."""
    x, y = loaded(data).dataset.tensors
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:samples]
    return x[order], y[order]


CERTIFY = [
    "certify",
    "--model=mine.Net",
    "--checkpoint=trained.ckpt",
    "--draws=20",
    "--betas=[0.1,1]",
]
CERTIFY += ["--structure=diagonal", "--prior.center=start.ckpt", "--prior.origin=random"]
OTHERS = ["--unlabelled=predict", "--held_out=test"]


def test_certify(mine, trained):
    """The network's arguments come from the checkpoint, the preparation of inputs from the data module."""
    assert main([*CERTIFY, "--data=mine.Data", "--data.shift=0.1", *OTHERS]) == 0
    data = mine.Data(shift=0.1)
    expected = certify(
        trained,
        loaded(data),
        Prior("start.ckpt", origin="random"),
        unlabelled=loaded(data, "predict"),
        held_out=loaded(data, "test"),
        structure="diagonal",
        draws=20,
        betas=[0.1, 1],
    )
    with open("certificate.json") as file:
        written = json.load(file)
    assert expected.valid
    assert written["bound"] == expected.bound
    assert written["network"]["bound"] == expected.network.bound
    assert written["test_set"]["bound"] == expected.test_set.bound
    assert written["arguments"] == {"width": 6, "rate": 0.5}
    assert written["model_risk"] == pytest.approx(
        (trained(loaded(data).dataset.tensors[0]).argmax(1) != loaded(data).dataset.tensors[1])
        .float()
        .mean()
        .item()
    )


def test_rank(mine, trained):
    words = ["rank", *NET, "--starts={trained: trained.ckpt, start: start.ckpt}", "--labels=60"]
    words += ["--data=mine.Data", "--data.shift=0.1", "--fine_tune.steps=3", "--seed=1"]
    assert main(words) == 0
    samples = loaded(mine.Data(shift=0.1)).dataset
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))[:60].tolist()
    start = mine.Net.load_from_checkpoint("start.ckpt", weights_only=True).cpu()
    models = {"trained": trained, "start": start, "scratch": lambda: mine.Net(6)}
    expected = rank_starts(
        models, DataLoader(Subset(samples, order), 60), scratch="scratch", fine_tune=FineTuning(3)
    )
    ranking = StartRanking.load("ranking.json")
    for start in expected.starts:
        assert ranking[start.name].missed == pytest.approx(start.missed)
        assert ranking[start.name].fine_tuned == pytest.approx(start.fine_tuned)
        assert ranking[start.name].call == start.call


def test_embed(mine, trained):
    words = ["embed", "--model=mine.Net", "--checkpoint=trained.ckpt", "--data=mine.Data", SHIFTED]
    assert main([*words, "--max_samples=20", "--weight_decay=0.1"]) == 0
    embedder = Task2Vec(trained, max_samples=20, weight_decay=0.1)
    with open("embeddings/embeddings.json") as file:
        rows = json.load(file)["tasks"]
    assert [row["task"] for row in rows] == ["shifted", "Data"]
    for row, shift in zip(rows, (2, 0), strict=True):
        data = mine.Data(shift=shift)
        expected = embedder.embed(loaded(data), name="x", test=loaded(data, "test"))
        with open(f"embeddings/task_{row['task']}.json") as file:
            kept = torch.tensor(json.load(file)["vector"], dtype=torch.float64)
        torch.testing.assert_close(kept, expected.vector)
        assert row["test_error"] == pytest.approx(expected.test_error)


def test_embed_without_test_samples(mine, tmp_path):
    assert main(["embed", *NET, "--data=mine.Untested", "--max_samples=20"]) == 0
    written = {path.name for path in (tmp_path / "embeddings").iterdir()}
    assert written == {"embeddings.json", "task_Untested.json", "task_map.png"}


@pytest.mark.parametrize("checkpoint", [[], ["--checkpoint=trained.ckpt"]], ids=["fresh", "kept"])
def test_complexity(mine, trained, checkpoint):
    words = ["complexity", *NET, "--data=mine.Data", *checkpoint, "--max_samples=40"]
    assert main([*words, "--betas=[1]", "--seed=0", *QUICK]) == 0
    expected = structure_function(
        (lambda: trained) if checkpoint else (lambda: mine.Net(6)),
        tensors(mine.Data(), 40),
        [1],
        training=Training(pretrain_steps=2, steps=3),
    )
    with open("complexity/complexity.json") as file:
        (written,) = json.load(file)
    assert written["name"] == "Data"
    assert written["kl"] == pytest.approx(expected.kl)
    assert written["loss"] == pytest.approx(expected.loss)


class Trunk(nn.Module):
    """The user's network without its last layer."""

    def __init__(self, net):
        super().__init__()
        self.net = nn.Sequential(*net.net[:-1])

    def forward(self, x):
        return self.net(x)


def test_distance(mine):
    words = ["distance", *NET, "--checkpoint=trained.ckpt", "--data=mine.Data", SHIFTED, *QUICK]
    assert main([*words, "--max_samples=40", "--seeds=1", "--workers=0"]) == 0
    tasks = {
        "shifted": tensors(mine.Data(shift=2), 40),
        "Data": tensors(mine.Data(), 40),
    }

    def trunk():
        return Trunk(mine.Net.load_from_checkpoint("trained.ckpt", weights_only=True).cpu())

    expected = task_distance(
        tasks, 0.1, trunk_fn=trunk, seeds=1, training=Training(pretrain_steps=2, steps=3)
    )
    with open("distance/distance.json") as file:
        written = json.load(file)
    torch.testing.assert_close(torch.tensor(written["mean"]).double(), expected.mean)


def test_transfer(mine, trained):
    words = [
        "transfer",
        *NET,
        "--data=mine.Data",
        "--data.batch_size=8",
        "--starts.kept=trained.ckpt",
    ]
    words += ["--labels=30", "--seeds=2", "--trainer.max_steps=3", "--workers=0", "--folder=out"]
    assert main(words) == 0
    expected = transfer(
        lambda: mine.Net(6),
        mine.Data(batch_size=8),
        starts={"kept": trained.state_dict()},
        labels=30,
        seeds=2,
        trainer={"max_steps": 3},
    )
    report = TransferReport.load("out/report/report.json")
    found, wanted = (
        {(r.method, r.labels, r.seed): r.test for r in one.results} for one in (report, expected)
    )
    assert found == wanted
    assert {method for method, _, _ in found} == {"scratch", "kept"}


@pytest.mark.slow
def test_workers_import_the_users_file(mine):
    """Processes are the point here: each finds the network of the current folder."""
    words = ["distance", *NET, "--data=mine.Data", *QUICK, "--max_samples=40", "--seeds=1"]
    before = sys.path.copy()
    assert main([*words, "--workers=2"]) == 0
    assert sys.path == before


def test_modules_of_the_other_namespace(mine, tmp_path):
    text = FILE.read_text().replace(
        "import pytorch_lightning as pl", "import lightning.pytorch as pl"
    )
    (tmp_path / "other.py").write_text(text)
    words = ["transfer", "--model=other.Net", "--model.width=6", "--data=other.Data", "--labels=30"]
    words += ["--starts.kept=trained.ckpt", "--seeds=1", "--trainer.max_steps=1", "--workers=0"]
    assert main(words) == 0


def test_a_configuration_file_may_hold_all_but_the_names_of_classes(mine, tmp_path):
    (tmp_path / "rank.yaml").write_text(
        "model: {width: 6}\ndata: {shift: 0.1}\nstarts: {kept: trained.ckpt}\nlabels: 60\n"
    )
    words = ["rank", "--model=mine.Net", "--data=mine.Data", "--config=rank.yaml"]
    assert main([*words, "--out=file.json"]) == 0
    words = ["rank", *NET, "--data=mine.Data", "--data.shift=0.1", "--starts.kept=trained.ckpt"]
    assert main([*words, "--labels=60", "--out=words.json"]) == 0
    one, two = (StartRanking.load(tmp_path / name) for name in ("file.json", "words.json"))
    assert one["kept"].missed == two["kept"].missed


def test_a_function_without_annotations_makes_a_network_too(mine):
    assert main(["complexity", "--model=mine.untyped", "--model.width=5", "--data=mine.Data", *QUICK,
                 "--betas=[1]", "--max_samples=40"]) == 0  # fmt: skip


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "phase-diagram"])
def test_help_shows_the_users_own_arguments(mine, capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--model", "mine.Net", "--data=mine.Data", "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--model mine.Net: --model.width WIDTH Hidden units. (required, type: int)" in shown
    assert "--model.rate RATE Learning rate. (type: float, default: 0.5)" in shown
    assert "--data.shift SHIFT Added to all inputs: another way to prepare them." in shown


RANK = ["rank", "--starts.kept=trained.ckpt", "--labels=60"]
DATA = "--data=mine.Data"
FIT = "must be made from its arguments, but mine."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*RANK, DATA], "the following arguments are required: model"),
        ([*RANK, DATA, "--model=mine.Net"], "the following arguments are required: model.width"),
        ([*RANK, DATA, *NET, "--model.depth=2"], "unrecognized arguments: --model.depth=2"),
        ([*RANK, DATA, *NET, "--model.width=a"], 'Parser key "model.width": Expected a <class \'int\'>.'),
        ([*RANK, DATA, *NET, "--model.width=-1"], f"`model` {FIT}Net failed (RuntimeError:"),
        ([*RANK, DATA, *NET, "--model.width=5"], "`starts` must hold the weights of the model, got trained"),
        ([*RANK, DATA, "--model=mine.number"], "`model` must make a Module, got int from mine.number."),
        ([*RANK, DATA, "--model=mine.failing"], f"`model` {FIT}failing failed (KeyError: 'weights')."),
        ([*RANK, DATA, "--model=mine.none"], "`model` must be the import path of a class or function, got 'mi"),
        ([*RANK, DATA, "--model=mine.FILE"], "`model` must be the import path of a class or function, got 'mi"),
        ([*RANK, DATA, "--model=Net"], "`model` must be the import path of a class or function, got 'Net' (no"),
        ([*RANK, DATA, "--model=gone.Net"], "`model` must be the import path of a class or function, got 'gon"),
        ([*RANK, DATA, "--model=broken.Net"], "`model` must be the import path of a class or function, got 'br"),
        ([*RANK, *NET, "--data=mine.none"], "`data` must be the import path of a class or function, got 'min"),
        ([*RANK, *NET, "--data=gone.Data"], "A dataset must be digits or letters or name a file; 'gone.Data' wa"),
        ([*RANK, *NET, DATA, "--data.size=3"], "unrecognized arguments: --data.size=3"),
        ([*RANK, *NET, "--data=mine.Broken"], "`data` must have a train_dataloader, but Broken's failed (KeyErr"),
        ([*RANK, *NET, "--data=mine.Moved"], "`data` must leave on_after_batch_transfer to the module or to the datas"),
        ([*RANK, *NET, "--data=mine.Net", "--data.width=3"], "`data` must make a DataModule, got Net from mine.Net."),
        ([*CERTIFY, DATA, "--part=val"], "`data` must have a val_dataloader, but Data's failed ("),
        ([*CERTIFY, "--data=digits", "--part=val"], "`data` must be a data module to have a part 'val', got 'd"),
        ([*CERTIFY, DATA, "--prior.center=other.ckpt"], "`center` must hold `net.0.weight` with shape (6, 4), got"),
        ([*CERTIFY, DATA, "--prior.center=gone.ckpt"], "`center` must be the file of a Lightning checkpoint or"),
        ([*CERTIFY, DATA, "--checkpoint=other.ckpt"], "`checkpoint` must hold the weights of the model, got o"),
        ([*CERTIFY, "--data=mine.UsedInputs", *OTHERS], "`unlabelled` must be inputs that nothing else was don"),
        ([*CERTIFY, "--data=mine.FewInputs", *OTHERS], "`unlabelled` must hold at least"),
        ([*CERTIFY, DATA, "--known_error=0.9"], "`known_error` must be near the network's error on these sampl"),
        ([*CERTIFY, DATA, "--known_error=1.5"], "`known_error` must be in [0, 1], got 1.5."),
        (["transfer", *NET, DATA, "--workers=0"], "`starts` must be given with `model`, got None."),
        (["transfer", DATA, "--starts.a=a.ckpt"], "`model` must be given with `starts`, got None."),
        (["distance", DATA, "--tasks+=mine.Data"], "`tasks` must have different names, got ['Data', 'Data'];"),
        (["embed", "--tasks={a: {class_path: mine.Dat}}"], "`tasks` must be the import path of a class or function, g"),
        (["embed", "--tasks=[mine.Dat]"], "`tasks` must be the import path of a class or function, got 'mine.Dat' (mo"),
        (["embed", "--tasks={a: {class_path: mine.Net}}"], f"`tasks` {FIT}Net failed (ArgumentError: "),
        (["distance", DATA, *NET, "--head=gone"], "`head` must name a module of the network, got 'gone'"),
    ],
)  # fmt: skip
def test_bad_input_ends_with_2_and_one_sentence_and_writes_nothing(
    mine, capsys, words, message, tmp_path
):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    other = mine.Net(7)
    torch.save(
        {"state_dict": other.state_dict(), "hyper_parameters": {"width": 6}},
        tmp_path / "other.ckpt",
    )
    before = {path.name for path in tmp_path.iterdir()}
    assert main(words) == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"taskinfo: error: {message}")
    assert len(written.err.splitlines()) == 1
    assert not written.out
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before - {"__pycache__"}


def test_every_network_is_made_anew_with_the_modules_in_it(mine):
    spec = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 6}}
    make = Network(mine.Nested, {"first": spec, "width": 6})
    torch.manual_seed(0)
    one = make()
    two = make()
    torch.manual_seed(0)
    again = make()
    assert one.net[0] is not two.net[0]
    assert not torch.equal(one.net[0].weight, two.net[0].weight)
    assert torch.equal(one.net[0].weight, again.net[0].weight)


def test_a_network_can_be_sent_to_another_process():
    from tests.cli.user_file import Net

    make = pickle.loads(pickle.dumps(Network(Net, {"width": 3})))
    assert make().net[0].out_features == 3


def test_parts_that_a_data_module_splits_at_random_do_not_overlap(mine):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    parts = [_loader(mine.Split(), part).dataset for part in ("train", "test")]
    assert torch.equal(torch.rand(1), expected)
    assert not {*parts[0].indices} & {*parts[1].indices}
