"""``taskinfo transfer`` on npz files, with real offline runs of Weights & Biases."""

import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from lightning_taskinfo import cli
from lightning_taskinfo.cli._parser import current_folder_imported, find
from lightning_taskinfo.data import save_npz
from lightning_taskinfo.transfer import TransferReport
from tests.offline_runs import inspect
from tests.transfer.tiny import tiny_task

SMALL = [
    "--methods=[lautum]", "--labels=[9]", "--seeds=1", "--backbone=tests.transfer.tiny.tiny_net",
    "--stages.pretrain_epochs=1", "--stages.fine_tune_epochs=1", "--workers=0",
]  # fmt: skip


@pytest.fixture
def pair(tmp_path):
    for seed, name in enumerate(("source", "target")):
        save_npz(tmp_path / f"{name}.npz", tiny_task(seed, name=name))
    return f"--data={tmp_path / 'source.npz'}->{tmp_path / 'target.npz'}"


def test_an_experiment_in_weights_and_biases(pair, tmp_path, capsys):
    """One run for every method and seed, in one group with a summary run that holds table and figures."""
    out = tmp_path / "out"
    assert cli.main(["transfer", pair, f"--folder={out}", "--logger=wandb_offline", *SMALL]) == 0
    text = capsys.readouterr()
    assert text.err.startswith("transfer: 3 trainings\n")
    assert re.search(r"leet \S+offline-run", text.out)
    report = TransferReport.load(out / "report" / "report.json")
    assert report.methods == ["scratch", "lautum"]
    assert (out / "report" / "report.md").exists()
    runs = sorted((out / "logs" / "wandb").glob("offline-run-*"))
    assert len(runs) == 4
    shown = [inspect(run) for run in runs]
    (tuned,) = (text for text in shown if '"lautum-full-9-seed0"' in text)
    for key in (
        '"train_loss"',
        "taskinfo/before/information/total",
        "taskinfo/added/total",
        '"test_accuracy"',
    ):
        assert key in tuned
    assert (
        sum(
            "source → target (out)" in text or "source \\u2192 target (out)" in text
            for text in shown
        )
        == 4
    )


def test_a_yaml_file_and_a_second_run_that_has_nothing_to_do(pair, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        "labels: [9]\nstages:\n  pretrain_epochs: 1\n  fine_tune_epochs: 1\nlogger: none\n"
    )
    arguments = ["transfer", f"--config={config}", pair, f"--folder={tmp_path / 'out'}", *SMALL]
    assert cli.main(arguments) == 0
    first = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert cli.main(arguments) == 0
    assert json.loads((tmp_path / "out" / "report" / "report.json").read_text()) == first
    capsys.readouterr()
    assert cli.main([*arguments, "--stages.fine_tune_epochs=2"]) == 2
    assert "stages.fine_tune_epochs: 1 there, 2 now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--data=digits", "`data` must be a source and a target"),
        ("--backbone=vgg", "`backbone` must be one of mlp"),
        (
            "--backbone=torch.nn.Linear",
            "`model` must make a network, but it failed",
        ),
        ("--backbone=torch.nn.Flatten", "`model` must "),
        ("--backbone=examples.reference.Classifier", "`model` must "),
        ("--stages.learning_rate=.inf", "learning_rate"),
        ("--labels=[500]", "`labels` must be between 1 and the 90 training samples there are"),
        ("--methods=[laplace]", "`method` must be one of temporal_ensembling"),
        ("--data=no.npz->digits", "'no.npz' was not found at this path."),
        ("--data=nothing->nowhere", "'nothing' was not found"),
    ],
)
def test_bad_input_has_an_exit_code_and_a_message(pair, tmp_path, capsys, argument, message):
    arguments = ["transfer", pair, f"--folder={tmp_path / 'out'}", *SMALL, argument]
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "report").exists()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A package in the current folder, which no process would find by itself."""
    (tmp_path / "mine_of_this_test").mkdir()
    (tmp_path / "mine_of_this_test" / "nets.py").write_text(
        "import os, sys\n\n"
        "def backbone(image_shape):\n"
        "    from tests.transfer.tiny import tiny_net\n"
        "    assert os.getcwd() in sys.path\n"
        "    return tiny_net(image_shape)\n\n"
        "def ten(): return 10\n"
    )
    monkeypatch.chdir(tmp_path)
    return "mine_of_this_test.nets"


def test_a_backbone_of_the_current_folder_is_found(mine, pair, tmp_path):
    before = sys.path.copy()
    assert cli.main(["transfer", pair, "--folder=out", *SMALL, f"--backbone={mine}.backbone"]) == 0
    assert sys.path == before


def test_other_processes_find_the_current_folder_too(mine):
    with current_folder_imported(), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(find(f"{mine}.ten", "model")).result() == 10
