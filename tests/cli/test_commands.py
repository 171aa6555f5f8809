"""Every command in the README and the documentation is run, with less work where it would take long, or has a reason.

What is appended to a command overrides what stands before it, so that the documented words are parsed and run.
"""

import fcntl
import fnmatch
import os
import pty
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_taskinfo.cli import main
from lightning_taskinfo.data import save_npz
from tests.documented import PRELUDE
from tests.pages import COMMANDS, ROOT, blocks
from tests.transfer.tiny import tiny_task

TRANSFER = "--seeds 1 --workers 0 --stages.pretrain_epochs 1 --stages.fine_tune_epochs 1"
SMALL = f"{TRANSFER} --methods [standard]"
FEW = "--data lightning_taskinfo.transfer.TransferDataModule --data.max_source 90 --data.max_unlabeled 300"
TASKS = "--max_samples 40 --training.pretrain_steps 2 --training.steps 2"
CERTIFY = "--draws 20 --betas [1] --structure diagonal"
PHASES = "--angles 2 --gammas [0.5]"
CSV = "--trainer.max_epochs=1 --trainer.logger.save_dir=."

SHIFTED = "{shifted: {class_path: mine.Data, init_args: {shift: 1}}}"

QUICK = {  # command -> what makes it short
    "taskinfo phase-diagram --mode linear --sigma 0.2 --out phase.png": PHASES,
    "taskinfo phase-diagram --mode fine_tune --sigma 0.2 --out phase.png": PHASES,
    """taskinfo complexity --tasks '[digits,"digits:random-labels"]' --folder complexity""": f"{TASKS} --betas [1]",
    "taskinfo distance --tasks '[digits,letters]' --folder distance": f"{TASKS} --seeds 1 --workers 0",
    """taskinfo transfer --data "photos.npz→sketches.npz" --labels '[9]' --folder runs/sketches""": SMALL,
    "taskinfo rank --model my_package.nets.classifier --starts '{photos: photos.pt}' "
    "--data sketches.npz --labels 60": "--confidence 0.9",
    "taskinfo certify --model mine.Net --checkpoint trained.ckpt --data mine.Data --data.batch_size 64 "
    '--prior.center start.ckpt --prior.origin "random initialisation" --unlabelled predict --held_out test '
    "--known_error 0.0": CERTIFY,
    "taskinfo rank --model mine.Net --model.width 32 --starts '{trained: trained.ckpt, start: start.ckpt}' "
    "--data mine.Data --data.shift 0.5 --labels 60": "",
    "taskinfo transfer --model mine.Net --model.width 32 --starts.trained trained.ckpt --data mine.Data "
    "--data.shift 0.5 --labels '[30,60]' --trainer.max_steps 100 --folder runs/mine": (
        "--seeds 1 --workers 0 --trainer.max_steps 2"
    ),
    "taskinfo complexity --model mine.Net --model.width 16 --data mine.Data --folder runs/complexity": (
        f"{TASKS} --betas [1]"
    ),
    f"taskinfo distance --model mine.Net --data mine.Data --tasks '{SHIFTED}' --folder runs/distance": (
        f"{TASKS} --seeds 1 --workers 0"
    ),
    "taskinfo embed --model mine.Net --checkpoint trained.ckpt --data mine.Data "
    f"--tasks '{SHIFTED}' --folder runs/embed": "--max_samples 20",
    "taskinfo rank --model mine.Net --data mine.Data --config rank.yaml": "",
}
SLOW = {
    """taskinfo complexity --tasks '[digits, "digits:random-labels"]' --folder runs/complexity""": (
        f"{TASKS} --betas [1]"
    ),
    """taskinfo distance --tasks '[digits, "digits:even-odd", letters]' --folder runs/distance""": (
        f"{TASKS} --seeds 1 --workers 0"
    ),
    """taskinfo embed --tasks '[digits,"digits:even-odd",letters]' --folder embeddings""": (
        "--max_samples 20"
    ),
    'taskinfo transfer --data "digits→letters" '
    "--methods '[standard,lautum,mutual_information]' --labels '[50,200]'": (
        f"{TRANSFER} {FEW} --backbone mlp"
    ),
    """taskinfo transfer --data "photos.npz→sketches.npz" --labels '[50]' --seeds 3 --folder runs/sketches""": SMALL,
    'taskinfo transfer --backbone my_package.nets.backbone --data "digits→letters"': f"{SMALL} {FEW} --labels [50]",
    "python examples/watch.py fit --config examples/watch.yaml": CSV,
    "python examples/watch.py fit --trainer.callbacks+=lightning_taskinfo.FisherTrace "
    "--trainer.callbacks.every_n_steps=50": "--trainer.max_epochs=1",
    "WANDB_MODE=offline python examples/watch.py fit --config examples/watch.yaml "
    "--trainer.logger=pytorch_lightning.loggers.WandbLogger --trainer.logger.save_dir=.": "--trainer.max_epochs=1",
    "WANDB_MODE=offline python examples/watch.py fit --config examples/watch.yaml --model.lr=0.008 "
    "--trainer.logger=pytorch_lightning.loggers.WandbLogger --trainer.logger.save_dir=.": "--trainer.max_epochs=1",
    "WANDB_MODE=offline python train.py": "",
    "TASKINFO_CALLBACKS=FisherTrace,InformationInWeights python train.py": "",
}
ELSEWHERE = {  # command -> the test that runs it
    "taskinfo rank --model mine.Net --data mine.Data --help": "tests/cli/test_own.py",
    "wandb leet wandb/latest-run": "test_leet_shows_the_run_of_train_py",
    "wandb leet inspect --summary wandb/latest-run": "test_leet_shows_the_run_of_train_py",
    **{
        f"python {path.relative_to(ROOT)}": "tests/test_examples.py"
        for path in ROOT.glob("examples/*.py")
    },
}
NOT_RUN = {  # command -> why no test runs it
    'pip install ".[wandb,plot,cli]"': "needs the package index; `make wheel` installs what is built",
    "pip install .": "the same",
    'pip install ".[examples]"': "the same",
    "python benchmarks/evidence/critical_period.py --short": "half a minute; `make evidence` runs it",
    "make demo": "makes an environment; tests/test_examples.py runs the script behind it",
    "wandb sweep sweep.yaml": "needs an account; what an agent would run is checked in test_code_blocks.py",
    "wandb agent SWEEP_ID": "the same",
    "wandb sync wandb/latest-run": "needs an account",
}


def test_every_command_is_run_or_has_a_reason():
    known = [*QUICK, *SLOW, *NOT_RUN, *(command for command in ELSEWHERE if command in COMMANDS)]
    assert sorted(known) == sorted(COMMANDS)  # each once, and none that is gone


def test_examples_in_the_documentation_are_run_by_test_examples():
    from tests.test_examples import SCRIPTS

    run = {f"python {path.relative_to(ROOT)}" for path in SCRIPTS}
    assert {c for c in COMMANDS if ELSEWHERE.get(c) == "tests/test_examples.py"} <= run


@pytest.fixture(scope="module")
def possessions(tmp_path_factory):
    """What readers of the pages have: their own images, networks, and a script."""
    made = tmp_path_factory.mktemp("reader")
    for seed, name in enumerate(("photos", "sketches")):
        save_npz(made / f"{name}.npz", tiny_task(seed, name=name, samples=120))
    (made / "my_package").mkdir()
    (backbone, *_) = blocks(ROOT / "docs" / "how-to" / "own-backbone.md", {"python"})
    nets = backbone["text"].split("\nnet = ")[0]
    classifier = (
        "\n\ndef classifier():\n    return nn.Sequential(backbone((1, 8, 8)), nn.Linear(32, 3))\n"
    )
    (made / "my_package" / "nets.py").write_text(nets + classifier)
    defined: dict[str, Any] = {}
    exec(nets + classifier, defined)
    torch.save(defined["classifier"]().state_dict(), made / "photos.pt")
    (made / "train.py").write_text(
        f"{PRELUDE}\nfrom pytorch_lightning.loggers import CSVLogger, WandbLogger\n{TRAIN}"
    )
    _own_commands(made)
    return made


@pytest.fixture
def reader(possessions, tmp_path, monkeypatch):
    """A folder with all of it and the examples, for this test alone."""
    shutil.copytree(possessions, tmp_path, dirs_exist_ok=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def _own_commands(folder):
    """The file, the checkpoints and the configuration of the page on own networks."""
    page = ROOT / "docs" / "how-to" / "own-commands.md"
    (text,) = (block["text"] for block in blocks(page, {"python"}))
    (folder / "mine.py").write_text(text)
    (configuration,) = (block["text"] for block in blocks(page, {"yaml"}))
    (folder / "rank.yaml").write_text(configuration)
    made: dict[str, Any] = {"__name__": "mine"}
    exec(text, made)
    torch.manual_seed(0)
    model = made["Net"]()
    torch.save({"state_dict": model.state_dict()}, folder / "start.ckpt")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, y = made["Data"]().train_dataloader().dataset.tensors
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    kept = {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)}
    torch.save(kept, folder / "trained.ckpt")


TRAIN = """
import os
from lightning_taskinfo import FisherTrace, InformationInWeights
logger, callbacks = CSVLogger(".", name="", version="csv"), []
if "TASKINFO_CALLBACKS" not in os.environ:
    logger, callbacks = WandbLogger(), [FisherTrace(every_n_steps=2), InformationInWeights(every_n_steps=2)]
trainer = pl.Trainer(max_epochs=2, logger=logger, callbacks=callbacks, log_every_n_steps=1, enable_progress_bar=False)
trainer.fit(model, datamodule)
"""


def shell(command, folder):
    """Run a line as a shell does, with the interpreter of the tests as ``python``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
    environment.pop(
        "WANDB_SERVICE", None
    )  # that of another test, which would write to its own folder
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("command", "less"),
    [*QUICK.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())],
    ids=lambda text: text[:60],
)
def test_runs(command, less, reader, capsys):
    before = set(reader.rglob("*"))
    if command.startswith("taskinfo "):
        assert main(shlex.split(f"{command} {less}")[1:]) == 0
        assert capsys.readouterr().out
    else:
        shell(f"{command} {less}", reader)
    written = [str(path.relative_to(reader)) for path in set(reader.rglob("*")) - before]
    assert fnmatch.filter(
        written, next(pattern for part, pattern in WRITTEN.items() if part in command)
    )


WRITTEN = {  # part of a command -> a file that it leaves
    "phase-diagram": "*phase.png",
    "complexity": "*complexity.json",
    "distance": "*distance.json",
    "embed": "*embeddings.json",
    "taskinfo rank": "ranking.json",
    "certify": "certificate.json",
    "transfer": "*report.md",
    "WANDB_MODE": "wandb/offline-run-*/run-*.wandb",  # where the page looks for it
    "TASKINFO_CALLBACKS": "*squared_displacement_table.csv",
    "watch.yaml": "*metrics.csv",
    "watch.py": "*version_0",
}


@pytest.mark.slow
def test_leet_shows_the_run_of_train_py(reader):
    """In a terminal of its own, until the name of a metric is on the screen."""
    shell("WANDB_MODE=offline python train.py", reader)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [Path(sys.executable).with_name("wandb"), "leet", "wandb/latest-run"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    running = subprocess.Popen(  # a group of its own, since it starts another process
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
    )
    seen, end = b"", time.monotonic() + 120
    try:
        while b"taskinf" not in seen and time.monotonic() < end and running.poll() is None:
            if select.select([leader], [], [], 1.0)[0]:
                seen += os.read(leader, 65536)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert b"taskinf" in seen, seen[-2000:]
    assert "taskinfo/" in shell("wandb leet inspect --summary wandb/latest-run", reader)
