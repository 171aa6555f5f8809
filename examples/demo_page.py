"""The page of the demo: three sentences, the pictures below them, and the numbers behind both."""

import base64
import io
import json
import math
import os
import shutil
import statistics
import sys
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_taskinfo.functional.intervals import paired_interval
from lightning_taskinfo.transfer import StartRanking, TransferReport
from lightning_taskinfo.transfer.render import held_table, main_table

QUESTIONS = ("What is in the weights?", "Will it transfer?", "What can be proved?")
VERDICT_COLORS = {"helps": "#0f7a43", "hurts": "#b3261e", "cannot tell": "#8a6d00"}
NAMES = {  # what the page calls them
    "MNIST": "MNIST digits",
    "random-labels": "random labels",
    "scratch": "scratch",
    "letters": "letters",
    "lautum": "Lautum",
    "mutual_information": "mutual information",
}
Ends = tuple[float, float, float]  # lower end, mean, upper end


# %% What the numbers say: one sentence for each question, and what belongs to it
def answers(results: dict[str, Any]) -> list[tuple[str, str]]:
    return [about_weights(results), about_transfer(results), about_proof(results)]


def about_weights(results: dict[str, Any]) -> tuple[str, str]:
    rows, shares = results["memorised"], results["settings"]["shares"]
    fitted = min(row["train_accuracy"] for row in rows)
    moved = compared(rows, "squared_displacement", shares)
    sensitive = compared(rows, "largest_fisher_trace", shares)
    low, mean, high = precision(results)
    k = results["wrong_labels"][0]["k"]
    return (
        f"All networks fit at least {percent(fitted)} of their labels, but with random labels the squared "
        f"distance of the weights from their start is {moved}; and {percent(mean)} of the {k} samples "
        "that were hardest to learn have a wrong label.",
        f"With random labels, the largest Fisher trace during training is {sensitive}. "
        f"A tenth of {10 * k} samples had a wrong label: of {k} samples chosen at random, 10 % would be wrong; "
        f"of the {k} that were hardest to learn, {percent(mean)} [{percent(low)}, {percent(high)}].",
    )


def compared(rows: list[dict[str, Any]], name: str, shares: list[float]) -> str:
    """Say how many times as large a number is with random labels, if the seeds agree that it differs."""
    right, random = values(rows, name, min(shares)), values(rows, name, max(shares))
    low, _, high = difference(random, right)
    if low <= 0 <= high:
        return "not clearly different"
    return f"{statistics.fmean(random) / statistics.fmean(right):.1f} times as large"


def about_transfer(results: dict[str, Any]) -> tuple[str, str]:
    labels, ranking = results["settings"]["labels"], results["ranking"]
    starts = [row for row in results["starts"] if row["baseline"] == "scratch"]
    unlabelled = [row for row in results["unlabelled"] if row["baseline"] == "standard"]
    gained = ", ".join(f"{called(row['method'])} {verdict(row)}" for row in starts)
    added = ", ".join(f"{called(row['method'])} {verdict(row)}" for row in unlabelled)
    first = called(ranking["first"])
    return (
        f"With {labels} labels, in points of test error over scratch: {gained}; with unlabelled images, over plain "
        f"fine-tuning: {added}.",
        "A start helps or hurts if the 95 % interval of its gain over the seeds excludes 0. "
        f"The ranking without training took {ranking['seconds']:.1f} s and puts {first} first. "
        f"{ranking['advice']}",
    )


def called(name: str) -> str:
    return NAMES.get(name, name)


def verdict(row: dict[str, Any]) -> str:
    return f"{row['verdict']} ({row['points'][1]:+.1f})"


def with_interval(row: dict[str, Any]) -> str:
    low, _, high = row["points"]
    return f"{verdict(row)} [{low:+.1f}, {high:+.1f}]"


def about_proof(results: dict[str, Any]) -> tuple[str, str]:
    best, scratch = results["certificates"]
    held_out = best["test_set"]
    return (
        f"With {percent(best['confidence'])} confidence, the network that starts from {called(best['start'])} "
        f"errs on at most {up(best['bound'])} of new digits; from scratch, the same proof gives "
        f"{up(scratch['bound'])}.",
        f"The proof needs no test set. It uses the {best['n']:,} labels that the network was trained on, and the "
        "checkpoint as the prior, which never saw them. It covers a randomised copy of the network, not the network "
        f"itself. For comparison, {held_out['n']} held-out labels prove {up(held_out['bound'])} for the latter.",
    )


def percent(share: float) -> str:
    """A share in percent; rounded down, so that 99.96 % is not all."""
    return f"{math.floor(1000 * share + 1e-9) / 10:g} %"


def up(bound: float) -> str:
    """A bound in percent, rounded up: a proof promises no more."""
    return f"{math.ceil(1000 * bound - 1e-9) / 10:.1f} %"


# %% Means and intervals over seeds
def values(rows: list[dict[str, Any]], name: str, share: float) -> list[float]:
    return [row[name] for row in sorted(rows, key=lambda r: r["seed"]) if row["share"] == share]


def difference(first: list[float], second: list[float]) -> Ends:
    return paired_interval(
        torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    )


def interval(of: list[float]) -> Ends:
    return difference(of, [0.0] * len(of))


def precision(results: dict[str, Any]) -> Ends:
    low, mean, high = interval([row["precision"] for row in results["wrong_labels"]])
    return max(0.0, low), mean, min(1.0, high)


# %% Pictures
def pictures(results: dict[str, Any]) -> dict[str, tuple[Figure, str]]:
    """Every picture of the page by the name of its file, with what it shows."""
    settings = results["settings"]
    over_seeds = f"Means and 95 % intervals over {settings['seeds']} seeds."
    ranking = results["ranking"]
    return {
        "weights_distance": (
            drawn(draw_distance, results),
            f"How far the weights have moved when training ends. {over_seeds}",
        ),
        "weights_fisher": (
            drawn(draw_fisher, results),
            f"How sensitive predictions were to the weights, at most. {over_seeds}",
        ),
        "weights_wrong_labels": (
            draw_hardest(results),
            "The samples that were hardest to learn, with their given labels. Wrong labels are red.",
        ),
        "transfer_ranking": (
            drawn(draw_ranking, results, 2.4),
            f"Predicted without training, in {ranking['seconds']:.1f} s. Left is better.",
        ),
        "transfer_starts": (
            drawn(draw_starts, results, 2.4),
            f"Measured with {settings['labels']} labels and {settings['seeds_of_starts']} seeds. Right is better; "
            "95 % intervals.",
        ),
        "transfer_unlabelled": (
            drawn(draw_unlabelled, results, 2.4),
            f"From MNIST digits with unlabelled target images, {settings['seeds']} seeds. Right is better; "
            "95 % intervals.",
        ),
        "proof": (
            drawn(draw_proof, results, 2.6),
            "Bounds hold with 95 % confidence. The proof uses training labels, the test-set bound held-out labels.",
        ),
    }


def drawn(
    draw: Callable[[Axes, dict[str, Any]], None], results: dict[str, Any], height: float = 3.0
) -> Figure:
    figure = Figure(figsize=(4.6, height), layout="constrained")
    draw(figure.subplots(), results)
    return figure


def three_answers(results: dict[str, Any]) -> Figure:
    """The main picture of each question, side by side."""
    figure = Figure(figsize=(13.5, 3.4), layout="constrained")
    panels = zip(
        figure.subplots(1, 3), (draw_distance, draw_starts, draw_proof), QUESTIONS, strict=True
    )
    for ax, draw, question in panels:
        draw(ax, results)
        ax.set_title(question, fontsize=12, weight="bold")
    return figure


def draw_distance(ax: Axes, results: dict[str, Any]) -> None:
    draw_shares(
        ax, results, "squared_displacement", "squared distance of the weights\nfrom their start"
    )


def draw_fisher(ax: Axes, results: dict[str, Any]) -> None:
    draw_shares(ax, results, "largest_fisher_trace", "largest Fisher trace\nduring training")


def draw_shares(ax: Axes, results: dict[str, Any], name: str, label: str) -> None:
    shares = results["settings"]["shares"]
    ends = [interval(values(results["memorised"], name, share)) for share in shares]
    means = [mean for _, mean, _ in ends]
    ax.errorbar(shares, means, [high - mean for _, mean, high in ends], marker="o", capsize=4)
    ax.set(xlabel="share of random labels", ylabel=label, ylim=(0, None), xticks=shares)
    ax.xaxis.set_major_formatter("{x:.0%}")
    ax.spines[["top", "right"]].set_visible(False)


def draw_hardest(results: dict[str, Any]) -> Figure:
    figure, found = Figure(figsize=(4.6, 3.0), layout="constrained"), results["wrong_labels"][0]
    samples = zip(found["images"], found["given"], found["true"], strict=True)
    for ax, (image, given, true) in zip(figure.subplots(3, 6).flat, samples, strict=False):
        ax.imshow(image, cmap="gray_r")
        color = "black" if given == true else VERDICT_COLORS["hurts"]
        ax.set_title(f"“{given}”", color=color, fontsize=11)
    for ax in figure.axes:
        ax.axis("off")
    return figure


def draw_ranking(ax: Axes, results: dict[str, Any]) -> None:
    StartRanking.load(results["ranking"]["file"]).plot(ax)


def draw_starts(ax: Axes, results: dict[str, Any]) -> None:
    rows = [row for row in results["starts"] if row["baseline"] == "scratch"]
    draw_gains(ax, rows, "points of test error gained over scratch")


def draw_unlabelled(ax: Axes, results: dict[str, Any]) -> None:
    rows = [row for row in results["unlabelled"] if row["baseline"] == "standard"]
    draw_gains(ax, rows, "points of test error gained\nover plain fine-tuning")


def draw_gains(ax: Axes, rows: list[dict[str, Any]], label: str) -> None:
    for place, row in enumerate(rows):
        low, mean, high = row["points"]
        color = VERDICT_COLORS[row["verdict"]]
        reach = [[mean - low], [high - mean]]
        ax.errorbar(mean, place, xerr=reach, marker="o", capsize=4, color=color)
        ax.annotate(
            row["verdict"],
            (mean, place),
            (0, 7),
            textcoords="offset points",
            ha="center",
            color=color,
        )
    ax.axvline(0, color="0.6", linewidth=1)
    ax.set_yticks(range(len(rows)), [called(row["method"]) for row in rows])
    ax.set(xlabel=label, ylim=(len(rows) - 0.5, -0.7))
    ax.margins(x=0.15)
    ax.spines[["top", "right"]].set_visible(False)


def draw_proof(ax: Axes, results: dict[str, Any]) -> None:
    bars = {}
    for row in results["certificates"]:
        bars |= {
            f"{called(row['start'])}: proved": row["bound"],
            f"{called(row['start'])}: test-set bound": row["test_set"]["bound"],
            f"{called(row['start'])}: test error": row["test_error"],
        }
    colors = ["C0", "0.7", "C1"] * len(results["certificates"])
    drawn_bars = ax.barh([*bars], [100 * value for value in bars.values()], color=colors)
    ax.bar_label(drawn_bars, [up(value) for value in bars.values()], padding=3)
    ax.set(xlabel="error on new digits, %", xlim=(0, 118))
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=170)
    return file.getvalue()


# %% The page
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; color: #1c2024; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 1rem 0 0.25rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0.5rem; border-top: 1px solid #d5dade; padding-top: 1.5rem; }
p { max-width: 46rem; margin: 0.5rem 0; }
.answer { font-size: 1.1rem; border-left: 4px solid #1f77b4; padding-left: 0.9rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.25rem; }
figure { margin: 1rem 0 0; max-width: 34rem; }
img { display: block; width: 100%; height: auto; }
figcaption, footer, .soft { color: #5a636b; font-size: 0.9rem; }
details { margin: 1rem 0; } summary { cursor: pointer; color: #1f5f99; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.3rem 0.6rem; border-bottom: 1px solid #d5dade; white-space: nowrap; }
pre { overflow-x: auto; background: #f4f6f8; padding: 0.75rem; font-size: 0.85rem; white-space: pre-wrap; }
footer { margin: 3rem 0 1rem; }
"""


def write_page(results: dict[str, Any], folder: Path) -> None:
    """Write ``demo.html``, which needs nothing else, and the pictures in it as files."""
    shown = {name: (png(figure), text) for name, (figure, text) in pictures(results).items()}
    for name, (content, _) in shown.items():
        (folder / f"{name}.png").write_bytes(content)
    (folder / "three_answers.png").write_bytes(png(three_answers(results)))
    parts = {
        "weights": weights_details(results),
        "transfer": transfer_details(results, folder),
        "proof": proof_details(results),
    }
    sections = []
    for question, (sentence, more), (part, details) in zip(
        QUESTIONS, answers(results), parts.items(), strict=True
    ):
        figures = "".join(
            f'<figure><img alt="{escape(text)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
            f"<figcaption>{escape(text)}</figcaption></figure>"
            for name, (content, text) in shown.items()
            if name.startswith(part)
        )
        sections.append(
            f'<h2>{question}</h2><p class="answer">{escape(sentence)}</p><p>{escape(more)}</p>'
            f'<div class="pictures">{figures}</div>'
            f"<details><summary>The numbers, and how they were made</summary>{details}</details>"
        )
    (folder / "demo.html").write_text(
        f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Three questions about small networks</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><h1>Three questions about small networks</h1>
<p class="soft">Digits of 8×8 pixels, trained by <code>make demo</code>.</p>
{"".join(sections)}
<footer>Made by examples/demo.py of lightning-taskinfo.</footer></body></html>
"""
    )


def weights_details(results: dict[str, Any]) -> str:
    settings, rows = results["settings"], results["memorised"]
    columns = {
        "squared_displacement": "squared distance",
        "largest_fisher_trace": "largest Fisher trace",
        "train_accuracy": "training accuracy",
        "test_accuracy": "test accuracy",
    }
    table = [
        [f"{share:.0%}", *(cell(interval(values(rows, name, share))) for name in columns)]
        for share in settings["shares"]
    ]
    return (
        f"<p>MNIST digits at 8×8, {settings['samples']} images, a network of 17,000 weights, Adam, "
        f"{settings['epochs']} epochs, {settings['seeds']} seeds; means and 95 % intervals. Watched by "
        "<code>InformationInWeights</code> and <code>FisherTrace</code>.</p>"
        f"{html_table(['random labels', *columns.values()], table)}"
        f"<p>Wrong labels were found by <code>HardSamples</code> among "
        f"{settings['samples_with_wrong_labels']} images, in {settings['epochs_with_wrong_labels']} epochs.</p>"
    )


def transfer_details(results: dict[str, Any], folder: Path) -> str:
    parts = []
    for name, title in (("starts", "Starts"), ("unlabelled", "With unlabelled target images")):
        rows = [
            [
                called(row["method"]),
                row["baseline"].replace("standard", "plain fine-tuning"),
                with_interval(row),
            ]
            for row in results[name]
        ]
        parts.append(html_table([title, "compared with", "points of test error"], rows))
        report = TransferReport.load(folder / name / "report")
        found = {
            "Did it help?": main_table(report, report.measures),
            "What was measured beside it": held_table(report),
        }
        for heading, cells in found.items():
            if cells:
                table = html_table([*cells[0]], [[*row.values()] for row in cells])
                parts.append(f"<h4>{escape(heading)}</h4>{table}")
        settings = json.dumps(report.configuration, indent=1, ensure_ascii=False)
        parts.append(f"<h4>Settings</h4><pre>{escape(settings)}</pre>")
    return "".join(parts)


def proof_details(results: dict[str, Any]) -> str:
    return "".join(
        f"<h3>From {escape(called(row['start']))}</h3><pre>{escape(row['text'])}</pre>"
        for row in results["certificates"]
    )


def html_table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(ends: Ends) -> str:
    low, mean, high = ends
    return f"{mean:.3g} [{low:.3g}, {high:.3g}]"


# %% Weights & Biases, and the terminal
def log_page(results: dict[str, Any], folder: Path) -> None:
    """Put the pictures and the main numbers into a run of Weights & Biases, beside those of the trainings."""
    import wandb

    with wandb.init(project="demo", name="three answers", dir=folder, mode="offline") as run:
        run.log({name: wandb.Image(str(folder / f"{name}.png")) for name in pictures(results)})
        numbers = {f"gain/{row['method']}": row["points"][1] for row in results["starts"]}
        numbers |= {
            f"bound/{called(row['start'])}": row["bound"] for row in results["certificates"]
        }
        run.log({**numbers, "wrong_labels/precision": precision(results)[1]})


def show(results: dict[str, Any], folder: Path) -> None:
    """Print the three answers, and where to look."""
    width = min(100, shutil.get_terminal_size().columns)
    for question, (sentence, _) in zip(QUESTIONS, answers(results), strict=True):
        print(f"\n{question}\n{textwrap.fill(sentence, width)}")
    wandb = Path(sys.executable).with_name("wandb")
    command = os.path.relpath(wandb) if wandb.is_relative_to(Path.cwd()) else "wandb"
    print(f"\nPage: {folder / 'demo.html'}\nRuns: {command} leet {folder / 'wandb'}")
