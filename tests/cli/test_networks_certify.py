"""``taskinfo certify`` on a small trained network: the certificate of the function, from files, or a clear no."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo import TaskInfoWarning, cli
from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.data import ArrayData, save_npz

SOURCE = """
import pytorch_lightning as pl
from torch import nn

def net(width: int = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

class Module(pl.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.save_hyperparameters()
        self.inner = net(width)

    def forward(self, x):
        return self.inner(x)
"""
QUICK = ["--draws=20", "--betas=[0.1,1]", "--structure=diagonal"]


def images(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three classes of 2×2 images, each brighter than the one before."""
    g = np.random.default_rng(seed)
    labels = g.integers(3, size=n)
    values = g.integers(100, size=(n, 1, 2, 2)) + 70 * labels[:, None, None, None]
    return values.astype(np.uint8), labels


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A module ``small_nets``, data of three classes, and a network trained on them from a known start."""
    made = tmp_path_factory.mktemp("trained")
    (made / "small_nets.py").write_text(SOURCE)
    data = ArrayData(*images(200, 0), *images(20, 1), name="squares", num_classes=3)
    save_npz(made / "squares.npz", data)
    torch.manual_seed(0)
    model = network()
    torch.save(model.state_dict(), made / "start.pt")
    x, y = data.train().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    fit(model, x, y, optimizer, steps=60)
    torch.save(model.state_dict(), made / "trained.pt")
    return made


def fit(model, x, y, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """What was trained, in a folder of this test's own."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "small_nets", raising=False)
    return tmp_path


def run(*arguments: str, model: str = "small_nets.net", checkpoint: str = "trained.pt") -> int:
    given = [f"--model={model}", f"--checkpoint={checkpoint}", "--data=squares.npz", *QUICK]
    width = ["--model.width=6"] if model == "small_nets.net" else []
    return cli.main(["certify", *given, *width, *arguments])


PRIOR = ("--prior.center=start.pt", "--prior.origin=random initialisation, seed 0")


def expected(folder, structure="diagonal", **options):
    """The certificate of the function, on tensors prepared by hand."""
    start, trained = network(), network()
    start.load_state_dict(torch.load(folder / "start.pt"))
    trained.load_state_dict(torch.load(folder / "trained.pt"))
    x, y = images(200, 0)
    samples = torch.from_numpy(x).float() / 255, torch.from_numpy(y)
    prior = Prior(start, origin="random initialisation, seed 0")
    return certify(
        trained, samples, prior, structure=structure, draws=20, betas=(0.1, 1.0), **options
    )


def test_prints_and_writes_the_certificate_of_the_function(folder, capsys):
    assert run(*PRIOR, "--out=new/certificate.json") == 0
    certificate = expected(folder)
    assert certificate.valid
    assert certificate.bound < 1
    written = json.loads((folder / "new" / "certificate.json").read_text())
    assert written["bound"] == certificate.bound
    assert written["valid"] is True
    assert written["prior_origin"] == "random initialisation, seed 0"
    assert (written["data"], written["part"]) == ("squares.npz", "train")
    assert (written["model"], written["arguments"]) == ("small_nets.net", {"width": 6})
    printed = capsys.readouterr().out
    assert printed.startswith(f"{certificate}\n")
    assert printed.endswith("\nnew/certificate.json\n")
    assert f"{certificate.model_risk:.4f}; --known_error" in printed
    assert [path.name for path in (folder / "new").iterdir()] == ["certificate.json"]


def test_options_reach_the_certificate(folder):
    options = ["--structure=[isotropic,diagonal]", "--delta=0.1", "--delta_draws=0.05", "--seed=3"]
    options += ["--prior.per_layer=false"]
    assert run(*PRIOR, *options, "--out=c.json") == 0
    certificate = expected(
        folder,
        ["isotropic", "diagonal"],
        delta=0.1,
        delta_draws=0.05,
        seed=3,
    )
    written = json.loads((folder / "c.json").read_text())
    assert written["structure"] == certificate.structure
    assert written["risk"] == pytest.approx(certificate.risk, abs=0.2)
    assert (written["n"], written["confidence"]) == (200, pytest.approx(0.85))


def test_a_centre_without_an_origin_is_not_valid(folder, capsys):
    assert run("--prior.center=start.pt") == 0
    assert (
        "valid              NO: the prior's centre is not known to be independent"
        in capsys.readouterr().out
    )


def test_without_a_prior_the_centre_is_zero(folder, capsys):
    assert run() == 0
    assert "prior              centre: 0;" in capsys.readouterr().out


def test_a_lightning_checkpoint_brings_its_arguments(folder):
    for name in ("start", "trained"):
        state = {f"inner.{key}": value for key, value in torch.load(folder / f"{name}.pt").items()}
        kept = {"state_dict": state, "hyper_parameters": {"width": 6, "lr": 0.1}}
        torch.save({**kept, "pytorch-lightning_version": pl.__version__}, folder / f"{name}.ckpt")
    options = ["--prior.center=start.ckpt", PRIOR[1]]
    words = ["certify", "--model=small_nets.Module", "--checkpoint=trained.ckpt"]
    assert cli.main([*words, "--data=squares.npz", *QUICK, *options]) == 0
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["bound"] == pytest.approx(expected(folder).bound)


def test_draws_the_picture_where_asked(folder, capsys):
    assert run(*PRIOR, "--picture=new/bounds.png") == 0
    assert (folder / "new" / "bounds.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith("certificate.json\nnew/bounds.png\n")


def test_labels_of_a_file_are_the_outputs_of_the_network(folder):
    """Labels 0 and 3 stay so, though they are two classes."""
    x, y = images(200, 0)
    keep = y != 1
    labels = 3 * (y[keep] == 2)
    np.savez(folder / "gaps.npz", x_train=x[keep], y_train=labels, x_test=x[keep], y_test=labels)
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)).state_dict(), folder / "four.pt")
    (folder / "four_nets.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(4, 4))"
    )
    with pytest.warns(TaskInfoWarning, match="no training sample of 2 of 4 classes"):
        assert run("--data=gaps.npz", model="four_nets.net", checkpoint="four.pt") == 0
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    net.load_state_dict(torch.load(folder / "four.pt"))
    wrong = net(torch.from_numpy(x[keep]).float() / 255).argmax(1).numpy() != labels
    written = json.loads((folder / "certificate.json").read_text())
    assert written["model_risk"] == pytest.approx(wrong.mean())


def damaged(name: str, folder) -> None:
    """Make ``bad.pt`` in one of the ways in which files go wrong."""
    state = torch.load(folder / "trained.pt")
    if name == "cut":
        (folder / "bad.pt").write_bytes((folder / "trained.pt").read_bytes()[:500])
    elif name == "empty":
        (folder / "bad.pt").write_bytes(b"")
    elif name == "nan":
        torch.save({**state, "3.bias": torch.tensor([0.0, 0.0, float("nan")])}, folder / "bad.pt")
    elif name == "shape":
        torch.save({**state, "3.bias": torch.zeros(4)}, folder / "bad.pt")
    elif name == "missing":
        torch.save(
            {key: value for key, value in state.items() if key != "3.bias"}, folder / "bad.pt"
        )
    elif name == "list":
        torch.save([1, 2], folder / "bad.pt")
    elif name == "module":
        torch.save(nn.Linear(4, 2), folder / "bad.pt")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "must be the file of a Lightning checkpoint or a state dict, not of a whole model"),
        (
            "empty",
            "must be the file of a Lightning checkpoint or a state dict, not of a whole model",
        ),
        (
            "module",
            "must be the file of a Lightning checkpoint or a state dict, not of a whole model",
        ),
        ("list", "must be the file of a Lightning checkpoint or a state dict, got bad.pt without"),
        ("nan", "must hold finite numbers, got others in '3.bias'."),
        ("shape", "must hold the weights of the model, got bad.pt: size mismatch for 3.bias"),
        (
            "missing",
            'must hold the weights of the model, got bad.pt: Missing key(s) in state_dict: "3.bias"',
        ),
    ],
)
def test_a_checkpoint_that_is_not_one(folder, capsys, name, message):
    damaged(name, folder)
    assert run(*PRIOR, checkpoint="bad.pt") == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"taskinfo: error: `checkpoint` {message}")
    assert not written.out
    assert not (folder / "certificate.json").exists()


@pytest.mark.parametrize("name", ["cut", "empty", "module", "list", "nan", "shape", "missing"])
def test_a_centre_that_is_not_one(folder, capsys, name):
    damaged(name, folder)
    assert run("--prior.center=bad.pt", PRIOR[1]) == 2
    written = capsys.readouterr()
    assert written.err.startswith("taskinfo: error: `center` must ")
    assert not (folder / "certificate.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data=few.npz"], "`data` must hold at least 8 samples, got 5."),
        (
            ["--data=wide.npz"],
            "`data` cannot be read: calling the module on the inputs of a batch failed (",
        ),
        (
            ["--data=many.npz"],
            "a certificate needs targets from 0 to 2, as `model` returns 3 logits, got ",
        ),
        (
            ["--data=nothing"],
            "A dataset must be digits or letters or name a file; 'nothing' was not found",
        ),
        (["--draws=0"], "`draws` must be at least 1, got 0."),
        (["--picture=a.nonsense"], "`picture` must end in .png, .pdf or .svg, got a.nonsense."),
        (["--out=."], "`out` must be a file, got the folder ."),
    ],
)
def test_wrong_values_end_with_2_and_their_message(folder, capsys, arguments, message):
    for name, (samples, side, classes) in {
        "few": (5, 2, 3),
        "wide": (20, 3, 3),
        "many": (20, 2, 5),
    }.items():
        x, y = np.zeros((samples, 1, side, side), np.uint8), np.arange(samples) % classes
        save_npz(folder / f"{name}.npz", ArrayData(x, y, x, y, name=name, num_classes=classes))
    assert run(*arguments) == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"taskinfo: error: {message}")
    assert not written.out
    assert not list(folder.glob("*.json*")) + list(folder.glob("a.*"))


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (
            ["--checkpoint=gone.pt"],
            "`checkpoint` must be the file of a Lightning checkpoint",
            2,
        ),
        (
            ["--prior.center=gone.pt"],
            "`center` must be the file of a Lightning checkpoint or",
            2,
        ),
        (["--data=gone.npz"], "'gone.npz' was not found at this path.", 2),
        (["--out=squares.npz/c.json"], "squares.npz", 1),
    ],
)
def test_a_file_that_is_missing_ends_with_2_and_one_in_the_way_with_1(
    folder, capsys, arguments, message, code
):
    assert run(*arguments) == code
    assert message in capsys.readouterr().err
    assert not list(folder.glob("*.json*"))


def test_an_old_certificate_survives_a_run_that_fails(folder):
    (folder / "certificate.json").write_text("old")
    assert run("--draws=0") == 2
    assert (folder / "certificate.json").read_text() == "old"


def test_a_bar_on_a_terminal_and_none_elsewhere(folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run() == 0
    assert sys.stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run("--picture=bounds.png") == 0
    assert all(label in sys.stderr.getvalue() for label in ("certify search", "certify draws"))
