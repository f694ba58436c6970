"""Rows in memory: the statistics of a model that is loaded already, on tokens that are there.

The rows are those that a scan of the same tokens would write. The model is left as it was. A model
that is measured again, for example in a training loop, is prepared once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import torch

from headcount.schemas.arguments import Name, checked
from headcount.schemas.errors import HeadcountError, MeasureError, ScanError
from headcount.schemas.plugins import activate
from headcount.schemas.reasons import reason
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.tables import with_partitions
from headcount.workers.borrowed_model import BorrowedModel, borrow, unwrapped
from headcount.workers.inputs.sequences import ShardInput
from headcount.workers.interventions import bind
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.replica import Replica
from headcount.workers.shard import intervention_tables, measure_shard

if TYPE_CHECKING:
    from torch import nn

GIVEN = "given"  # the input family of rows that no family made

_PREPARED: WeakKeyDictionary[nn.Module, tuple[BorrowedModel, dict[str, Replica]]] = (
    WeakKeyDictionary()
)
"""What was prepared of models that still exist, and the replicas that have measured it, by scan. It
shares their weights.
"""

_ONE_AT_A_TIME = threading.RLock()  # two threads would get each other's hooks


@checked(
    ScanError,
    attention_mask="measure reads every token, and none may be padding; cut the sequences to one "
    "length, or measure those of each length by themselves",
)
def measure(
    model: object,
    tokens: object,
    statistics: Literal["standard", "all", "effects"] | Sequence[str] = "standard",
    *,
    interventions: Sequence[str] = ("none",),
    layers: Literal["all"] | Sequence[int] = "all",
    heads: Literal["all"] | Sequence[str] = "all",
    batch_size: int | Literal["auto"] = "auto",
    engine: Literal["fused", "dense"] = "fused",
    precision: Name = "auto",
    run_id: Name = "memory",
    plugins: Sequence[object] = (),
) -> pa.Table:
    """Measure every head of a loaded model on tokens; returns rows like those of table `heads`.

    `model` is a causal language model of transformers or a TransformerBridge. `tokens` are
    `[sequence pos]`: a tensor, an array or lists, all sequences of one length, without padding. The
    other arguments mean what they mean in a scan. `run_id` fills the column of that name. `plugins`
    are files, or functions with one of our decorators.

    The model keeps its weights, mode, hooks and random state. It is measured without dropout, and a
    model of transformers without its hooks. Calls from several threads wait for each other.
    """
    fields = {
        "statistics": statistics if isinstance(statistics, str) else list(statistics),
        "interventions": list(interventions),
        "layers": layers if isinstance(layers, str) else list(layers),
        "heads": heads if isinstance(heads, str) else list(heads),
        "batch_size": batch_size,
        "precision": precision,
        "engine": engine,
        "plugins": list(plugins),
    }
    # Modules that were compiled run as they are written. Otherwise every formula would be compiled
    # into them, and training would compile them anew. To compile, the caller has imported this; by
    # itself it takes a second.
    is_compiling = "torch._dynamo" in sys.modules
    uncompiled = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    # A default device is where training code makes tensors. Ours lie where the model is.
    is_default = torch.get_default_device().type == "cpu"
    on_cpu = nullcontext() if is_default else torch.device("cpu")
    # Tensors of inference mode have no gradients, which effects read.
    with _ONE_AT_A_TIME, uncompiled, on_cpu, torch.inference_mode(False):
        modules = unwrapped(model)
        try:
            return _measured(modules, tokens, fields, run_id)
        except HeadcountError:
            raise
        except Exception as error:
            # The cause is kept for those who know what is special about their modules.
            raise MeasureError(
                f"{type(modules).__name__}: cannot be measured ({type(error).__name__}: "
                f"{reason(error)})"
            ) from error


def _measured(modules: nn.Module, tokens: object, fields: dict[str, Any], run_id: str) -> pa.Table:
    """The rows of `measure`; `fields` are those of a scan that it was called with."""
    borrowed, replicas = _PREPARED.get(modules, (None, dict[str, Replica]()))
    if borrowed is None or not borrowed.fits(modules):
        borrowed, replicas = borrow(modules), {}
    info = borrowed.model.info
    token_ids = _token_ids(tokens, info)
    if borrowed.model.dtype == torch.float64 and fields["precision"] == "auto":
        fields["precision"] = "float64"
    if borrowed.is_bridge:
        fields["engine"] = "dense"
    size = {"n_ctx": token_ids.shape[1], "sequences": len(token_ids)}
    scan = parse_scan(
        {"model": info.name, "bos": False, "input": {"family": GIVEN}, **size, **fields}
    )
    if scan.plugins:
        # A call without plug-ins does not wait for what tries them.
        from headcount.workers.plugin_proof import check_plugins

        check_plugins(scan.plugins, scan.engine)
    activate(scan.plugins)
    for bound in map(bind, scan.interventions):
        if bound.needs_partner or bound.needs_labels:
            what = "partner sequences" if bound.needs_partner else "labels of tokens"
            raise ScanError(
                f"interventions: '{bound.intervention}' needs {what}, which measure does not take; "
                "use headcount.scan"
            )
    shard = ShardInput(0, 0, token_ids, origin={}, bad_rows=[])
    with borrowed.reading(modules):
        # A cell of a notebook that runs again makes another function.
        digests = [(plugin.digest, *map(id, plugin.functions)) for plugin in scan.plugins]
        key = f"{scan.fingerprint} {scan.batch_size} {digests}"
        if key not in replicas:
            # To make one, engines are compared on a few tokens.
            replicas[key] = Replica(info, scan, borrowed.device, lambda *_: borrowed.model)
        measured = measure_shard(replicas[key], shard).measured
    # Copied weights would be those of now for ever, and what leads to the model would keep it.
    if borrowed.fits(modules) and not borrowed.leads_to(modules):
        _PREPARED[modules] = borrowed, replicas
    else:
        _PREPARED.pop(modules, None)
    tables = [
        with_partitions(intervention_tables(scan, shard, each)["heads"], run_id, intervention)
        for intervention, each in measured.items()
    ]
    return pa.concat_tables(tables).unify_dictionaries()


def _token_ids(tokens: object, info: ModelInfo) -> np.ndarray:
    """Tokens as `[sequence pos]`, int32; refused if the model cannot read them."""
    token_ids = whole_sequences(tokens)
    smallest, largest = int(token_ids.min()), int(token_ids.max())
    if smallest < 0 or largest >= info.d_vocab:
        raise ScanError(
            f"tokens: expected ids from 0 to {info.d_vocab - 1}, the vocabulary of {info.name}, "
            f"got {smallest if smallest < 0 else largest}"
        )
    n_ctx = token_ids.shape[1]
    if n_ctx > info.n_ctx:
        raise ScanError(
            f"tokens: {n_ctx} in a sequence are beyond the {info.n_ctx} positions of {info.name}"
        )
    return token_ids.astype(np.int32)


def whole_sequences(tokens: Any) -> np.ndarray:  # noqa: ANN401 - checked here
    """Tokens as `[sequence pos]`; refused if they are no sequences of one length."""
    if isinstance(tokens, torch.Tensor) and tokens.is_meta:
        raise ScanError(
            "tokens: expected integers, got a tensor on the device meta, which holds none; make it "
            "on another device"
        )
    try:
        is_tensor = isinstance(tokens, torch.Tensor)
        token_ids = tokens.detach().cpu().numpy() if is_tensor else np.asarray(tokens)
    except ValueError:
        raise ScanError(
            "tokens: expected sequences of one length; cut them, or measure each length by itself"
        ) from None
    except Exception as error:
        # Tensors of other layouts and formats, and those inside of a transformation.
        raise ScanError(
            "tokens: expected integers of one sequence or more [sequence pos], got a "
            f"{type(tokens).__name__} that cannot be read as an array ({reason(error)})"
        ) from None
    if token_ids.ndim == 1:
        token_ids = token_ids[None]
    if token_ids.ndim != 2 or not token_ids.size or token_ids.dtype.kind not in "iu":
        raise ScanError(
            "tokens: expected integers of one sequence or more [sequence pos], "
            f"got {token_ids.dtype} of shape {list(token_ids.shape)}"
        )
    return token_ids
