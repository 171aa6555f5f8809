"""``taskinfo``: what it writes, and how it says no."""

import subprocess
import sys
from inspect import isclass, signature

import pytest
from jsonargparse import ArgumentParser

from lightning_taskinfo import (
    Task2Vec,
    certify,
    cli,
    rank_starts,
    structure_function,
    task_distance,
)
from lightning_taskinfo.cli import _parser
from lightning_taskinfo.cli._parser import load_command
from lightning_taskinfo.tasks.deep_linear import plot_phase_map
from lightning_taskinfo.transfer import transfer

SMALL = ["--angles=2", "--gammas=[0.5,1.5]"]


def test_phase_diagram_writes_a_figure_and_a_table(tmp_path, capsys):
    out = tmp_path / "new" / "phase.png"
    assert cli.main(["phase-diagram", "--mode=fine_tune", "--sigma=0", f"--out={out}", *SMALL]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    header, *rows, path = capsys.readouterr().out.splitlines()
    assert header.split() == ["theta_deg", "gamma", "gain"]
    table = [[float(cell) for cell in row.split()] for row in rows]
    assert [row[:2] for row in table] == [[0.0, 0.5], [0.0, 1.5], [90.0, 0.5], [90.0, 1.5]]
    assert [row[2] for row in table] == pytest.approx([0.5, 0.0, -0.5, 0.0])
    assert path == str(out)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--sigma=-1", "`sigma` must be non-negative and finite, got -1.0."),
        ("--gammas=[0.5,0]", "`gamma` must be positive, got 0.0."),
        ("--angles=0", "`angles` must be at least 1, got 0."),
        ("--out=figure.nonsense", "`out` must end in .png, .pdf or .svg, got figure.nonsense."),
    ],
)
def test_wrong_values_end_with_2_and_their_message(
    argument, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["phase-diagram", *SMALL, argument]) == 2
    written = capsys.readouterr()
    assert written.err.startswith("taskinfo: error: ")
    assert message in written.err
    assert not written.out


def test_a_path_that_cannot_be_written_ends_with_1(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["phase-diagram", f"--out={tmp_path / 'file' / 'a.png'}", *SMALL]) == 1
    assert "file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["phase-diagram", "--mode=frozen"]])
def test_unknown_words_end_with_2(arguments, capsys):
    assert cli.main(arguments) == 2
    written = capsys.readouterr().err
    assert written.startswith("taskinfo: error: ")
    assert len(written.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "option", "got"),
    [
        (["transfer", "--methods", "lautum"], "methods", "lautum"),
        (["complexity", "--betas=1,2"], "betas", "1,2"),
        (["complexity", "--training.steps=many"], "steps", "many"),
    ],
)
def test_a_value_of_another_kind_is_told_with_its_option_on_one_line(
    arguments, option, got, capsys
):
    assert cli.main(arguments) == 2
    written = capsys.readouterr().err
    assert written.startswith('taskinfo: error: Parser key "')
    assert option in written
    assert got in written
    assert len(written.splitlines()) == 1


def test_a_value_may_begin_with_a_dash(capsys):
    assert cli.main(["phase-diagram", *SMALL, "--sigma", "-1"]) == 2
    assert (
        capsys.readouterr().err
        == "taskinfo: error: `sigma` must be non-negative and finite, got -1.0.\n"
    )


def test_an_interrupt_ends_with_130_and_a_sentence(monkeypatch, capsys):
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(_parser, "load_command", lambda name: interrupted)
    assert cli.main(["phase-diagram"]) == 130
    assert capsys.readouterr().err.startswith("taskinfo: interrupted; ")


def test_data_of_another_kind_end_with_2_and_their_message(capsys):
    """Without starts, ready data are needed, not those of the user."""
    assert cli.main(["transfer", "--data=tests.transfer.own_nets.DictData"]) == 2
    assert "`data` must be a TransferDataModule" in capsys.readouterr().err


def test_a_computation_that_fails_ends_with_1_and_its_message(monkeypatch, capsys):
    def fails() -> str:
        raise RuntimeError("seed-0 failed")

    monkeypatch.setattr(_parser, "load_command", lambda name: fails)
    assert cli.main(["phase-diagram"]) == 1
    assert capsys.readouterr().err == "taskinfo: error: seed-0 failed\n"


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    shown = " ".join(text.split())
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"{name} {summary}" in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_says_what_each_command_says(name):
    assert " ".join(load_command(name).__doc__.split("\n\n")[0].split()) == cli.COMMANDS[name][1]


@pytest.mark.parametrize("words", [["--help"], [], ["no-such-command"]])
def test_no_command_is_imported_that_is_not_called(words):
    code = f"""
import sys
from lightning_taskinfo import cli
try:
    cli.main({words})
finally:
    print(sorted({{"torch", "lightning", "pytorch_lightning"}} & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("\n[]\n") or done.stderr == "[]\n"


FUNCTIONS = {  # command -> what it calls; defaults of its own: what a shell keeps, shows and spreads; what it fills in
    "certify": (certify, set(), {"model", "data", "unlabelled", "held_out"}),
    "complexity": (structure_function, {"folder"}, {"model_fn", "data", "name"}),
    "distance": (
        task_distance,
        {"beta", "folder", "tasks", "workers"},
        {"tasks", "trunk_fn", "beta"},
    ),
    "embed": (Task2Vec, set(), {"network"}),
    "phase-diagram": (
        plot_phase_map,
        {"mode", "sigma"},
        {"mode", "sigma", "max_gamma", "ax"},
    ),
    "rank": (rank_starts, {"scratch"}, {"models", "data"}),
    "transfer": (transfer, {"folder", "workers", "model", "data"}, {"executor"}),
}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_has_the_options_and_defaults_of_its_function(name):
    function, own, filled = FUNCTIONS[name]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(load_command(name), as_group=False)
    here = parser.get_defaults().as_dict()
    there = signature(function).parameters
    assert there.keys() - here.keys() <= filled
    both = [key for key in there if key in here and key not in filled | own]
    assert both
    for key in both:
        default = there[key].default
        if isclass(default):  # a class is a specification on the command line
            assert here[key]["class_path"].endswith(f".{default.__name__}")
            continue
        assert here[key] == (list(default) if isinstance(here[key], list) else default), key
    for key in own - filled:
        assert here[key] != there[key].default, key


def test_a_configuration_file_holds_options(tmp_path, capsys):
    (tmp_path / "options.yaml").write_text("angles: 0\n")
    assert cli.main(["phase-diagram", f"--config={tmp_path / 'options.yaml'}"]) == 2
    assert capsys.readouterr().err == "taskinfo: error: `angles` must be at least 1, got 0.\n"


def test_the_configuration_that_is_printed_holds_the_arguments_of_the_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["phase-diagram", "--angles=3", "--print_config"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "angles: 3\n" in printed
    assert "depth: 2\n" in printed


def test_runs_as_a_module():
    command = [sys.executable, "-m", "lightning_taskinfo", "no-such-command"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("taskinfo: error: ")
    assert "no-such-command" in done.stderr


def test_says_what_to_install_without_jsonargparse():
    """In a process of its own, where importing jsonargparse fails."""
    code = "import sys; sys.modules['jsonargparse'] = None; from lightning_taskinfo import cli; sys.exit(cli.main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'lightning-taskinfo[cli]'" in done.stderr


def test_a_missing_package_ends_with_1_and_its_name(tmp_path, monkeypatch, capsys):
    """Importing matplotlib fails."""
    for name in {"matplotlib", *sys.modules}:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["phase-diagram", f"--out={tmp_path / 'a.png'}", *SMALL]) == 1
    written = capsys.readouterr().err
    assert written.startswith("taskinfo: error: ")
    assert "matplotlib" in written
