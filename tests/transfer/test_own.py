"""``transfer`` with a user's own module, data and starts."""

import copy
import json
import pickle
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.mixins import MutualInformationMixin
from lightning_taskinfo.regularizers import MutualInformation
from lightning_taskinfo.transfer import TransferReport, transfer
from lightning_taskinfo.transfer.own import _plain
from lightning_taskinfo.transfer.starts import Start
from lightning_taskinfo.transfer.training import Trial
from tests.ranks import forked
from tests.transfer.own_nets import (
    Averaged,
    Averaging,
    Decaying,
    Deep,
    DictData,
    DictNet,
    Diverging,
    Hooked,
    Late,
    Lazy,
    Net,
    Normalised,
    Other,
    Pair,
    Percent,
    Places,
    Regression,
    Silent,
    Slower,
    SomeSamples,
    Split,
    TextData,
    TextNet,
    Twins,
    Unbatched,
    Validated,
    Waiting,
    WaitingForValidation,
    YesOrNo,
    clusters,
    freeze_first,
)
from tests.transfer.results import same

DATA = {"train": clusters(90, 3), "test": clusters(60, 3, seed=1)}
TRAINER = {"max_epochs": 4}


class GradientClipping(Callback):
    """A callback of a user's own, without a state."""

    def __init__(self, largest):
        self.largest = largest
        self.names = partial(int)


@cache
def pretrained(make, steps=60, **options):
    """The state of a network that was trained on more samples, maybe with other classes."""
    torch.manual_seed(0)
    net = make(**options)
    x, y = clusters(300, options.get("classes", 3), seed=5)
    optimizer = net.configure_optimizers()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def run(folder=None, *, make=Net, data=DATA, starts=None, **options):
    starts = {"four": pretrained(Net, classes=4)} if starts is None else starts
    options = {
        "labels": 12,
        "seeds": 2,
        "trainer": TRAINER,
        "metric": "test_error",
        "progress": False,
        **options,
    }
    return transfer(make, data, starts=starts, folder=folder, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return run(folder), folder


def test_every_start_is_compared_with_scratch_by_the_metric(reference):
    report, folder = reference
    assert report.methods == ["scratch", "four"]
    (gain,) = report.transferability()
    assert (gain.method, gain.measure, gain.gain.n) == ("four", "test_error", 2)
    assert sorted(path.stem for path in (folder / "results").iterdir()) == [
        "four-full-12-seed0", "four-full-12-seed1", "scratch-full-12-seed0", "scratch-full-12-seed1",
    ]  # fmt: skip


def test_the_report_shows_the_metric_and_is_saved_and_read(reference, tmp_path):
    report, _ = reference
    files = report.save(tmp_path)
    assert same(TransferReport.load(tmp_path), report)
    for text in (
        report.to_terminal(),
        files["report.md"].read_text(),
    ):
        assert "test_error" in text
        assert "accuracy" not in text.lower().replace("accuracy.png", "")
    assert "accuracy.png" in files


def test_the_same_seed_gives_the_same_numbers_and_a_finished_run_is_read(reference):
    report, folder = reference
    assert same(run(), report)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert same(run(folder), report)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_starts_ways_labels_and_seeds_can_be_added_and_nothing_else_changed(
    reference, tmp_path, monkeypatch
):
    report, folder = reference
    grown = shutil.copytree(folder, tmp_path / "grown")
    more = {"four": pretrained(Net, classes=4), "other": Other}
    wide = run(grown, starts=more, adapt=["full", "linear"], labels=[12, 30], seeds=3)
    assert wide.methods == ["scratch", "four, full", "four, linear", "other, full", "other, linear"]
    assert wide.cell("four, full", 12)[0].test == report.cell("four", 12)[0].test
    assert len(wide.results) == 30
    with pytest.raises(ValueError, match=r"(?s)trainer.max_epochs: 4 there, 5 now"):
        run(grown, trainer={"max_epochs": 5})
    with pytest.raises(ValueError, match=r"(?s)starts/four was begun with another.*weights"):
        run(grown, starts={"four": pretrained(Net, steps=9, classes=4)})
    with pytest.raises(ValueError, match=r"(?s)another:\s+data.test: .* there, .* now$"):
        run(grown, data={**DATA, "test": clusters(60, 3, seed=3)})
    with pytest.raises(ValueError, match=r"(?s)another:\s+data.training: .* there, .* now$"):
        run(grown, data={**DATA, "train": clusters(90, 3, seed=3)})
    for module, change in CHANGED.items():
        module.__qualname__ = "Net"  # the same class, changed by its author
        with pytest.raises(ValueError, match=f"(?s){change}"):
            run(grown, make=module)
    monkeypatch.setattr(Other, "configure_optimizers", Slower.configure_optimizers)
    with pytest.raises(ValueError, match=r"(?s)starts/other was begun with another.*optimizers"):
        run(grown, starts=more)


def test_callbacks_may_need_the_logger_of_a_run(tmp_path, monkeypatch):
    from lightning_taskinfo.transfer import training

    runs = CSVLogger(tmp_path)
    monkeypatch.setattr(training.RunLog, "run", lambda *_: nullcontext(runs))
    trainer = {"max_epochs": 1, "callbacks": [LearningRateMonitor()]}
    options = {"trainer": trainer, "seeds": 1}
    run(tmp_path / "a", **options, logger="wandb_offline")
    assert "lr-Adam" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    with pytest.raises(ValueError, match="has no logger"):
        run(tmp_path / "b", **options)


@dataclass
class Maker:
    """Makes networks; without a hash, as it can be compared and changed."""

    classes: int

    def __call__(self):
        return Net(self.classes)


def test_networks_are_made_by_functions_of_any_kind(reference):
    start = pretrained(Net, classes=4)
    found = run(make=Maker(3), starts={"four": start, "own": Maker(3)})
    assert found.cell("four", 12)[0].test == reference[0].cell("four", 12)[0].test


def test_a_run_goes_on_with_data_that_are_split_at_random(tmp_path):
    first = run(tmp_path, make=DictNet, data=Split(), labels=6, seeds=1)
    torch.manual_seed(5)
    again = run(tmp_path, make=DictNet, data=Split(), labels=6, seeds=1)
    assert same(first, again)


def test_test_samples_without_a_label_may_come_first():
    x, y = clusters(300, 3, seed=1)
    unknown = y.clone()
    unknown[:260] = -100
    options = {"metric": None, "seeds": 1}
    whole = run(data={**DATA, "test": (x, unknown)}, **options)
    rest = run(data={**DATA, "test": (x[260:], y[260:])}, **options)
    for ours, theirs in zip(whole.results, rest.results, strict=True):
        assert ours.test == theirs.test


def test_labels_ways_and_starts_are_added_to_modules_with_schedules_and_rates_of_parts(tmp_path):
    """What a schedule has seen, and which parts a way trains, is not what a folder is known by."""
    options = {"make": Waiting, "batch_size": 8}
    before = run(tmp_path, **options, labels=6)
    starts = {"four": pretrained(Net, classes=4), "other": pretrained(Net, steps=9, classes=4)}
    after = run(tmp_path, **options, labels=[6, 30], adapt=["full", "linear"], starts=starts)
    for ours, theirs in (("four", "four, full"), ("scratch", "scratch")):
        assert after.cell(theirs, 6)[0].test == before.cell(ours, 6)[0].test


@pytest.mark.parametrize(
    "often", [{"check_val_every_n_epoch": 1}, {"val_check_interval": 4}], ids=str
)
def test_what_is_seen_in_validation_can_be_monitored(often):
    data = {**DATA, "validation": clusters(40, 3, seed=2)}
    trainer = {**TRAINER, **often, "callbacks": [EarlyStopping("val_error", patience=9)]}
    options = {"data": data, "trainer": trainer, "labels": 30, "batch_size": 6, "seeds": 1}
    report = run(make=WaitingForValidation, **options)
    assert len(report.results[0].curves) == 4
    assert "val_error" in report.results[0].curves[-1]


CHANGED = {
    Slower: r"optimizers.*0\.02.* there.*0\.001.* now",
    Decaying: r"schedules.* there.*StepLR.* now",
    Silent: "network: .* there, .* now",
}


def test_all_starts_of_a_seed_have_the_same_labels_in_equal_shares(monkeypatch):
    from lightning_taskinfo.transfer import training

    seen = []

    def remember(job, *rest):
        seen.append(job.fit["train_dataloaders"].dataset)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "fit_stage", remember)
    for seeds in ([0], [1]):
        with pytest.raises(KeyboardInterrupt):
            run(seeds=seeds, labels=[12])
    for drawn in seen:
        assert torch.bincount(DATA["train"][1][drawn.rows]).tolist() == [4, 4, 4]
    assert not np.array_equal(seen[0].rows, seen[1].rows)


def test_dict_batches_of_a_data_module_with_augmentation():
    state = pretrained(DictNet, classes=4)
    reports = [
        run(make=DictNet, data=DictData(), starts={"four": state}, seeds=1) for _ in range(2)
    ]
    assert same(reports[0], reports[1])
    error = run(make=DictNet, data=DictData(), starts={"four": state}, seeds=1, metric=None)
    assert list(error.results[0].test) == ["error"]
    for ours, theirs in zip(error.results, reports[0].results, strict=True):
        assert ours.test["error"] == pytest.approx(theirs.test["test_error"], abs=1e-6)


def test_a_checkpoint_that_was_read_is_a_start(reference):
    checkpoint = {"state_dict": pretrained(Net, classes=4), "epoch": 3}
    found = run(starts={"four": checkpoint})
    assert found.cell("four", 12)[0].test == reference[0].cell("four", 12)[0].test


@pytest.mark.parametrize("kind", ["checkpoint", "inner", "file"])
def test_checkpoints_of_files(tmp_path, reference, kind):
    state = pretrained(Net, classes=4)
    content = {
        "checkpoint": {"state_dict": state, "hyper_parameters": {"classes": 4}},
        "inner": {"state_dict": {f"model.net.{name}": tensor for name, tensor in state.items()}},
        "file": state,
    }[kind]
    torch.save(content, tmp_path / "four.ckpt")
    found = run(starts={"four": tmp_path / "four.ckpt"})
    assert found.cell("four", 12)[0].test == reference[0].cell("four", 12)[0].test


def test_a_head_that_fits_is_taken_and_one_that_does_not_is_fresh():
    report = run(
        starts={"whole": pretrained(Net), "body": pretrained(Net, classes=4)},
        adapt=["linear"],
        seeds=1,
    )
    errors = {name: report.cell(name, 12)[0].test["test_error"] for name in report.methods}
    assert errors["whole"] < min(errors["body"], errors["scratch"])


def test_a_linear_way_trains_the_last_layer_and_what_is_fresh(tmp_path):
    state = {name: w for name, w in pretrained(Net).items() if name != "body.0.bias"}
    run(tmp_path, starts={"a": state}, adapt=["linear"], seeds=1, trainer={"max_steps": 1})
    stored = tmp_path / "stages" / "a-linear-12-seed0" / "weights.pt"
    kept = torch.load(stored, weights_only=True)
    assert {*kept} == {"body.0.bias", "head.weight", "head.bias"}


def test_parts_that_were_compiled_are_found_by_their_names(reference):
    state = pretrained(Net, classes=4)
    compiled = {name.replace(".0.", ".0._orig_mod."): tensor for name, tensor in state.items()}
    found = run(starts={"four": compiled})
    assert found.cell("four", 12)[0].test == reference[0].cell("four", 12)[0].test


def test_statistics_that_a_start_does_not_have_are_warned_about():
    state = pretrained(Net, classes=4)
    state = {name: tensor for name, tensor in state.items() if "running" not in name}
    with pytest.warns(TaskInfoWarning, match=r"`starts\['four'\]` has no body.1.running_mean"):
        run(starts={"four": state}, seeds=1, trainer={"max_steps": 1})


KEPT = (
    "the last layer too (head.weight, head.bias); "
    "if its classes are others, leave it out of the state dict"
)
ORIGINS = {
    "whole": f"all weights are taken over, {KEPT}",
    "four": "fresh head.weight, head.bias; all other weights are taken over",
    "headless": "fresh head.weight, head.bias; all other weights are taken over",
    "wide": f"fresh body.0.weight; all other weights are taken over, {KEPT}",
    "other": "all weights as its function makes them",
}


def test_which_weights_of_a_start_are_fresh_is_printed_first_and_stands_in_the_report(
    tmp_path, capsys
):
    whole = pretrained(Net)
    starts = {
        "whole": whole,
        "four": pretrained(Net, classes=4),
        "headless": {name: tensor for name, tensor in whole.items() if "head" not in name},
        "wide": {**whole, "body.0.weight": torch.zeros(16, 9)},
        "other": Other,
    }
    report = run(starts=starts, seeds=1, trainer={"max_steps": 1}, progress=True)
    printed = capsys.readouterr().err.splitlines()[1:6]
    assert printed == [f"transfer: start {name}: {origin}" for name, origin in ORIGINS.items()]
    assert report.starts == ORIGINS
    files = report.save(tmp_path)
    assert TransferReport.load(tmp_path).starts == ORIGINS
    for text in (report.to_terminal(), files["report.md"].read_text().replace("\\", "")):
        assert all(f"Start {name}: {origin}." in text for name, origin in ORIGINS.items())


def test_a_report_of_an_earlier_version_without_its_starts_is_read(reference, tmp_path):
    report, _ = reference
    path = report.save(tmp_path)["report.json"]
    values = json.loads(path.read_text())
    del values["starts"]
    path.write_text(json.dumps(values))
    assert TransferReport.load(path).starts == {}
    assert not same(TransferReport.load(path), report)


def test_another_architecture_is_compared_too():
    report = run(starts={"other": Other, "mine": Net}, seeds=1)
    assert report.methods == ["scratch", "other", "mine"]
    assert (
        report.cell("mine", 12)[0].test == report.cell("scratch", 12)[0].test
    )  # a start that is scratch
    assert report.cell("other", 12)[0].test != report.cell("scratch", 12)[0].test


def test_ways_to_adapt_train_what_they_say(tmp_path):
    state = pretrained(Net, classes=4)
    run(
        tmp_path,
        starts={"four": state},
        adapt=["full", "linear", "lora", "body.1", freeze_first],
        seeds=1,
    )
    kept = {way: torch.load(tmp_path / "stages" / f"four-{way}-12-seed0" / "weights.pt", weights_only=True)
            for way in ("full", "linear", "lora", "body.1", "freeze_first")}  # fmt: skip
    head = {"head.weight", "head.bias"}
    everything = {name for name, _ in Net().named_parameters()}
    assert {*kept["full"]} == everything
    assert {*kept["linear"]} == head
    assert {*kept["body.1"]} == head | {"body.4.weight", "body.4.bias"}
    assert {*kept["freeze_first"]} == everything - {"body.0.weight", "body.0.bias"}
    adapters = {*kept["lora"]} - head
    assert adapters
    assert all("lora_" in name for name in adapters)
    assert {name.partition(".lora")[0] for name in adapters} == {"body.0", "body.4"}


def test_frozen_parts_keep_their_statistics():
    from lightning_taskinfo.transfer.starts import adapted
    from lightning_taskinfo.transfer.training import EpochKeeper

    net = adapted(Net(), "linear", ["head.weight", "head.bias"])
    EpochKeeper((0,)).on_train_epoch_start(None, net)
    assert not net.body.training
    assert net.head.training


class Penalised(MutualInformationMixin, Net):
    """Whose critic is trained by its regularizer, and by no optimizer of the module."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__(classes)
        self.mutual_information = MutualInformation((6,), 8, weight=0.1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = super().training_step(batch, batch_idx)
        return loss + self.mutual_information_penalty(x, self.body(x))


def test_a_critic_is_trained_and_goes_on_where_it_was(tmp_path, monkeypatch):
    from lightning_taskinfo.transfer import training

    options = {"make": Penalised, "starts": {"mine": Penalised}, "seeds": 1}
    whole = run(**options)
    written = training.save_checkpoint
    critics = []

    def stop(trainer, path):
        written(trainer, path)
        state = torch.load(path, weights_only=True)["state_dict"]
        critics.append({name: x for name, x in state.items() if "critic" in name})
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **options)
    fresh = Start(Penalised, {}).module(0).state_dict()
    (kept,) = critics
    assert kept
    assert not any(torch.equal(x, fresh[name]) for name, x in kept.items() if x.ndim > 1)
    monkeypatch.undo()
    assert same(run(tmp_path, **options), whole)


def test_text_with_adapters():
    torch.manual_seed(1)
    start = TextNet(classes=5)
    report = run(
        make=TextNet, data=TextData(), starts={"wiki": start.state_dict()}, adapt=["full", "lora"], labels=20, seeds=2,
        metric=None, trainer={"max_steps": 12},
    )  # fmt: skip
    assert report.methods == ["scratch", "wiki, full", "wiki, lora"]
    assert all(0 <= row.test["error"] <= 1 for row in report.results)


def test_regression_is_compared_by_its_squared_error():
    x, _ = clusters(90, 3)
    y = x[:, 0] - x[:, 1]
    torch.manual_seed(0)
    report = run(
        make=Regression, data={"train": (x[:60].numpy(), y[:60].numpy()), "test": (x[60:], y[60:])}, labels=[10, 40],
        starts={"before": Regression().state_dict()}, metric=None,
    )  # fmt: skip
    assert [measure.name for measure in report.measures] == ["squared error"]
    assert not report.measures[0].higher
    assert "squared error" in report.to_markdown()


@pytest.mark.parametrize("axis", [1, 2])
def test_the_plain_error_of_places_is_on_either_axis_of_the_classes(axis):
    x = torch.randn(40, 15, generator=torch.Generator().manual_seed(0))
    right = x.view(40, 5, 3).argmax(2)
    y = torch.where(torch.arange(5) < 2, (right + 1) % 3, right)  # wrong at two places of five
    make = partial(Places, axis)
    report = run(
        make=make, data={"train": (x, y), "test": (x, y)}, starts={"a": make}, metric=None, seeds=1
    )
    assert [result.test["error"] for result in report.results] == pytest.approx([0.4, 0.4])


def test_one_logit_is_compared_by_a_metric():
    data = {"train": clusters(90, 2), "test": clusters(60, 2, seed=1)}
    report = run(make=YesOrNo, data=data, starts={"again": YesOrNo}, seeds=1)
    one, other = (result.test["test_error"] for result in report.results)
    assert one == other < 0.5


def test_a_higher_metric_can_be_better(reference):
    results = reference[0].results
    rows = [
        replace(result, test={"test_accuracy": 1 - result.test["test_error"]}) for result in results
    ]
    (gain,) = TransferReport(rows, {}).transferability()
    assert gain.gain.mean == pytest.approx(reference[0].transferability()[0].gain.mean)
    (other,) = TransferReport(rows, {"mode": "min"}).transferability()
    assert other.gain.mean == pytest.approx(-gain.gain.mean)


def kill_when(folder, ready):
    """Start the run in another process, and kill it as soon as it is ready."""
    child = forked(run, folder)
    while child.is_alive() and not ready():
        time.sleep(0.002)
    child.kill()
    child.join()


def test_a_killed_run_ends_with_the_same_report(reference, tmp_path):
    kill_when(tmp_path, lambda: any(tmp_path.rglob("last.ckpt")))
    kill_when(tmp_path, lambda: len([*tmp_path.rglob("results/*.json")]) >= 2)
    assert (tmp_path / "configuration.json").exists()
    assert same(run(tmp_path), reference[0])
    assert not [*tmp_path.rglob("*.tmp")]
    assert not [*tmp_path.rglob("last.ckpt")]


def test_a_run_goes_on_from_its_last_epoch(tmp_path, monkeypatch):
    """Bit for bit, with adapters, whose frozen base is not in the checkpoint."""
    from lightning_taskinfo.transfer import training

    whole = run(adapt=["lora"], seeds=1)
    written = training.save_checkpoint

    def stop(trainer, path):
        written(trainer, path)
        if "four" in str(path):
            assert not [
                name
                for name in torch.load(path, weights_only=True)["state_dict"]
                if "base_layer" in name
            ]
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, adapt=["lora"], seeds=1)
    assert [*tmp_path.rglob("last.ckpt")]
    monkeypatch.setattr(training, "save_checkpoint", written)
    assert same(run(tmp_path, adapt=["lora"], seeds=1), whole)


@pytest.mark.parametrize(
    ("trainer", "writes"),
    [
        ({"max_epochs": 4}, 2),
        ({"max_steps": 11}, 1),
        ({"max_steps": 11}, 4),
        ({"max_steps": 12, "max_epochs": 9}, 3),
    ],
    ids=str,
)
def test_a_run_goes_on_between_epochs_whatever_its_length_is_given_by(
    tmp_path, monkeypatch, trainer, writes
):
    """With schedulers that step once an epoch, after its end; the fourth write comes after training."""
    from lightning_taskinfo.transfer import training

    options = {"make": Decaying, "trainer": trainer, "batch_size": 4, "seeds": 1}
    whole = run(**options)
    assert [row["epoch"] for row in whole.results[0].curves] == [1, 2, 3, 4]
    written, paths = training.save_checkpoint, []

    def stop(trainer, path):
        written(trainer, path)
        paths.append(path)
        if len(paths) == writes:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", stop)
    monkeypatch.setattr(training.time, "monotonic", lambda: 0.0)  # or some epochs are not written
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **options)
    assert len({*paths}) == 1
    monkeypatch.undo()
    assert same(run(tmp_path, **options), whole)


@pytest.mark.parametrize("adapt", ["full", "linear"])
def test_a_run_that_is_killed_while_it_is_tested_is_tested_with_the_same_weights(
    tmp_path, monkeypatch, adapt
):
    from lightning_taskinfo.transfer import training

    options = {"make": Averaged, "adapt": adapt, "seeds": 1}
    options["trainer"] = {**TRAINER, "callbacks": [Averaging()]}
    whole = run(**options)
    written = training.save_checkpoint

    def stop(trainer, path):
        written(trainer, path)
        if "four" in str(path) and trainer.current_epoch == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **options)
    monkeypatch.setattr(training, "save_checkpoint", written)
    assert same(run(tmp_path, **options), whole)


def test_a_metric_of_every_second_epoch_is_not_lost_when_a_run_goes_on(tmp_path, monkeypatch):
    from lightning_taskinfo.transfer import training

    options = {
        "make": Validated,
        "data": {**DATA, "validation": clusters(30, 3, seed=2)},
        "trainer": {**TRAINER, "check_val_every_n_epoch": 2},
        "seeds": 1,
    }
    whole = run(**options)
    assert [point.get("val_error") is None for point in whole.results[0].curves] == [
        True, False, False, False,
    ]  # fmt: skip
    written = training.save_checkpoint

    def stop(trainer, path):
        written(trainer, path)
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt

    still = {"monotonic": lambda: 0.0}  # writing takes no time
    clock = SimpleNamespace(**still, perf_counter=time.perf_counter)
    monkeypatch.setattr(training, "time", clock)
    monkeypatch.setattr(training, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **options)
    monkeypatch.undo()
    assert same(run(tmp_path, **options), whole)


def test_runs_do_not_carry_the_weights_of_starts(tmp_path, monkeypatch):
    wide = {**pretrained(Net, classes=4), "extra.weight": torch.zeros(10**6)}
    seen = []
    trained = Trial.run

    def sized(trial):
        seen.append(len(pickle.dumps(trial)))
        return trained(trial)

    monkeypatch.setattr(Trial, "run", sized)
    run(tmp_path, starts={"four": wide}, seeds=1)
    assert len(seen) == 2
    assert max(seen) < 100_000
    stored = tmp_path / "starts" / "four" / "weights.pt"
    assert stored.stat().st_size < 100_000, "what does not fit is not kept"
    whole = stored.read_bytes()
    weight = torch.load(stored, weights_only=True)["body.0.weight"].numpy().tobytes()
    place = whole.index(weight)
    stored.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(RuntimeError, match=r"weights\.pt: .*checksum.*Delete it"):
        run(tmp_path, starts={"four": wide}, seeds=2)


def test_a_flipped_byte_in_a_checkpoint_is_noticed(tmp_path, monkeypatch):
    from lightning_taskinfo.transfer import training

    written = training.save_checkpoint

    def stop(trainer, path):
        written(trainer, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, seeds=1)
    monkeypatch.undo()
    (last,) = tmp_path.rglob("last.ckpt")
    whole = last.read_bytes()
    weight = torch.load(last, weights_only=True)["state_dict"]["head.weight"].numpy().tobytes()
    place = whole.index(weight)
    last.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(RuntimeError, match=r"last\.ckpt: .*checksum.*Delete it"):
        run(tmp_path, seeds=1)
    last.unlink()
    assert same(run(tmp_path, seeds=1), run(seeds=1))


@pytest.mark.slow
def test_two_processes_give_the_same_numbers(reference):
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


def test_the_number_of_runs_and_the_time_come_first(capsys):
    run(progress=True, seeds=1)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("transfer: 2 trainings of about ")


ONE_CLASS = (torch.randn(20, 6), torch.zeros(20, dtype=torch.long))
OUT_OF_RANGE = (DATA["train"][0], DATA["train"][1].clone())
OUT_OF_RANGE[1][-1] = 7
NOT_FINITE = (DATA["train"][0].clone(), DATA["train"][1])
NOT_FINITE[0][5, 0] = float("nan")
FEW_LABELS = (DATA["train"][0], DATA["train"][1].clone())
FEW_LABELS[1][4:] = -100
YES = (DATA["train"][0], (DATA["train"][1] > 0).float())
SQUARE = (torch.randn(30, 9), torch.randint(3, (30, 3)))
ONE_NET = Net()
BAD = {
    "a state dict that does not fit": (
        {"starts": {"a": Deep().state_dict()}},
        r"`starts\['a'\]` must fit",
    ),
    "no common weights": (
        {"starts": {"a": Other().state_dict()}},
        r"`starts\['a'\]` must fit `model` but for its head, got weights for 0 of 8 parameters",
    ),
    "no tensors": ({"starts": {"a": {"w": 1}}}, r"`starts\['a'\]`"),
    "not a number": (
        {"starts": {"a": {k: v * float("nan") for k, v in Net().state_dict().items()}}},
        r"finite",
    ),
    "no file": (
        {"starts": {"a": "nowhere.ckpt"}},
        r"`starts\['a'\]` must be the file .*nowhere.ckpt",
    ),
    "a module": ({"starts": {"a": Net()}}, r"`starts\['a'\]`"),
    "no starts": ({"starts": {}}, "`starts` must hold at least one"),
    "scratch itself": ({"starts": {"scratch": Net}}, "`starts` must have names"),
    "a path as a name": ({"starts": {"a/b": Net}}, "`starts` must have names"),
    "an empty target": (
        {"data": {"train": DATA["train"], "test": (torch.zeros(0, 6), torch.zeros(0))}},
        "`data` must",
    ),
    "no test set": ({"data": {"train": DATA["train"]}}, "`data` must have the parts"),
    "too many labels": ({"labels": [91]}, "`labels` must be between 1 and the 90"),
    "too few labels": ({"labels": [2]}, "`labels` must give every one of the 3 classes"),
    "no labels": ({"labels": []}, "`labels` must not be empty"),
    "one class": (
        {"data": {"train": ONE_CLASS, "test": ONE_CLASS}},
        "`data` must have .* at least two classes",
    ),
    "one certified class": (
        {"data": {"train": ONE_CLASS, "test": ONE_CLASS}, "certify": True},
        "`data` must have .* at least two classes",
    ),
    "a certified sample without a label": (
        {"data": {"train": FEW_LABELS, "test": DATA["test"]}, "certify": True},
        "`data` must have labels, and one for each sample with `certify`, got -100",
    ),
    "a test set without labels": (
        {"data": {"train": DATA["train"], "test": (DATA["test"][0], DATA["test"][1] * 0 - 100)}},
        "`data` must have labels, .*got -100",
    ),
    "what other processes cannot import": (
        {"make": lambda: Net(), "workers": 2},
        "`workers` must be 0 where `model`, a start, `adapt` or `data` cannot be pickled",
    ),
    "labels out of range": (
        {"data": {"train": OUT_OF_RANGE, "test": DATA["test"]}},
        "`data` must have classes from 0 to 2, the outputs of Net, got 7",
    ),
    "negative labels": (
        {"data": {"train": (OUT_OF_RANGE[0], OUT_OF_RANGE[1] - 1), "test": DATA["test"]}},
        "`data` must have classes from 0 to 2, the outputs of Net, got -1",
    ),
    "certified duplicates": (
        {"data": {"train": DATA["test"], "test": DATA["test"]}, "certify": True},
        "`data` must be inputs that nothing else was done with, got .* the labelled samples",
    ),
    "a metric that is not logged": (
        {"metric": "test_loss"},
        "`metric` must .*'test_loss'; it logs test_error",
    ),
    "an unknown way": ({"adapt": ["linaer"]}, "`adapt` must be .*'linaer'"),
    "a way that leaves nothing": ({"adapt": ["head"]}, "`adapt` must leave something to train"),
    "no way": ({"adapt": []}, "`adapt` must not be empty"),
    "a way twice": ({"adapt": ["full", "full"]}, "`adapt` must not repeat a value"),
    "a module in place of its class": (
        {"make": Net()},
        "`model` must be a class or a function .*got a Net, a network already",
    ),
    "a name in place of a class": (
        {"make": "small_cnn"},
        "`model` must make a network, .*'str' object is not callable",
    ),
    "no module": ({"make": lambda: torch.nn.Linear(1, 1)}, "`model` must make a LightningModule"),
    "a failing module": (
        {"make": lambda: 1 / 0},
        "`model` must make a network, but it failed",
    ),
    "other inputs": (
        {"data": {"train": (torch.randn(30, 5), torch.arange(30) % 3), "test": DATA["test"]}},
        "`data`",
    ),
    "a test label out of range": (
        {"data": {"train": DATA["train"], "test": OUT_OF_RANGE}},
        "`data` must have classes from 0 to 2, the outputs of Net, got 7",
    ),
    "two networks in one": (
        {
            "starts": {
                "a": {
                    f"{who}.{name}": w
                    for who in ("student", "teacher")
                    for name, w in Net().state_dict().items()
                }
            }
        },
        r"`starts\['a'\]` must hold one set of weights for `model`, got 'student.' and 'teacher.'",
    ),
    "two places for one network": (
        {"make": Twins, "starts": {"a": Net().state_dict()}},
        r"`starts\['a'\]` must fit one part of `model`, .*'student.' and 'teacher.' alike",
    ),
    "one network for all trainings": (
        {"make": lambda: ONE_NET},
        "`model` must make a new network at each call, got the same weights twice",
    ),
    "one network for all trainings from a start": (
        {"starts": {"a": lambda: ONE_NET}},
        r"`starts\['a'\]` must make a new network at each call",
    ),
    "a start that cannot be trained": (
        {"starts": {"a": partial(Net, width=5)}},
        r"`starts\['a'\]` must make a module that can be trained on `data`, but",
    ),
    "a lazy network": ({"make": Lazy}, "`model` must make a network with all its weights"),
    "a start without weights": (
        {"starts": {"a": Late}},
        r"`starts\['a'\]` must make a network with all its weights",
    ),
    "a name of another folder": (
        {"starts": {"..": Net}},
        r"`starts` must have names of letters, .* got '\.\.'",
    ),
    "outputs that are no tensor": (
        {"make": Pair, "metric": None},
        "`metric` must be given where inputs, targets or outputs are not plain, got a batch of",
    ),
    "a dataset of batches": (
        {"make": DictNet, "data": Unbatched()},
        "`data` must make batches of single samples in its DataLoaders, got batch_size=None",
    ),
    "no steps": ({"trainer": {"max_steps": 0}}, "`trainer` must train .* got max_steps=0"),
    "an accuracy in percent": (
        {"make": Percent, "metric": "accuracy"},
        "`metric` must be a share if it is 'accuracy', got",
    ),
    "yes and no as real numbers without a metric": (
        {
            "make": Regression,
            "metric": None,
            "starts": {"a": Regression},
            "data": {"train": YES, "test": YES},
        },
        "`metric` must be given where targets are 0 and 1 as real numbers",
    ),
    "one logit without a metric": (
        {
            "make": YesOrNo,
            "metric": None,
            "starts": {"a": YesOrNo},
            "data": {"train": clusters(90, 2), "test": clusters(60, 2)},
        },
        "`data` must have classes from 0 to 0, the outputs of YesOrNo, got 1",
    ),
    "places of as many classes": (
        {
            "make": Places,
            "metric": None,
            "starts": {"a": Places},
            "data": {"train": SQUARE, "test": SQUARE},
        },
        "`metric` must be given where outputs are no scores of classes, or their axis is not plain",
    ),
    "a misspelled option": (
        {"trainer": {"max_step": 3}},
        "`trainer` must hold options of Lightning's Trainer .*'max_step'",
    ),
    "an option of another kind": ({"trainer": {"max_steps": "three"}}, "`trainer` must hold"),
    "no step": ({"trainer": {"max_epochs": 0}}, "`trainer` must train for one step at least"),
    "several devices": ({"trainer": {"devices": 2}}, "`trainer` must leave devices to transfer"),
    "an unknown mode": ({"mode": "lower"}, "`mode` must be 'min' or 'max' .*got 'lower'"),
    "a metric of unknown mode": ({"metric": "dice"}, "`mode` must be .*'dice', got None"),
    "a mode of the plain error": (
        {"metric": None, "mode": "max"},
        "`mode` must be left out without `metric`",
    ),
    "a list of starts": ({"starts": ["a.ckpt"]}, "`starts` must hold at least one"),
    "a number as a name": ({"starts": {1: Net}}, "`starts` must have names"),
    "a loader of some samples": (
        {"data": SomeSamples()},
        "`data` must have a whole dataset to test on, such as a Subset, got a sampler of 10 of 60",
    ),
    "a hook of the data": ({"data": Hooked()}, "`data` must leave on_after_batch_transfer"),
    "a logger in trainer": ({"trainer": {"logger": True}}, "`trainer` must leave logger"),
    "methods": ({"methods": ["lautum"]}, "`methods` must be left out"),
    "negative seeds": ({"seeds": [-1]}, "`seeds` must be non-negative and finite, got -1"),
    "half a label": ({"labels": [9.5]}, "`labels` must be .*9.5"),
    "half a seed": ({"seeds": [0.5]}, "`seeds` must be .*0.5"),
    "an input that is no number": (
        {"data": {"train": NOT_FINITE, "test": DATA["test"]}},
        "`data` must be finite, got 1 values",
    ),
    "too few samples with a label": (
        {"data": {"train": FEW_LABELS, "test": DATA["test"]}},
        "`labels` must be at most 4, the samples with a label",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_before_training(tmp_path, name, monkeypatch):
    from lightning_taskinfo.transfer import training

    monkeypatch.setattr(training, "fit_stage", None)
    options, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        run(tmp_path / "new", **options)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_callback_needs_no_list_and_none_is_none():
    stop = EarlyStopping("train_loss", check_on_train_epoch_end=True)
    plain = run(seeds=1, trainer={**TRAINER, "callbacks": None})
    assert same(plain, run(seeds=1, trainer={**TRAINER, "callbacks": []}))
    assert run(seeds=1, trainer={**TRAINER, "callbacks": stop}).results


def test_callbacks_that_need_a_number_of_epochs_can_be_tried():
    averaging = StochasticWeightAveraging(1e-3)
    assert run(seeds=1, trainer={**TRAINER, "callbacks": [averaging]}).results


def test_other_callbacks_or_another_function_of_the_same_name_are_refused(tmp_path):
    def some(module):
        module.body.requires_grad_(False)

    def others(module):
        module.head.requires_grad_(False)

    others.__name__ = "some"
    run(tmp_path, seeds=1, adapt=[some])
    with pytest.raises(ValueError, match=r"(?s)adapted-some was begun with another.*trained"):
        run(tmp_path, seeds=1, adapt=[others])
    stop = EarlyStopping("train_loss", check_on_train_epoch_end=True)
    with pytest.raises(ValueError, match=r"(?s)trainer\.callbacks"):
        run(tmp_path, seeds=1, trainer={**TRAINER, "callbacks": [stop]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (timedelta(minutes=1), timedelta(minutes=2)),
        (EarlyStopping("loss", patience=1), EarlyStopping("loss", patience=2)),
        (GradientClipping(1.0), GradientClipping(2.0)),
    ],
    ids=["time", "patience", "own callback"],
)
def test_options_are_told_apart_by_their_plain_values(one, other):
    first, again, second = (
        _plain({"accelerator": "cpu", "it": x}) for x in (one, copy.deepcopy(one), other)
    )
    assert json.loads(json.dumps(first)) == again != second


def test_predictions_that_are_no_numbers_have_no_error():
    report = run(make=Diverging, starts={"again": Diverging}, metric=None)
    assert all(np.isnan(result.test["error"]) for result in report.results)
    assert {gain.verdict for gain in report.transferability()} == {"cannot tell"}


def test_the_plain_error_is_of_batches_as_the_module_changes_them():
    options = {"make": Normalised, "starts": {"again": Normalised}, "seeds": 1}
    logged, own = run(**options), run(**options, metric=None)
    for one, other in zip(logged.results, own.results, strict=True):
        assert other.test["error"] == pytest.approx(one.test["test_error"])


def test_weights_and_biases_have_a_run_for_each(tmp_path):
    run(tmp_path, seeds=1, logger="wandb_offline")
    assert len([*(tmp_path / "logs" / "wandb").glob("offline-run-*")]) == 2
    assert json.loads((tmp_path / "configuration.json").read_text())["metric"] == "test_error"
