"""Tests stand where the code stands: a module has a test of its name, and a test the name of a module, or a reason."""

from pathlib import Path

from tests.test_layers import PACKAGE

TESTS = Path(__file__).parent
ELSEWHERE = {  # module -> the test of what it is a part of
    "_sharded.py": "callbacks/test_sharded.py",
    "_wandb.py": "test_log_keys.py",
    "cli/_parser.py": "cli/test_main.py",
    "fisher/terms.py": "fisher/test_measure.py",
    "tasks/training.py": "tasks/test_complexity.py",
    "transfer/ranking.py": "transfer/test_rank.py",
    "transfer/ready/data.py": "transfer/test_transfer_data.py",
    "transfer/ready/module.py": "transfer/test_module.py",
    "transfer/run.py": "transfer/test_transfer_run.py",
    "transfer/training.py": "transfer/test_own.py",
}
SUBJECTS = {  # test of several modules -> what it is about
    "callbacks/test_bit_equality.py": "every probe: what is watched ends with the same bits",
    "callbacks/test_code_length.py": "random labels cannot be compressed, by any route",
    "callbacks/test_hugging_face.py": "models of transformers and peft",
    "callbacks/test_ranks.py": "every probe on two processes",
    "callbacks/test_sharded.py": "every probe on sharded weights",
    "callbacks/test_two_lines.py": "two probes without an argument",
    "certificates/test_coverage.py": "how often certificates fail, in simulations",
    "cli/test_commands.py": "the commands of the documentation",
    "cli/test_main.py": "the command line as a whole",
    "fisher/test_hidden.py": "weights that no hook sees",
    "fisher/test_memory.py": "what is kept during a measurement",
    "fisher/test_moved_rows.py": "batches that a network sorts, masks or routes",
    "fisher/test_random_networks.py": "networks drawn at random, beside a loop over samples",
    "fisher/test_shared_modules.py": "modules that are used twice",
    "fisher/test_zoo.py": "networks that people use",
    "tasks/test_digits.py": "complexity and distance of real digits",
    "test_code_blocks.py": "README and documentation",
    "test_default_device.py": "everything, with another default device",
    "test_docs.py": "documentation",
    "test_evidence.py": "documentation",
    "test_evidence_page.py": "documentation",
    "test_evidence_scripts.py": "what the experiments compute",
    "test_evidence_students.py": "a simulation of the experiments",
    "test_examples.py": "examples",
    "test_import.py": "the package as it is imported",
    "test_layer_names.py": "names of layers, wherever they are told",
    "test_layers.py": "which module may import which",
    "test_layout.py": "where tests stand",
    "test_log_keys.py": "the keys of the documentation and of real runs",
    "test_options.py": "the options that messages name",
    "test_prose.py": "documentation",
    "test_public_names.py": "documentation of every public name",
    "test_walks.py": "the maps in CONTRIBUTING.md",
    "transfer/test_certified.py": "certificates in a transfer",
    "transfer/test_interrupt.py": "what an interrupt leaves",
    "transfer/test_module.py": "the ready parts",
    "transfer/test_progress.py": "what is told during a transfer",
    "transfer/test_runlog.py": "the log of a run",
    "transfer/test_splits.py": "which samples have labels",
    "transfer/test_transfer_data.py": "the ready data",
    "transfer/test_transfer_run.py": "a transfer of the ready parts",
    "transfer/test_wandb_report.py": "a report in Weights & Biases",
}


def relative(root, pattern):
    return {str(path.relative_to(root)) for path in root.rglob(pattern)}


def is_test_of(test, module):
    """Whether ``test_x.py`` or ``test_x_in_some_way.py`` stands for ``x.py`` in the folder of the same name."""
    test, module = Path(test), Path(module)
    name = f"test_{module.stem.lstrip('_')}"
    return test.parent == module.parent and f"{test.stem}_".startswith(f"{name}_")


MODULES = {path for path in relative(PACKAGE, "*.py") if not path.endswith("__.py")}
FILES = relative(TESTS, "test_*.py")


def test_every_module_has_a_test_or_is_a_part_of_what_has():
    alone = {m for m in MODULES if not any(is_test_of(test, m) for test in FILES)}
    assert alone == set(ELSEWHERE)
    assert set(ELSEWHERE.values()) <= FILES


def test_every_test_has_the_name_of_a_module_or_a_subject():
    others = {test for test in FILES if not any(is_test_of(test, m) for m in MODULES)}
    assert others == set(SUBJECTS)
