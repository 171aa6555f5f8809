"""``taskinfo transfer`` on npz files, with real offline runs of Weights & Biases."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_taskinfo import cli
from lightning_taskinfo.data import save_npz
from lightning_taskinfo.transfer import TransferReport
from tests.transfer.tiny import tiny_task

SMALL = [
    "--methods=[lautum]", "--labels=[9]", "--seeds=1", "--model=tests.transfer.tiny.tiny_net", "--batch_size=16",
    "--validation=12", "--stages.pretrain_epochs=1", "--stages.fine_tune_epochs=1", "--workers=0",
]  # fmt: skip


@pytest.fixture
def pair(tmp_path):
    for seed, name in enumerate(("source", "target")):
        save_npz(tmp_path / f"{name}.npz", tiny_task(seed, name=name))
    return f"--pair={tmp_path / 'source.npz'}->{tmp_path / 'target.npz'}"


def test_an_experiment_in_weights_and_biases(pair, tmp_path, capsys):
    """One run for every method and seed, in one group with a summary run that holds table and figures."""
    out = tmp_path / "out"
    assert cli.main(["transfer", pair, f"--folder={out}", "--logger=wandb_offline", *SMALL]) == 0
    text = capsys.readouterr()
    assert "[3/3] fine-tune lautum, 9 labels, seed 0" in text.err
    assert re.search(r"leet \S+offline-run", text.out)
    report = TransferReport.load(out / "report" / "report.json")
    assert report.methods == ["scratch", "lautum"]
    assert (out / "report" / "report.html").exists()
    runs = sorted((out / "logs" / "wandb").glob("offline-run-*"))
    assert len(runs) == 3
    wandb = Path(sys.executable).with_name("wandb")
    shown = [
        subprocess.run([wandb, "leet", "inspect", "--json", run], capture_output=True, text=True, check=True).stdout
        for run in runs
    ]
    (tuned,) = (text for text in shown if '"lautum-9-seed0"' in text)
    for key in ("pretrain/train_loss", "train_loss", "before/information/total", "added/total", "test_accuracy"):
        assert key in tuned
    assert sum("source → target (out)" in text or "source \\u2192 target (out)" in text for text in shown) == 3


def test_a_yaml_file_and_a_second_run_that_has_nothing_to_do(pair, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("labels: [9]\nstages:\n  pretrain_epochs: 1\n  fine_tune_epochs: 1\nlogger: none\n")
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
        ("--pair=digits", "`pair` must be a source and a target"),
        ("--model=vgg", "`model` must be one of mlp"),
        ("--labels=[500]", "the 78 samples there are beside 12 for validation, got 500"),
        ("--methods=[laplace]", "`methods` must be made of"),
        ("--data_dir=/nowhere", None),
    ],
)
def test_bad_input_has_an_exit_code_and_a_message(pair, tmp_path, capsys, argument, message):
    arguments = ["transfer", pair, f"--folder={tmp_path / 'out'}", *SMALL, argument]
    if message is None:
        arguments.append("--pair=nothing->nowhere")
        message = "'nothing' was not found in /nowhere"
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "report").exists()
