"""Every block of Python in the README and the documentation runs; ``test_commands.py`` runs the commands."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.documented import PRELUDE, PRELUDES, SHORTER
from tests.pages import BLOCK, COMMANDS, OTHER, PAGES, PYTHON, ROOT, SHELL, blocks, name_of

SLOW_PAGES = {"docs/how-to/many-machines.md"}  # a cluster


def source(match):
    """Return the code of a block; of a diff, what it is afterwards."""
    if match["language"] == "python":
        return match["text"]
    lines = match["text"].splitlines()
    return "\n".join(line[2:] for line in lines if not line.startswith("-"))


def marked(pages):
    slow = pytest.mark.slow
    return [
        pytest.param(p, id=name_of(p), marks=[slow] * (name_of(p) in SLOW_PAGES)) for p in pages
    ]


def test_every_block_has_a_language_that_is_checked():
    for page in PAGES:
        assert page.read_text().count("\n```") == 2 * len(blocks(page, PYTHON | SHELL | OTHER)), (
            name_of(page)
        )


def test_there_are_no_preludes_for_pages_that_are_gone():
    with_code = {name_of(page) for page in PAGES if blocks(page, PYTHON)}
    assert set(PRELUDES) | set(SHORTER) <= with_code


@pytest.mark.filterwarnings("ignore:::pytorch_lightning", "ignore:::torch")
@pytest.mark.parametrize("page", marked([page for page in PAGES if blocks(page, PYTHON)]))
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    exec(PRELUDE + PRELUDES.get(name_of(page), ""), namespace)
    shorter = SHORTER.get(name_of(page), {})
    for match in blocks(page, PYTHON):
        text = source(match)
        for long, short in shorter.items():
            text = text.replace(long, short)
        exec(compile(text, f"{name_of(page)} near character {match.start()}", "exec"), namespace)
    written = page.read_text()
    assert all(long in written for long in shorter)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command):
    words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
    check = CHECKS.get(words[0])
    assert check is not None, f"nobody checks {command!r} of {COMMANDS[command]}"
    check(words)


def check_make(words):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(words[1:]) <= set(targets)


def check_pip(words):
    section = (
        (ROOT / "pyproject.toml")
        .read_text()
        .split("[project.optional-dependencies]\n")[1]
        .split("\n[")[0]
    )
    for word in words[2:]:
        name, _, extras = word.rstrip("]").partition("[")
        assert name == "."
        assert set(filter(None, extras.split(","))) <= set(re.findall(r"^(\w+) = ", section, re.M))


def check_python(words):
    script = words[1]
    if script == "train.py":  # the reader's own
        return
    text = (ROOT / script).read_text()  # those with `--fast` are run by test_examples
    if script.startswith("benchmarks/evidence/"):  # `make evidence` runs all with `--short`
        assert words[2:] == ["--short"]
        assert "Experiment(" in text
        return
    assert '"--fast"' in text or script == "examples/watch.py"


def check_wandb(words):
    from wandb.cli.cli import cli

    assert words[1] in cli.commands


def check_taskinfo(words):
    """Parse the arguments of the command, without running it; those of a reader's own class are run elsewhere."""
    from jsonargparse import ArgumentParser

    from lightning_taskinfo.cli._parser import load_command

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_function_arguments(load_command(words[1]), as_group=False)
    known = {word for action in parser._actions for word in action.option_strings}
    options = {re.split("[.=]", word)[0] for word in words[2:] if word.startswith("--")}
    assert options <= known


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "taskinfo": check_taskinfo,
    "wandb": check_wandb,
    "git": lambda words: None,
    "cd": lambda words: None,
}


def yaml_blocks(page):
    import yaml

    return [yaml.safe_load(match["text"]) for match in blocks(ROOT / page, {"yaml"})]


def watch(*arguments, folder):
    command = [sys.executable, ROOT / "examples" / "watch.py", "fit", *arguments]
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PATH": "", "HOME": str(folder)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_yaml_of_the_lightning_cli_is_accepted(tmp_path):
    import yaml

    whole, callbacks = yaml_blocks("docs/how-to/lightning-cli.md")
    (tmp_path / "my_package").mkdir()  # the reader's own
    (tmp_path / "my_package" / "batches.py").write_text(
        "def image_and_label(batch):\n    return batch\n"
    )
    for block in (whole, {"trainer": {"callbacks": callbacks}}):
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(block))
        done = watch("--config", config, "--print_config", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        read, written = (
            [c["class_path"] for c in text["trainer"]["callbacks"]]
            for text in (yaml.safe_load(done.stdout), block)
        )
        assert read == written
        assert len(read) == 2


@pytest.mark.slow
def test_the_sweep_runs_a_command_that_the_cli_accepts(tmp_path):
    (sweep,) = yaml_blocks("docs/how-to/sweep.md")
    assert (ROOT / sweep["program"]).is_file()
    arguments = [word for word in sweep["command"] if not word.startswith("$")]
    assert arguments[0] == "fit"
    values = [f"--{name}={choices['values'][0]}" for name, choices in sweep["parameters"].items()]
    done = watch(*arguments[1:], *values, "--print_config", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lr: 0.0005" in done.stdout


def test_linked_files_and_pictures_are_there():
    link = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
    for page in PAGES:
        for target in link.findall(BLOCK.sub("", page.read_text())):
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
