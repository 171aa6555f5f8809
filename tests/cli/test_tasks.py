"""``taskinfo complexity`` and ``taskinfo distance``: what they write, and how they say no."""

import json
import re

import numpy as np
import pytest

from lightning_taskinfo import cli
from lightning_taskinfo.cli._parser import load_command
from lightning_taskinfo.data import ArrayData, save_npz
from lightning_taskinfo.data.names import VARIANTS

SMALL = ["--max_samples=40", "--width=4", "--training.steps=3", "--training.pretrain_steps=3"]


def test_complexity_writes_json_and_a_figure_and_continues(tmp_path, capsys):
    command = [
        "complexity",
        "--tasks=[digits:even-odd,digits:random-labels]",
        f"--folder={tmp_path}",
        "--betas=[1,10]",
    ]
    assert cli.main([*command, *SMALL]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "complexity.png").read_bytes().startswith(b"\x89PNG")
    first, second = json.loads((tmp_path / "complexity.json").read_text())
    assert first["name"] == "digits:even-odd"
    assert first["betas"] == [10.0, 1.0]
    assert second["samples"] == 40
    assert f"{first['kl'][0]:,.1f}" in printed
    assert (
        "Not to be trusted: training stopped short of the minimum at β 10, 1; set more `training.steps`."
        in printed
    )
    assert cli.main([*command, *SMALL]) == 0  # from what is there
    assert capsys.readouterr().out == printed
    assert cli.main([*command, *SMALL, "--prior_std=0.2"]) == 2
    assert "prior_std: 0.1 there, 0.2 now" in capsys.readouterr().err


def test_distance_writes_json_and_a_figure(tmp_path, capsys):
    command = [
        "distance",
        "--tasks=[digits,digits:only-0-1]",
        f"--folder={tmp_path}",
        "--seeds=2",
    ]
    assert cli.main([*command, "--workers=0", *SMALL]) == 0
    printed = capsys.readouterr().out.splitlines()
    figure, numbers = printed[-2:]
    assert printed[0].split() == ["nats", "from,", "to", "digits", "digits:only-0-1"]
    read = json.loads((tmp_path / "distance.json").read_text())
    assert f"{read['mean'][0][1]:,.0f} ± " in printed[1]
    assert (figure, numbers) == (str(tmp_path / "distance.png"), str(tmp_path / "distance.json"))
    assert (tmp_path / "distance.png").read_bytes().startswith(b"\x89PNG")


def test_complexity_takes_the_path_of_an_npz_file_and_writes_into_its_folder_alone(
    tmp_path, monkeypatch
):
    images = np.random.default_rng(0).integers(0, 255, (16, 1, 4, 4)).astype(np.uint8)
    save_npz(
        tmp_path / "mine.npz",
        ArrayData(images, np.arange(16) % 2, images, np.arange(16) % 2, name="m", num_classes=2),
    )
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../mine.npz", str(tmp_path / "mine.npz")):
        assert (
            cli.main(
                [
                    "complexity",
                    f"--tasks=[{name}]",
                    "--folder=out",
                    "--training.steps=2",
                    "--betas=[1]",
                ]
            )
            == 0
        )
    assert {path.name for path in tmp_path.iterdir()} == {"here", "mine.npz"}
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"out"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["complexity", "--max_samples=3"], "`data` must hold at least 8 samples, got 3."),
        (["complexity", "--training.steps=-5"], "error: `steps` must be at least 1, got -5"),
        (["distance", "--training.steps=-5"], "error: `steps` must be at least 1, got -5"),
        (["complexity", "--tasks=[numbers]"], "'numbers' was not found"),
        (["complexity", "--betas=[0]"], "`betas` must be positive, got 0.0"),
        (["distance", "--seeds=0"], "`seeds` must be different numbers, at least one, got []"),
        (["distance", "--beta=-1"], "`beta` must be positive, got -1.0."),
        (["distance", "--tasks=[digits:upside-down]"], "got 'upside-down'"),
    ],
)
def test_wrong_values_end_with_2_and_their_message(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("TASKINFO_DATA_DIR", raising=False)
    assert cli.main([*arguments[:1], f"--folder={tmp_path}", *arguments[1:]]) == 2
    written = capsys.readouterr()
    assert message in written.err
    assert not written.out


@pytest.mark.parametrize("command", ["complexity", "distance", "embed"])
def test_the_help_has_every_variant(command):
    told = load_command(command).__doc__
    assert all(re.sub("-[0-9].*", "-", variant) in told for variant in VARIANTS)


def test_a_folder_that_lost_its_configuration_is_refused(tmp_path, capsys):
    command = [
        "distance",
        "--tasks=[digits:only-0-1]",
        f"--folder={tmp_path}",
        "--seeds=1",
        "--workers=0",
    ]
    assert cli.main([*command, *SMALL]) == 0
    (tmp_path / "trainings" / "configuration.json").unlink()
    capsys.readouterr()
    assert cli.main([*command, *SMALL, "--training.steps=4"]) == 2
    assert "`folder` must" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["distance", "--tasks=[digits]"], ["transfer"]], ids=str)
def test_arguments_are_checked_before_a_folder_is_claimed(tmp_path, capsys, command):
    assert cli.main([*command, f"--folder={tmp_path / 'new'}", "--workers=-1"]) == 2
    assert "`workers` must be at least 0, got -1" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["complexity", "distance"])
@pytest.mark.parametrize(
    "argument",
    ["width=0", "prior_std=.inf", "prior_std=.nan", "max_samples=0", "beta=.inf", "betas=[.nan]"],
)
def test_numbers_out_of_range_leave_no_files(tmp_path, capsys, command, argument):
    if argument.startswith("betas" if command == "distance" else "beta="):
        pytest.skip("the other command's")
    assert (
        cli.main(
            [command, "--tasks=[digits]", f"--folder={tmp_path / 'new'}", *SMALL, f"--{argument}"]
        )
        == 2
    )
    assert f"`{argument.partition('=')[0]}` must be" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
