"""What watching costs: the time of an epoch with a callback, as a ratio to the same epoch without it.

Variants take turns within every round, in another order each time, so that what else the machine does falls on all of
them; medians of the ratios to the round's two plain epochs go to a JSON file and a table. CPU time is given beside
wall-clock time, since a busy machine disturbs it less. "nothing" is a third plain epoch: how far its ratio is from 1
tells what a ratio can be trusted to. The seconds inside of the callbacks' own methods, over those of the plain epoch,
say the same with less noise, except for what reading off a training step does inside of the step. For that, steps with
and without it take turns at random within one training, where a slow second of the machine falls on both.

What is measured once an epoch, or every 100 or 500 steps, is timed on an epoch of 200 steps; what costs the same in
every step, or only at the end of training, on one of 50. In a longer epoch the measurement after it weighs less. A
training has four epochs, and the mean of the last three is timed: which rows belong to which sample is shown once more
in the second epoch, and not in every one. The seconds that the first epoch takes longer inside of the callbacks (the
measurement before training, and showing that for the first time) are given beside it, as a share of an epoch.
"""

import argparse
import json
import logging
import random
import statistics
import time
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from environment import environment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import FisherTrace, HardSamples, InformationInWeights, LocalMinimum

warnings.filterwarnings("ignore")
for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 300),
        nn.ReLU(),
        nn.Linear(300, 300),
        nn.ReLU(),
        nn.Linear(300, 10),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


NETWORKS = {"MLP 784-300-300-10": mlp, "CNN 16-32-64": cnn}
LONG, SHORT = 200, 50  # steps of an epoch
EPOCHS = 4
TRAININGS = 20  # in which steps take turns: one of them says less than a callback costs
EACH_STEP = {
    "HardSamples()": HardSamples,
    'HardSamples(rank_by="squared_norm")': lambda: HardSamples(rank_by="squared_norm"),
    "HardSamples(norms=False)": lambda: HardSamples(norms=False),
}
DEFAULTS = 1.03  # the ratio that is aimed at
VARIANTS = {
    "nothing": (LONG, None, list),
    "nothing, short": (SHORT, None, list),
    "FisherTrace()": (LONG, DEFAULTS, lambda: [FisherTrace()]),
    "InformationInWeights()": (LONG, DEFAULTS, lambda: [InformationInWeights()]),
    'InformationInWeights(prior_std="auto")': (
        LONG,
        DEFAULTS,
        lambda: [InformationInWeights(prior_std="auto")],
    ),
    "all three": (LONG, DEFAULTS, lambda: [FisherTrace(), InformationInWeights(), LocalMinimum()]),
    "LocalMinimum()": (SHORT, DEFAULTS, lambda: [LocalMinimum()]),
    "HardSamples()": (LONG, DEFAULTS, lambda: [HardSamples()]),
    **{name: (SHORT, None, lambda one=one: [one()]) for name, one in [*EACH_STEP.items()][1:]},
}


def times():
    return time.perf_counter(), time.process_time()


class Clock(pl.Callback):
    """Wall-clock and CPU time of each epoch, and of the end of training after them."""

    def __init__(self):
        self.epochs = []

    def mark(self):
        self.last = times()

    def since(self):
        return [now - then for now, then in zip(times(), self.last, strict=True)]

    def on_train_epoch_start(self, *_):
        self.mark()

    def on_train_epoch_end(self, *_):
        self.epochs.append(self.since())
        self.mark()

    def on_train_end(self, *_):
        self.end = self.since()


HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
)


def timed(callback, spent):
    """Let a callback's own methods add to the seconds that were ``spent`` during each epoch."""

    def wrapped(hook):
        def call(trainer, *arguments):
            start = time.perf_counter()
            hook(trainer, *arguments)
            seconds = time.perf_counter() - start  # without looking up the epoch
            spent[trainer.current_epoch] += seconds

        return call

    for name in HOOKS:
        setattr(callback, name, wrapped(getattr(callback, name)))
    return callback


class NowAndThen(pl.Callback):
    """Hand half of the steps, at random, to a callback that looks at every step; take the seconds of both kinds."""

    def __init__(self, callback, seed):
        self.callback, self.draws = callback, random.Random(seed)
        self.seconds, self.watched, self.start = {True: [], False: []}, None, None

    def on_fit_start(self, *arguments):
        self.callback.on_fit_start(*arguments)

    def on_train_start(self, *arguments):
        self.callback.on_train_start(*arguments)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx > 10:  # one at least was watched
            self.seconds[self.watched].append(time.perf_counter() - self.start)
        self.watched = self.draws.random() < 0.5
        self.start = time.perf_counter()
        if self.watched:
            self.callback._last_step = trainer.global_step  # as if it had seen all of them
            self.callback.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, *arguments):
        if self.watched:
            self.callback.on_before_backward(*arguments)

    def on_train_batch_end(self, *arguments):
        if self.watched:
            self.callback.on_train_batch_end(*arguments)

    def on_train_end(self, *arguments):
        self.callback.on_train_end(*arguments)


def fit(make, callbacks, data, batch_size, epochs=1):
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(make()), DataLoader(data, batch_size=batch_size, shuffle=True))


def by_steps(make, callback, data, *, batch_size, trainings):
    """Return the ratio of the median step with the callback to that without it, over trainings."""
    ratios, means = [], []
    for seed in range(trainings + 1):  # the first has everything called once
        steps = NowAndThen(callback(), seed)
        fit(make, [steps], data, batch_size)
        if seed:
            ratios.append(
                statistics.median(steps.seconds[True]) / statistics.median(steps.seconds[False])
            )
            means.append(
                statistics.fmean(steps.seconds[True]) / statistics.fmean(steps.seconds[False])
            )
    found = {"median": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
    return found | {
        "of_means": statistics.median(means),
        "of_means_range": [min(means), max(means)],
    }


def run(make, callbacks, data, batch_size):
    """Train; return mean seconds of all epochs but the first, of the end of training, and inside of callbacks."""
    clock, spent = Clock(), [0.0] * EPOCHS
    watched = [timed(callback, spent) for callback in callbacks]
    fit(make, [*watched, clock], data, batch_size, epochs=EPOCHS)
    later = statistics.fmean(spent[1:])
    return {
        "epoch": [statistics.fmean(times) for times in zip(*clock.epochs[1:], strict=True)],
        "end": clock.end,
        "own": [later],
        "start": [spent[0] - later],
    }


def measure(make, data, *, batch_size, repeats):
    """Return, by variant, the medians of time relative to the plain epoch of the same round."""
    parts = {
        steps: TensorDataset(*(part[: steps * batch_size] for part in data))
        for steps in (LONG, SHORT)
    }
    for *_, callbacks in VARIANTS.values():  # everything has been imported and called once
        run(make, callbacks(), parts[SHORT], batch_size)
    turns = {
        steps: [name for name, (length, *_) in VARIANTS.items() if length == steps]
        for steps in parts
    }
    plain = {steps: [] for steps in parts}
    watched = {name: [] for name in VARIANTS}
    order = random.Random(0)
    for _ in range(repeats):
        for steps, part in parts.items():
            twice = []
            for name in order.sample([*turns[steps], None, None], len(turns[steps]) + 2):
                callbacks = VARIANTS[name][2]() if name else []
                (watched[name] if name else twice).append(run(make, callbacks, part, batch_size))
            plain[steps].append(mean(twice))
    seconds = {
        steps: statistics.median(each["epoch"][0] for each in runs) for steps, runs in plain.items()
    }
    ratios = {name: summary(name, runs, plain[VARIANTS[name][0]]) for name, runs in watched.items()}
    for name, callback in EACH_STEP.items():
        ratios[name]["by_steps"] = by_steps(
            make, callback, parts[LONG], batch_size=batch_size, trainings=max(repeats, TRAININGS)
        )
    return {"plain_epoch_seconds": seconds, "ratios": ratios}


def mean(runs):
    """Return the mean times of several runs."""
    return {
        part: [
            statistics.fmean(times) for times in zip(*(each[part] for each in runs), strict=True)
        ]
        for part in runs[0]
    }


def summary(name, watched, plain):
    """Return medians of ratios of the epoch, and of seconds that the end of training takes longer."""
    steps, goal, _ = VARIANTS[name]
    found = {"steps": steps, "goal": goal}
    for i, kind in enumerate(("wall", "cpu")):
        ratios = [a["epoch"][i] / b["epoch"][i] for a, b in zip(watched, plain, strict=True)]
        ends = [a["end"][i] - b["end"][i] for a, b in zip(watched, plain, strict=True)]
        found |= {kind: statistics.median(ratios), f"{kind}_range": [min(ratios), max(ratios)]}
        found[f"end_{kind}_seconds"] = statistics.median(ends)
    for kind in ("own", "start"):
        shares = [a[kind][0] / b["epoch"][0] for a, b in zip(watched, plain, strict=True)]
        found |= {kind: statistics.median(shares), f"{kind}_range": [min(shares), max(shares)]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=VARIANTS, help="print this variant, and store nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/callbacks.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only:
        for name in {*VARIANTS} - {arguments.only, "nothing", "nothing, short"}:
            del VARIANTS[name]
            EACH_STEP.pop(name, None)
    before, start = environment(), time.perf_counter()
    samples, generator = LONG * arguments.batch_size, torch.Generator().manual_seed(0)
    images = torch.rand(samples, 1, 28, 28, generator=generator)
    data = images, torch.randint(10, (samples,), generator=generator)
    options = {"batch_size": arguments.batch_size, "repeats": arguments.repeats}
    results = {name: measure(make, data, **options) for name, make in NETWORKS.items()}
    report = {
        "environment": {**before, "load_average_after": environment()["load_average"]},
        "settings": options,
        "seconds": time.perf_counter() - start,
        "results": results,
    }
    if not arguments.only:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(
        "| network | variant | epoch, wall | epoch, CPU | own methods | start | by steps | goal | end of fit, seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for network, result in results.items():
        for name, r in result["ratios"].items():
            goal = "" if r["goal"] is None else f"{r['goal']:.2f}"
            steps = (
                "{of_means:.3f} [{of_means_range[0]:.3f}, {of_means_range[1]:.3f}]".format(
                    **r["by_steps"]
                )
                if "by_steps" in r
                else ""
            )
            times = f"{r['wall']:.3f} | {r['cpu']:.3f} | {r['own']:.3f} | {r['start']:.3f} | {steps} | {goal}"
            print(f"| {network} | {name} | {times} | {r['end_wall_seconds']:.2f} |")
    print(f"\n{report['seconds']:.0f} s, load average {before['load_average']} before")


if __name__ == "__main__":
    main()
