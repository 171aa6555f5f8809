"""Questions about tasks: complexity, distance, embedding, and simulated transfer whose answer is known."""

from lightning_taskinfo.tasks.complexity import (
    Estimate,
    StructureFunction,
    plot_structure_functions,
    structure_function,
)
from lightning_taskinfo.tasks.deep_linear import plot_phase_map, transferability
from lightning_taskinfo.tasks.distance import DistanceMatrix, task_distance
from lightning_taskinfo.tasks.embedding import TaskEmbedding, embedding_distances, plot_task_map
from lightning_taskinfo.tasks.ready import (
    PreparedTask,
    ReferenceNetwork,
    network_for,
    prepare_task,
    reference_network,
    trunk_of,
)
from lightning_taskinfo.tasks.task2vec import Task2Vec
from lightning_taskinfo.tasks.training import Training

__all__ = [
    "DistanceMatrix",
    "Estimate",
    "PreparedTask",
    "ReferenceNetwork",
    "StructureFunction",
    "Task2Vec",
    "TaskEmbedding",
    "Training",
    "embedding_distances",
    "network_for",
    "plot_phase_map",
    "plot_structure_functions",
    "plot_task_map",
    "prepare_task",
    "reference_network",
    "structure_function",
    "task_distance",
    "transferability",
    "trunk_of",
]
