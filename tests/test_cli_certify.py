"""``taskinfo certify`` on a small trained network: the certificate of the function, from files, or a clear no."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from lightning_taskinfo import TaskInfoWarning, cli
from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.data import ArrayData, save_npz

SOURCE = """
import pytorch_lightning as pl
from torch import nn

def net(width: int = 4):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

class Images(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(4, 3))

class Module(pl.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.save_hyperparameters()
        self.inner = net(width)

    def forward(self, x):
        return self.inner(x)

def number():
    return 3
"""
QUICK = [
    "--draws=20",
    "--betas=[0.1,1]",
    "--structure=diagonal",
    "--flatten=true",
    "--classes=[[0,1],[2]]",
]


def images(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three classes of 2×2 images, the third one brighter."""
    g = np.random.default_rng(seed)
    labels = g.integers(3, size=n)
    return (g.integers(120, size=(n, 1, 2, 2)) + 100 * (labels == 2)[:, None, None, None]).astype(
        np.uint8
    ), labels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A module ``small_nets``, data of three classes, and a network trained on them from a known start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "small_nets", raising=False)
    (tmp_path / "small_nets.py").write_text(SOURCE)
    data = ArrayData(*images(200, 0), *images(20, 1), name="squares", num_classes=3)
    save_npz(tmp_path / "squares.npz", data)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    torch.save(model.state_dict(), tmp_path / "start.pt")
    x, y = data.train().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(x.flatten(1)), (y == 2).long()).backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    return tmp_path


def run(
    *arguments: str,
    model: str = "small_nets.net",
    checkpoint: str = "trained.pt",
    args: str = '{"width": 6}',
) -> int:
    given = [f"--model={model}", f"--checkpoint={checkpoint}", "--data=squares.npz", *QUICK]
    return cli.main(["certify", *given, *([f"--model-args={args}"] if args else []), *arguments])


PRIOR = ("--prior-checkpoint=start.pt", "--prior-origin=random initialisation, seed 0")


def expected(folder, structure="diagonal", part=slice(None), **options):
    """The certificate of the function, on tensors prepared by hand."""
    start, trained = (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2))
    start.load_state_dict(torch.load(folder / "start.pt"))
    trained.load_state_dict(torch.load(folder / "trained.pt"))
    x, y = images(200, 0)
    inputs, targets = torch.from_numpy(x).float().flatten(1) / 255, torch.from_numpy(y == 2).long()
    prior = Prior(start, origin="random initialisation, seed 0")
    return certify(
        trained,
        (inputs[part], targets[part]),
        prior,
        structure=structure,
        draws=20,
        betas=(0.1, 1.0),
        **options,
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
    assert (written["data"], written["classes"]) == ("squares.npz", [[0, 1], [2]])
    printed = capsys.readouterr().out
    assert printed.startswith(f"{certificate}\n")
    assert printed.endswith("\nnew/certificate.json\n")
    assert f"{certificate.model_risk:.4f}; --known_error" in printed
    assert [path.name for path in (folder / "new").iterdir()] == ["certificate.json"]


def test_options_reach_the_certificate(folder):
    options = [
        "--samples=1::2",
        "--structure=[isotropic,diagonal]",
        "--delta=0.1",
        "--delta-draws=0.05",
        "--seed=3",
    ]
    assert run(*PRIOR, *options, "--curvature-samples=50", "--out=c.json") == 0
    certificate = expected(
        folder,
        ["isotropic", "diagonal"],
        slice(1, None, 2),
        delta=0.1,
        delta_draws=0.05,
        seed=3,
        curvature_samples=50,
    )
    written = json.loads((folder / "c.json").read_text())
    assert (written["bound"], written["structure"]) == (certificate.bound, certificate.structure)
    assert (written["n"], written["confidence"]) == (100, pytest.approx(0.85))


def test_a_centre_without_an_origin_is_not_valid(folder, capsys):
    assert run("--prior-checkpoint=start.pt") == 0
    assert (
        "valid              NO: the prior's centre is not known to be independent"
        in capsys.readouterr().out
    )


def test_without_a_prior_the_centre_is_zero(folder, capsys):
    assert run() == 0
    assert "prior              centre: 0;" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["small_nets.Module", "small_nets.net"])
def test_a_lightning_checkpoint_brings_its_arguments_and_its_inner_network(folder, model, capsys):
    """The whole module with the arguments kept in the checkpoint, or the network inside it with given ones."""
    import pytorch_lightning as pl

    for name in ("start", "trained"):
        state = {f"inner.{key}": value for key, value in torch.load(folder / f"{name}.pt").items()}
        kept = {
            "state_dict": state,
            "hyper_parameters": {"width": 6},
            "pytorch-lightning_version": pl.__version__,
        }
        torch.save(kept, folder / f"{name}.ckpt")
    options = ["--prior-checkpoint=start.ckpt", PRIOR[1]]
    assert (
        run(
            *options,
            model=model,
            checkpoint="trained.ckpt",
            args="" if "Module" in model else '{"width": 6}',
        )
        == 0
    )
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["bound"] == pytest.approx(expected(folder).bound)


def test_images_are_normalised_and_all_classes_are_told_apart(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    torch.save(model.state_dict(), folder / "images.pt")
    options = ["--flatten=false", "--classes=null", "--mean=[0.2]", "--std=[0.5]", "--split=test"]
    assert run(*options, model="small_nets.Images", checkpoint="images.pt", args="") == 0
    x, y = images(20, 1)
    wrong = model((torch.from_numpy(x).float() / 255 - 0.2) / 0.5).argmax(1) != torch.from_numpy(y)
    written = json.loads((folder / "certificate.json").read_text())
    assert written["model_risk"] == pytest.approx(wrong.float().mean().item())


def test_labels_outside_the_groups_are_left_out(folder):
    assert run("--classes=[[2],[0]]") == 0
    _, labels = images(200, 0)
    written = json.loads((folder / "certificate.json").read_text())
    assert written["n"] == (labels != 1).sum()
    assert written["model_risk"] > 0.9  # trained to tell them apart the other way round


def test_draws_the_picture_where_asked(folder, capsys):
    assert run(*PRIOR, "--picture=new/pareto.png", "--curvature-samples=50") == 0
    assert (folder / "new" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith("certificate.json\nnew/pareto.png\n")


POOLED = """
from torch import nn

class Pooled(nn.Module):
    def __init__(self, image_shape=None):
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 8, 5, padding=2), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.first(x).relu().mean((2, 3)))

class WithExample(Pooled):
    def __init__(self):
        import torch
        super().__init__()
        self.example_input_array = torch.zeros(1, 1, 28, 28)
"""


def stripes(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """14×14 images with stripes of two widths, which a network of 28×28 images sees twice as wide."""
    labels = torch.arange(n) % 2
    period = torch.where(labels == 0, 3.0, 6.0)
    phase = 6.3 * torch.rand(n, generator=torch.Generator().manual_seed(0))
    wave = torch.sin(6.283 * torch.arange(14) / period[:, None] + phase[:, None])
    return (127 * (1 + wave))[:, None, None].expand(n, 1, 14, 14).round().to(torch.uint8), labels


@pytest.fixture
def resized(folder):
    """A network with pooling, good for images of any size, trained on images that were resized to 28×28."""
    (folder / "pooled_nets.py").write_text(POOLED)
    sys.modules.pop("pooled_nets", None)
    x, y = stripes(200)
    save_npz(
        folder / "stripes.npz",
        ArrayData(x.numpy(), y.numpy(), x.numpy(), y.numpy(), name="stripes", num_classes=2),
    )
    sys.path.insert(0, str(folder))
    from pooled_nets import Pooled

    sys.path.remove(str(folder))
    torch.manual_seed(0)
    model = Pooled()
    inputs = interpolate(x.float() / 255, size=(28, 28), mode="bilinear", antialias=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        cross_entropy(model(inputs), y).backward()
        optimizer.step()
    assert (model(inputs).argmax(1) != y).float().mean() < 0.05
    assert (model(x.float() / 255).argmax(1) != y).float().mean() > 0.2
    torch.save(model.state_dict(), folder / "pooled.pt")
    return folder


def certify_stripes(*arguments, model="pooled_nets.Pooled", checkpoint="pooled.pt"):
    given = [
        f"--model={model}",
        f"--checkpoint={checkpoint}",
        "--data=stripes.npz",
        "--draws=20",
        "--betas=[1]",
    ]
    return cli.main(["certify", *given, *arguments])


def test_images_of_another_size_than_in_training_are_noticed(resized):
    with pytest.warns(TaskInfoWarning, match=r"resized to .* as they are, 14×14"):
        assert certify_stripes() == 0


def test_an_error_far_from_the_stated_one_is_refused(resized, capsys):
    assert certify_stripes("--known_error=0.02") == 2
    assert (
        "`known_error` must be near the network's error on these samples" in capsys.readouterr().err
    )
    assert not (resized / "certificate.json").exists()
    x, y = stripes(200)
    x = (
        interpolate(x.float(), size=(28, 28), mode="bilinear", antialias=True)
        .round()
        .byte()
        .numpy()
    )
    save_npz(
        resized / "stripes.npz",
        ArrayData(x, y.numpy(), x, y.numpy(), name="stripes", num_classes=2),
    )
    assert certify_stripes("--known_error=0.02") == 0
    written = json.loads((resized / "certificate.json").read_text())
    assert written["inputs"] == {
        "shape": [1, 28, 28],
        "mean": None,
        "std": None,
        "known_error": 0.02,
    }


def test_an_error_far_from_that_of_the_checkpoint_is_told(resized):
    state = {"monitor": "val_accuracy", "current_score": torch.tensor(0.98)}
    kept = {
        "state_dict": torch.load(resized / "pooled.pt"),
        "callbacks": {"ModelCheckpoint": state},
    }
    torch.save({**kept, "hyper_parameters": {}}, resized / "pooled.ckpt")
    with (
        pytest.warns(TaskInfoWarning, match=r"0\.0200 in its checkpoint \(val_accuracy\)"),
        pytest.warns(TaskInfoWarning, match="resized to"),
    ):
        assert certify_stripes(checkpoint="pooled.ckpt") == 0


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("pooled_nets.WithExample", []),
        ("pooled_nets.Pooled", ['--model-args={"image_shape": [1, 28, 28]}']),
    ],
)
def test_a_network_that_names_its_size_is_taken_at_its_word(resized, capsys, model, arguments):
    assert certify_stripes(*arguments, model=model) == 2
    assert "`data` must have images of 28×28" in capsys.readouterr().err


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
    with pytest.warns(TaskInfoWarning, match="have the labels 0, 3"):
        assert (
            run(
                "--data=gaps.npz",
                "--classes=null",
                model="four_nets.net",
                checkpoint="four.pt",
                args="",
            )
            == 0
        )
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    net.load_state_dict(torch.load(folder / "four.pt"))
    wrong = net(torch.from_numpy(x[keep]).float() / 255).argmax(1).numpy() != labels
    written = json.loads((folder / "certificate.json").read_text())
    assert written["model_risk"] == pytest.approx(wrong.mean())
    with pytest.warns(TaskInfoWarning, match="have the labels 0, 3"):
        assert run("--data=gaps.npz", "--classes=[[3],[0]]") == 0


def test_embedded_data_by_name(folder, capsys):
    torch.save(
        nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10)).state_dict(),
        folder / "digits.pt",
    )
    (folder / "wide_nets.py").write_text(
        SOURCE.replace("nn.Linear(4, width)", "nn.Linear(64, width)").replace("2)", "10)")
    )
    options = ["--data=digits", "--size=8", "--classes=null", "--samples=:100"]
    assert run(*options, model="wide_nets.net", checkpoint="digits.pt", args="") == 0
    assert "samples            100" in capsys.readouterr().out


def damaged(name: str, folder) -> None:
    """Make ``bad.pt`` in one of the ways in which files go wrong."""
    state = torch.load(folder / "trained.pt")
    if name == "cut":
        (folder / "bad.pt").write_bytes((folder / "trained.pt").read_bytes()[:500])
    elif name == "empty":
        (folder / "bad.pt").write_bytes(b"")
    elif name == "nan":
        torch.save({**state, "2.bias": torch.tensor([0.0, float("nan")])}, folder / "bad.pt")
    elif name == "shape":
        torch.save({**state, "2.bias": torch.zeros(3)}, folder / "bad.pt")
    elif name == "missing":
        torch.save(
            {key: value for key, value in state.items() if key != "2.bias"}, folder / "bad.pt"
        )
    elif name == "list":
        torch.save([1, 2], folder / "bad.pt")
    elif name == "module":
        torch.save(nn.Linear(4, 2), folder / "bad.pt")


@pytest.mark.parametrize("argument", ["checkpoint", "prior_checkpoint"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "must be a Lightning checkpoint or a whole file of `model.state_dict()`, not"),
        ("empty", "must be a Lightning checkpoint or a whole file of `model.state_dict()`, not"),
        ("module", "must be a Lightning checkpoint or a whole file of `model.state_dict()`, not"),
        ("list", "must hold a Lightning checkpoint or a state dict, got bad.pt with neither."),
        ("nan", "must hold finite weights, got bad.pt with NaN or infinity in '2.bias'."),
        ("shape", "must hold the weights of the model, got bad.pt: size mismatch for 2.bias"),
        (
            "missing",
            'must hold the weights of the model, got bad.pt: Missing key(s) in state_dict: "2.bias"',
        ),
    ],
)
def test_a_checkpoint_that_is_not_one(folder, capsys, argument, name, message):
    damaged(name, folder)
    files = {"checkpoint": "trained.pt", "prior_checkpoint": "start.pt", argument: "bad.pt"}
    assert (
        run(f"--prior-checkpoint={files['prior_checkpoint']}", checkpoint=files["checkpoint"]) == 2
    )
    written = capsys.readouterr()
    assert written.err.startswith(f"taskinfo: error: `{argument}` {message}")
    assert not written.out
    assert not (folder / "certificate.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flatten=false"], "`model` must take inputs of shape [2, 1, 2, 2] ("),
        (
            ["--classes=null"],
            "`model` must return scores [N, C] for classes up to 2, got [2, 2] for inputs [2, 4]",
        ),
        (
            ["--classes=[[0,1]]"],
            "`classes` must be two or more groups of labels, no label in two of them, got [[0, 1]]",
        ),
        (
            ["--classes=[[0,1],[1]]"],
            "`classes` must be two or more groups of labels, no label in two of them, got",
        ),
        (["--classes=[[0],[7]]"], "`classes` must hold labels from 0 to 2, got 7."),
        (["--samples=a:b"], "`samples` must be start:stop:step with a positive step, got 'a:b'."),
        (["--samples=::-1"], "`samples` must be start:stop:step with a positive step, got '::-1'."),
        (["--samples=:5"], "`data` must hold at least 8 samples, got 5."),
        (["--samples=500:"], "`data` must hold at least 8 samples, got 0."),
        (["--mean=[0,0]"], "`mean` must hold a value for each of 1 channels, got [0.0, 0.0]."),
        (["--std=[0]"], "`std` must be positive, got [0.0]."),
        (["--std=[.inf]"], "`std` must be finite, got [inf]."),
        (["--mean=[.nan]"], "`mean` must be finite, got [nan]."),
        (["--known_error=1.5"], "`known_error` must be between 0 and 1, got 1.5."),
        (
            ["--model=small_nets.none"],
            "`model` must be the import path of a class or function, got 'small_nets.",
        ),
        (
            ["--model=no_such_module.Net"],
            "`model` must be the import path of a class or function, got 'no_such_mod",
        ),
        (["--model=net"], "`model` must be the import path of a class or function, got 'net' ("),
        (
            ["--model=small_nets.number", "--model_args={}"],
            "`model` must make a torch module, got int from",
        ),
        (
            ["--model-args={depth: 3}"],
            "`model_args` must be arguments of small_nets.net, got {'depth': 3} (",
        ),
        (
            ["--data=nothing"],
            "A dataset must be digits or letters or name a file; 'nothing' was not found",
        ),
        (["--draws=0"], "`draws` must be at least 1, got 0."),
        (["--picture=a.nonsense"], "`picture` must end in .png, .pdf or .svg, got a.nonsense."),
    ],
)
def test_wrong_values_end_with_2_and_their_message(folder, capsys, arguments, message):
    assert run(*arguments) == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"taskinfo: error: {message}")
    assert not written.out
    assert not list(folder.glob("*.json*")) + list(folder.glob("a.*"))


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--checkpoint=gone.pt"], "`checkpoint` must be a file, but there is none at gone.pt.", 2),
        (
            ["--prior_checkpoint=gone.pt"],
            "`prior_checkpoint` must be a file, but there is none at gone.pt.",
            2,
        ),
        (
            ["--data=gone.npz"],
            "A dataset must be an npz file, but there is no file at gone.npz.",
            2,
        ),
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
    assert run("--picture=pareto.png") == 0
    assert all(
        label in sys.stderr.getvalue()
        for label in ("certify search", "certify draws", "pareto_front picture")
    )
