"""What a report says in sentences: the findings, and what each number is and is not."""

import math
from typing import TYPE_CHECKING

from lightning_taskinfo.transfer.statistics import student_t_reach

if TYPE_CHECKING:
    from lightning_taskinfo.transfer.report import Comparison, TransferReport

MANY = 5  # seeds from which more of them narrow an interval slowly
CAPTIONS = {  # name of the figure's file -> what it shows; `information_50` is that with 50 labels
    "accuracy": "Results on the target test set, by method and number of target labels",
    "curves": "Learning curves on the target, by method and number of target labels",
    "information": "Information in the weights by layer, before and after fine-tuning",
}


def caption(name: str) -> str:
    """Return what a figure shows, by the name of its file.

    Example:
        >>> caption("information_50")
        'Information in the weights by layer, before and after fine-tuning, with 50 target labels'
    """
    kind, _, labels = name.partition("_")
    return CAPTIONS[kind] + (f", with {labels} target labels" if labels else "")


def findings(report: "TransferReport", confidence: float) -> list[str]:
    """One sentence for each number of labels and baseline; and what is missing."""
    gains = report.transferability(confidence)
    lines = []
    for labels in report.labels:
        for baseline in dict.fromkeys(gain.baseline for gain in gains):
            group = [gain for gain in gains if (gain.labels, gain.baseline) == (labels, baseline)]
            if group:
                words = {m.name: _words([g for g in group if g.measure == m.name]) for m in report.measures}
                first, *others = words.items()
                said = [f"by the {first[0]} {first[1]}"]
                said += [f"by the {name} {'the same' if also == first[1] else also}" for name, also in others]
                lines.append(f"{labels} labels, against {baseline}: {'; '.join(said)}.")
    few = min((gain.gain.n for gain in gains if gain.verdict == "cannot tell" and not gain.gain.reason), default=MANY)
    if few < MANY:
        reach, later = (student_t_reach(confidence, n - 1) / math.sqrt(n) for n in (few, MANY))
        lines.append(
            f"With {few} seeds an interval reaches {reach:.1f} standard deviations of a seed's gain to each side, with "
            f"{MANY} it is {later:.1f}: where it cannot tell, add seeds; a `folder` keeps those that are done."
        )
    if "scratch" not in report.methods:
        lines.append("No run from scratch is among the results: whether transfer helps cannot be said.")
    return lines


def notes(report: "TransferReport", confidence: float) -> dict[str, str]:
    """What each number means, by term: only of what the report shows."""
    counts = sorted({len(report.cell(m, n)) for m in report.methods for n in report.labels} - {0})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    values = " and ".join(measure.value for measure in report.measures)
    said = {
        f"{values[0].upper()}{values[1:]}": "Means over seeds on the target test set"
        + ("; the loss is the mean cross-entropy in nats." if report.measures[-1].unit == "nats" else "."),
        "Seeds": f"{seeds} for each method and number of labels."
        + (" One seed has no interval, and no verdict rests on it." if counts[0] == 1 else ""),
        "Intervals": f"Student's t intervals at {100 * confidence:g} % over seeds, for normally distributed values. "
        "They say how sure the mean over seeds is, not how far one more run may lie from it; with two or three seeds "
        "they are wide. Seeds that all gave the same have no interval.",
    }
    return said | _gain_notes(report, confidence) | _measurement_notes(report)


def _gain_notes(report: "TransferReport", confidence: float) -> dict[str, str]:
    comparisons = report.transferability(confidence)
    if not comparisons:
        return {"Gains": "None: there is no baseline among the results to compare with."}
    return {
        "Gains": f"T = R(baseline) − R(method), the risk R {_risks(report)}, from differences "
        "between runs of the same seed, which share their split. Positive is better. Over scratch: does "
        "transfer help at all? Over standard: does the method add anything to plain fine-tuning?",
        "Helps, hurts, cannot tell": "Where the interval of the gain lies: above 0, below 0, or neither. “Cannot tell” "
        f"does not mean that there is no difference. There are {len(comparisons)} comparisons here, and the intervals "
        "are not corrected for their number: of comparisons without any true difference, about "
        f"{100 * (1 - confidence):.2g} % are still called one way or the other.",
    }


def _risks(report: "TransferReport") -> str:
    shown = {"points": " (in percentage points)", "nats": " (in nats)", "": ""}
    return " or ".join(f"as {measure.name}{shown[measure.unit]}" for measure in report.measures)


def _measurement_notes(report: "TransferReport") -> dict[str, str]:
    said = {}
    if any(row["information"] for row in report.results):
        said["Information in the weights"] = (
            "An estimate in nats: the KL divergence of a Gaussian around the trained weights, as wide as the curvature "
            "of the loss allows, from the pre-distribution of the configuration. Before and after are measured from "
            "the initialisation, added from the pretrained weights, so that added is not after minus before. It "
            "depends on the width of the pre-distribution and on the data it is measured on: compare it between "
            "networks of one report, not across reports. It certifies nothing."
        )
    if any(row["fisher_trace"] for row in report.results):
        said["Fisher trace"] = (
            "Mean over samples of the squared gradient norm of the log-likelihood: how sharply the predictions depend "
            "on the weights. It is no measure of quality."
        )
    if any(row["overlap"] for row in report.results):
        said["What the features miss"] = (
            "Share of the target labels' variance that a linear read-out of the frozen features leaves unexplained on "
            "held-out samples, before fine-tuning: mean over seeds, smallest and largest. The number of labels from "
            "which linear transfer is predicted to hurt follows from it and from a power law fitted to training from "
            "scratch at two numbers of labels or more: median over seeds, and the ends that all intervals reach."
        )
    return said


def _words(group: "list[Comparison]") -> str:
    """Which methods help, which hurt, and of which nothing can be said, and why."""
    parts = []
    for verdict in ("helps", "hurts", "cannot tell"):
        members = [gain for gain in group if gain.verdict == verdict]
        if members:
            names = ", ".join(gain.method for gain in members)
            reasons = sorted({gain.gain.reason for gain in members} - {""})
            parts.append(f"“{verdict}” for {names}" + (f" ({'; '.join(reasons)})" if reasons else ""))
    return ", ".join(parts)
