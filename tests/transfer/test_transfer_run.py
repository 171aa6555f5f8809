"""A whole transfer: the same numbers for the same seed, however often it was killed and wherever it ran."""

import random
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_taskinfo._files import read_tensors
from lightning_taskinfo.transfer import TransferReport, transfer
from lightning_taskinfo.transfer.ready import Stages
from lightning_taskinfo.transfer.run import _seeds, _whole_numbers
from lightning_taskinfo.transfer.training import EpochKeeper, Trial
from tests.ranks import forked
from tests.transfer.results import same
from tests.transfer.tiny import STAGES, tiny_data, tiny_net, tiny_task, tiny_trials

METHODS = ["standard", "lautum", "lautum+temporal_ensembling"]


def run(folder=None, *, model=tiny_net, data=None, methods=METHODS, **options):
    options = {"seeds": 1, "stages": STAGES, **options}
    return transfer(model, data or tiny_data(), methods=methods, folder=folder, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return run(folder), folder


def test_every_method_and_seed_is_reported_beside_scratch(reference):
    report, _ = reference
    assert report.methods == ["scratch", *METHODS]
    assert [sorted(report.cell(method, 9)) for method in report.methods] == [[0]] * 4
    row = report.cell("lautum", 9)[0]
    assert [point["stage"] for point in row.curves] == ["pretrain"] * 2 + ["fine_tune"] * 2
    assert row.curves[1]["train_loss"] < row.curves[0]["train_loss"]
    assert row.source["loss"] > 0
    assert report.cell("scratch", 9)[0].source is None


def test_the_same_seed_gives_the_same_numbers(reference):
    assert same(run(), reference[0])


def test_methods_that_pretrain_alike_share_one_pretraining(reference):
    names = sorted(path.stem for path in (reference[1] / "results").glob("pretrain*"))
    assert names == ["pretrain-lautum-seed0", "pretrain-standard-seed0"]


def test_a_finished_run_is_read_and_not_repeated(reference):
    report, folder = reference
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert same(run(folder), report)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_methods_labels_and_seeds_can_be_added(reference, tmp_path):
    report, folder = reference
    grown = shutil.copytree(folder, tmp_path / "grown")
    more = run(grown, methods=["standard"], seeds=2, labels=[9, 18])
    assert more.cell("standard", 9)[0].test == report.cell("standard", 9)[0].test
    assert sorted(more.cell("standard", 18)) == [0, 1]
    fresh = run(methods=["standard"], labels=[18])
    assert more.cell("standard", 18)[0].test == fresh.cell("standard", 18)[0].test


def test_a_changed_configuration_is_refused_with_what_differs(reference):
    _, folder = reference
    with pytest.raises(
        ValueError, match=r"(?s)was begun with another.*stages.fine_tune_epochs: 2 there, 3 now"
    ):
        run(folder, stages=replace(STAGES, fine_tune_epochs=3))
    with pytest.raises(ValueError, match=r"(?s)data.sha256"):
        run(folder, data=tiny_data(target=tiny_task(5, name="target")))


@pytest.mark.slow
def test_other_processes_give_the_same_numbers(reference):
    assert same(run(workers=2), reference[0])


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_numbers(reference, tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert same(run(tmp_path, executor=client.get_executor()), reference[0])


def test_labels_of_the_unlabelled_part_never_reach_the_model(monkeypatch):
    """All labels that the split does not give out are turned into others: nothing changes."""
    from lightning_taskinfo.transfer.ready import data as reading

    monkeypatch.setattr(reading, "chosen_rows", lambda labels, length, *_: np.arange(length))
    task = tiny_task(1, name="target")
    methods = ["lautum+temporal_ensembling", "mutual_information+mk_mmd"]
    y, other = task.y_train.copy(), task.y_train.copy()
    y[9:] = (y[9:] + 1) % 3
    other[:9] = (other[:9] + 1) % 3  # those that are given out do change it
    shown, hidden, changed = (
        TransferReport(
            run(data=tiny_data(target=replace(task, y_train=classes)), methods=methods).results, {}
        )
        for classes in (task.y_train, y, other)
    )
    assert same(shown, hidden)
    losses = [report.cell(methods[0], 9)[0].test["loss"] for report in (shown, changed)]
    assert not np.isclose(*losses)


def test_a_killed_run_continues_from_its_last_epoch_and_ends_the_same(reference, tmp_path):
    """Killed as soon as the first epoch of the first fine-tuning is on the disk."""
    child = forked(run, tmp_path)
    begun = tmp_path / "stages" / "standard-full-9-seed0" / "last.ckpt"
    while not begun.exists():
        assert child.is_alive()
        time.sleep(0.001)
    child.kill()
    child.join()
    assert same(run(tmp_path), reference[0])


def test_a_run_stopped_once_in_every_stage_ends_the_same(reference, tmp_path, monkeypatch):
    from lightning_taskinfo.transfer import training

    written, stopped = training.save_checkpoint, set()

    def stop(trainer, path):
        written(trainer, path)
        if path not in stopped:
            stopped.add(path)
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", stop)
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert len(stopped) == 6
    assert same(run(tmp_path), reference[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_ten_times_ends_the_same(tmp_path):
    """At random moments of one run, wherever it is then: in an epoch, between two, while a file is written."""
    begun = time.perf_counter()
    whole = run(seeds=12)
    seconds = time.perf_counter() - begun
    rng, killed = random.Random(0), []
    for _ in range(10):
        child = forked(run, tmp_path, seeds=12)
        time.sleep(rng.uniform(0.02, 0.1) * seconds)
        killed.append(child.is_alive())
        child.kill()
        child.join()
    assert all(killed), f"the run ended after {killed.index(False)} kills"
    assert (tmp_path / "results").exists(), "no cell was finished between the kills"
    assert same(run(tmp_path, seeds=12), whole)


def test_a_damaged_checkpoint_is_named_and_left(reference, tmp_path):
    folder = shutil.copytree(reference[1], tmp_path / "damaged")
    (folder / "results" / "standard-full-9-seed0.json").unlink()
    last = folder / "stages" / "standard-full-9-seed0" / "last.ckpt"
    last.write_bytes(b"no checkpoint")
    with pytest.raises(
        RuntimeError, match=r"standard-full-9-seed0 failed: .*last.ckpt: .*Delete it"
    ):
        run(folder)
    assert last.read_bytes() == b"no checkpoint"


def test_weights_that_are_not_there_are_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"weights\.pt"):
        read_tensors(tmp_path / "weights.pt", advice="Delete it.")


def test_a_stage_killed_after_its_last_epoch_has_nothing_left_to_train(tmp_path, monkeypatch):
    """Between the last checkpoint and the result: what is left is to test and to measure."""
    monkeypatch.setattr(
        EpochKeeper, "_next_write", property(lambda _: 0.0, lambda *_: None), raising=False
    )
    (cell,) = (cell for cell in tiny_trials(tmp_path) if cell.stage == "scratch")
    first = cell.run()
    (cell.folder / "weights.pt").unlink()
    last = cell.folder / "last.ckpt"
    written = last.stat().st_mtime_ns
    again = cell.run()
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    assert last.stat().st_mtime_ns == written
    assert (cell.folder / "weights.pt").exists()


def test_an_unfinished_checkpoint_is_not_read_and_removed_in_the_end(reference, tmp_path):
    folder = shutil.copytree(reference[1], tmp_path / "killed")
    (folder / "results" / "standard-full-9-seed0.json").unlink()
    (folder / "stages" / "standard-full-9-seed0" / "last.ckpt.0123.tmp").write_bytes(
        b"half a check"
    )
    assert same(run(folder), reference[0])
    assert not list(folder.rglob("*.tmp"))


def test_damaged_weights_are_named_and_trained_again_once_deleted(reference, tmp_path):
    folder = shutil.copytree(reference[1], tmp_path / "damaged")
    (folder / "results" / "standard-full-9-seed0.json").unlink()
    weights = folder / "stages" / "pretrain-standard-seed0" / "weights.pt"
    weights.write_bytes(b"no weights")
    with pytest.raises(RuntimeError, match=r"weights.pt: .*Delete it to have it written again"):
        run(folder)
    weights.unlink()
    assert same(run(folder), reference[0])


def test_a_finished_run_needs_no_weights(reference, tmp_path):
    folder = shutil.copytree(reference[1], tmp_path / "light")
    shutil.rmtree(folder / "stages")
    assert same(run(folder), reference[0])
    assert not (folder / "stages").exists()


def test_workers_with_another_current_folder_write_into_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def stop(trial):
        assert trial.root == tmp_path / "out"
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        run("out")


def test_the_global_generators_are_put_back():
    def drawn():
        return torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002

    def seed():
        torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002

    seed()
    expected = drawn()
    seed()
    run(methods=["standard"], stages=Stages(1, 1))
    assert drawn() == expected


def test_a_linear_probe_leaves_the_pretrained_backbone_as_it_is(tmp_path):
    report = run(tmp_path, methods=["standard"], adapt=["linear", "full"])
    assert report.methods == ["scratch", "standard, linear", "standard, full"]
    pretrained, linear, full = (
        torch.load(tmp_path / "stages" / name / "weights.pt", weights_only=True)
        for name in ("pretrain-standard-seed0", "standard-linear-9-seed0", "standard-full-9-seed0")
    )
    assert {*pretrained} == {"backbone.1.weight", "backbone.1.bias"}
    assert {*linear} == {*full} == {*pretrained, "head.weight", "head.bias"}
    for name, weight in pretrained.items():
        assert torch.equal(weight, linear[name])
        assert not torch.equal(weight, full[name])


def test_noise_is_added_to_what_is_trained(tmp_path):
    report = run(tmp_path, methods=["information"], adapt="linear")
    assert report.methods == ["scratch", "information"]


def test_information_is_measured_from_the_start_and_from_the_pretrained_weights(reference):
    rows = reference[0].cell("standard", 9)[0], reference[0].cell("scratch", 9)[0]
    for row in rows:
        information = row.information
        assert set(information["after"]["layers"]) == {"backbone.1", "head"}
        for part in information.values():
            assert part["total"] == pytest.approx(sum(part["layers"].values()))
    transferred, scratch = (row.information for row in rows)
    assert (
        transferred["before"]["total"] > scratch["before"]["total"]
    )  # pretraining has moved the weights
    assert scratch["added"] == scratch["after"]  # it starts at the origin
    assert transferred["added"]["total"] != transferred["after"]["total"]


def test_the_overlap_is_there_with_enough_labels():
    report = run(methods=["standard"], labels=[9, 21], stages=Stages(1, 1))
    assert report.cell("standard", 9)[0].overlap is None
    overlap = report.cell("standard", 21)[0].overlap
    assert overlap["layers"] == ["0", "1", "2", "3"]
    assert len(overlap["outside"]) == 4


def test_a_saved_report_is_the_same(reference, tmp_path):
    reference[0].save(tmp_path)
    assert same(TransferReport.load(tmp_path / "report.json"), reference[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "laplace"}, "`method` must be one of temporal_ensembling, .* got 'laplace'"),
        (
            {"methods": ["lautum+lautum"]},
            "`method` must not repeat a value, got .'lautum', 'lautum'",
        ),
        ({"methods": ["standard", "scratch"]}, "`method` must be one of .* got 'scratch'"),
        ({"adapt": ["linaer"]}, "`adapt` must be .*'linaer'"),
        ({"certify": True}, "`certify` must be left out without `starts`, got True"),
        ({"methods": []}, "`methods` must not be empty"),
        ({"seeds": 0}, "`seeds` must not be empty"),
        ({"seeds": [0, -1]}, "`seeds` must be non-negative and finite, got -1"),
        ({"seeds": [1, 2, 1]}, r"`seeds` must not repeat a value, got \[1, 2, 1\]"),
        ({"labels": [9, 9]}, r"`labels` must not repeat a value, got \[9, 9\]"),
        ({"model": "vgg"}, "`backbone` must be one of mlp, .* got 'vgg'"),
        ({"model": lambda shape: 1 / 0}, "`model` must make a network, but it failed .*by zero"),
        ({"labels": []}, "`labels` must not be empty"),
        (
            {"labels": [9, 500]},
            "`labels` must be between 1 and the 90 training samples there are, got 500",
        ),
        (
            {"accelerator": "abacus"},
            "`accelerator` must be one that Lightning finds here, got 'abacus'",
        ),
        ({"logger": "paper"}, "`logger` must be one of none, wandb, .* got 'paper'"),
        ({"data": tiny_data(target="nowhere")}, "A dataset must be .*'nowhere' was not found"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_network_in_place_of_its_function_is_refused():
    with pytest.raises(TypeError, match=r"`model` must be a class .* got a Sequential"):
        run(model=tiny_net((1, 8, 8)))


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2)])
def test_numbers_of_other_libraries_are_numbers(number):
    labels, seeds = _whole_numbers("labels", [number, 9]), _seeds(number)
    assert labels == [2, 9]
    assert seeds == [0, 1]
    assert {type(value) for value in [*labels, *seeds]} == {int}


def test_files_of_a_logger_need_a_folder():
    with pytest.raises(
        ValueError,
        match="`folder` must be given for the files of `logger` 'wandb_offline', got None",
    ):
        run(logger="wandb_offline")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pretrain_epochs": 0}, "`pretrain_epochs` must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive, got 0.0"),
    ],
)
def test_bad_stages(arguments, message):
    with pytest.raises(ValueError, match=message):
        Stages(**arguments)


def test_the_initial_weights_depend_on_the_seed_alone(tmp_path):
    """Pretraining and scratch start from the same backbone, whatever the method, and heads are the same."""
    cells = tiny_trials(tmp_path, methods=["lautum"], seeds=(0, 1))
    first, *_ = cells
    heads = first.recipe.starts
    assert torch.equal(
        heads["lautum"].module(0).head.weight, heads["scratch"].module(0).head.weight
    )
    starts = [
        cell.recipe.job(cell).module.backbone[1].weight
        for cell in cells
        if cell.stage != "fine_tune"
    ]  # of two seeds, each pretrained and from scratch
    assert torch.equal(starts[0], starts[1])
    assert torch.equal(starts[2], starts[3])
    assert not torch.equal(starts[0], starts[2])


def test_a_seed_decides_the_labelled_samples(tmp_path):
    cells = [cell for cell in tiny_trials(tmp_path, seeds=(0, 1)) if cell.stage == "scratch"]
    first, second = (cell.recipe.job(cell).fit["datamodule"].labeled for cell in cells)
    assert first.index.tolist() != second.index.tolist()


def test_the_package_can_be_called_as_its_function():
    from lightning_taskinfo import transfer as package

    with pytest.raises(TypeError, match=r"^`data` must be a TransferDataModule"):
        package("mlp", "digits")
