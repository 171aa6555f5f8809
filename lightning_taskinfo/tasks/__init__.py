"""Questions about tasks: complexity, distance, and simulated transfer whose answer is known."""

from lightning_taskinfo.tasks.complexity import structure_function
from lightning_taskinfo.tasks.distance import DistanceMatrix, task_distance
from lightning_taskinfo.tasks.embedding import (
    Recommendation,
    TaskEmbedding,
    embedding_distances,
    nearest_source,
)
from lightning_taskinfo.tasks.plots import (
    log_embeddings,
    plot_difficulty,
    plot_structure_functions,
    plot_task_map,
)
from lightning_taskinfo.tasks.probe import SmallProbe, default_probe
from lightning_taskinfo.tasks.specs import Task, network_for, prepare_task, trunk_for, trunk_of
from lightning_taskinfo.tasks.structure import Estimate, StructureFunction
from lightning_taskinfo.tasks.student_teacher import StudentTeacherRisks, simulate_student_teacher
from lightning_taskinfo.tasks.task2vec import Task2Vec
from lightning_taskinfo.tasks.theory import (
    PhaseDiagram,
    TransferRisks,
    simulate_phase_diagram,
    simulate_transfer,
    transferability,
)
from lightning_taskinfo.tasks.theory_plots import (
    plot_phase_map,
    plot_phase_overview,
    plot_phase_slices,
    plot_phase_surface,
)
from lightning_taskinfo.tasks.training import Training

__all__ = [
    "DistanceMatrix",
    "Estimate",
    "PhaseDiagram",
    "Recommendation",
    "SmallProbe",
    "StructureFunction",
    "StudentTeacherRisks",
    "Task",
    "Task2Vec",
    "TaskEmbedding",
    "Training",
    "TransferRisks",
    "default_probe",
    "embedding_distances",
    "log_embeddings",
    "nearest_source",
    "network_for",
    "plot_difficulty",
    "plot_phase_map",
    "plot_phase_overview",
    "plot_phase_slices",
    "plot_phase_surface",
    "plot_structure_functions",
    "plot_task_map",
    "prepare_task",
    "simulate_phase_diagram",
    "simulate_student_teacher",
    "simulate_transfer",
    "structure_function",
    "task_distance",
    "transferability",
    "trunk_for",
    "trunk_of",
]
