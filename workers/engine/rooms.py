"""The doors of the rooms for hard matters, by name: a replica enters only those that a scan needs.

Most scans run bare modules with the fused engine on a machine without a GPU. They need no bridge,
no backward pass and no kernel, and whoever reads how a scan goes need not read these either.
"""

from collections.abc import Callable

from headcount.schemas.packages import entered
from headcount.workers.engine.engine import Engine

ENGINES = {
    "fused": "workers.engine.fused_engine.FusedEngine",
    "gradient": "workers.gradients.gradient_engine.GradientEngine",
    "dense": "workers.bridge.dense_engine.DenseEngine",
}

LOAD_MODEL = "workers.loading.load_model"
WEIGHT_TABLES = "workers.measurements.weight_tables.tables_of_weights"
PROVEN_SWEEP = "workers.kernel.kernel_check.proven_sweep"


def engine_class(name: str) -> Callable[..., Engine]:
    """The engine of a name: `fused` and `gradient` are made of a model, a precision and a sweep,
    `dense` of a model and changes.
    """
    return entered(ENGINES[name])
