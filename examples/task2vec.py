"""Put tasks on a map: all digits, even or odd, small or large, letters, inverted digits. Which is whose best source?

A small network, trained once on digits and letters, gets a new head for each task. The Fisher information of its
filters then says what matters to the task: near tasks need the same filters, and a large norm tells a task that the
network finds hard.

    python examples/task2vec.py --folder figures
"""

# %% What to do
import argparse
from pathlib import Path

from lightning_taskinfo import Task2Vec
from lightning_taskinfo.data import load_task
from lightning_taskinfo.tasks import embedding_distances, plot_task_map, reference_network

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--fast", action="store_true", help="one epoch for the network and fewer samples, a few seconds"
)
parser.add_argument(
    "--folder", type=Path, default=Path("runs/task2vec"), help="folder of the figure"
)
args = parser.parse_args()

# %% The tasks
names = {
    "all digits": "digits",
    "even or odd": "digits:even-odd",
    "small or large": "digits:small-large",
    "0 or 1": "digits:only-0-1",
    "letters": "letters",
    "letters, odd places": "letters:even-odd",
    "inverted digits": "digits:inverted",
}
if args.fast:
    names = {
        title: name
        for title, name in names.items()
        if name in ("digits", "digits:even-odd", "digits:only-0-1", "letters")
    }

# %% Embed them; any module can be the network, `Task2Vec(my_network, head="fc")`
network = reference_network(epochs=1 if args.fast else 4)
embedder = Task2Vec(network, max_samples=50 if args.fast else 1000)
embeddings = [embedder.embed(load_task(name), name=title) for title, name in names.items()]

# %% Who is near whom? Symmetric distances, from 0 to 1
distances = embedding_distances(embeddings)
nearest = distances.clone().fill_diagonal_(1).argmin(1)
print(f"{'task':20} {'norm':>8} {'test error':>11}   distances, and the nearest")
for embedding, row, place in zip(embeddings, distances.tolist(), nearest.tolist(), strict=True):
    print(f"{embedding.name:20} {embedding.norm:8.3f} {embedding.test_error:11.3f}  ", end="")
    print(*(f"{distance:6.3f}" for distance in row), "", embeddings[place].name)

# %% Draw
figure, _ = plot_task_map(embeddings)
args.folder.mkdir(parents=True, exist_ok=True)
path = args.folder / "task2vec.png"
figure.savefig(path, dpi=150)
print(f"\nFigure: {path}")
