"""Which part of a parallel server this process is: asked of SGLang, never guessed.

A server is tp_size times dp_size processes. Those of one tensor-parallel group share each prefill and hold its full states: one
writes. Data-parallel ranks have requests of their own, and one writer each: replicas of the whole model (`--dp-size`), or, with
DP attention (`--attn-dp-size`; before 0.5.20 or so `--enable-dp-attention --dp-size`), groups of processes within one
tensor-parallel group that attend to requests of their own and share the experts. SGLang has one or the other, never both.

Where a version keeps these numbers has changed:

- `runtime_context.get_parallel()` (since 0.5.18) has the width and rank of DP attention, later the replica's rank as well;
- before, `layers/dp_attention.py` has the former, and the model runner the latter, first as `dp_rank`, then as `ps.dp_rank`.

A number that is in none of these places is a reason to refuse: two processes that both take themselves for rank 0 would write
into each other's dumps.

A writer writes on its own node, and hsx reads on the one that has the HTTP port, which is the first (`node_rank` 0). So a
server over several nodes is captured where its only writer is on that node: tensor parallelism alone. DP attention over nodes
(SGLang has replicas on one node only, `check_server_args` in `arg_groups/validation_hook.py`) has writers elsewhere, and is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hsx.capture.model import CaptureRefusedError
from hsx.core.epoch import MAX_RANKS


class _ServerArgs(Protocol):
    dp_size: int
    nnodes: int
    node_rank: int


class _ModelRunner(Protocol):
    @property
    def server_args(self) -> _ServerArgs: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands.

    Attributes:
        tp_size: processes that share one prefill.
        tp_rank: this one among them; 0 writes.
        dp_size: data-parallel ranks of the server.
        dp_rank: the one that this process belongs to.
    """

    tp_size: int
    tp_rank: int
    dp_size: int
    dp_rank: int

    @property
    def writes(self) -> bool:
        """Whether this process writes the dumps of its DP rank."""
        return self.tp_rank == 0


def find_place(runner: _ModelRunner) -> Place:
    """Where this process stands; after SGLang has set its groups up, as it has when a model is loaded.

    Raises CaptureRefusedError where this SGLang does not say, or where dumps would be written on another node than the first.
    """
    from sglang.srt.distributed.parallel_state import (
        get_attn_tensor_model_parallel_rank,
        get_attn_tensor_model_parallel_world_size,
    )

    width, rank = _attention()
    if width == 1:
        width = int(runner.server_args.dp_size)
        rank = _replica(runner) if width > 1 else 0
    if not 1 <= width <= MAX_RANKS or not 0 <= rank < width:
        raise CaptureRefusedError(f"this process is DP rank {rank} of {width}; expected at most {MAX_RANKS}, counted from 0")
    place = Place(
        tp_size=int(get_attn_tensor_model_parallel_world_size()),
        tp_rank=int(get_attn_tensor_model_parallel_rank()),
        dp_size=width,
        dp_rank=rank,
    )
    _refuse_other_nodes(place, int(runner.server_args.nnodes), int(runner.server_args.node_rank))
    return place


def _refuse_other_nodes(place: Place, nodes: int, node: int) -> None:
    if nodes > 1 and place.dp_size > 1:
        raise CaptureRefusedError(
            f"the server has {place.dp_size} data-parallel ranks on {nodes} nodes; those of other nodes would write their "
            "dumps there, where hsx does not see them: expected tensor parallelism alone, or one server and job on each node"
        )
    if nodes > 1 and place.writes and node != 0:
        raise CaptureRefusedError(
            f"the process that would write the dumps runs on node {node} of {nodes}; expected node 0, where hsx is"
        )


def _attention() -> tuple[int, int]:
    """Width and own rank of DP attention; (1, 0) without it."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        from sglang.srt.layers.dp_attention import get_attention_dp_rank, get_attention_dp_size

        return int(get_attention_dp_size()), int(get_attention_dp_rank())
    parallel = get_parallel()
    return int(parallel.attn_dp_size), int(parallel.attn_dp_rank)


def _replica(runner: _ModelRunner) -> int:
    places: list[object] = [getattr(runner, "ps", None), runner]
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        pass
    else:
        places.insert(0, get_parallel())
    for place in places:
        rank = getattr(place, "dp_rank", None)
        if isinstance(rank, int):
            return rank
    raise CaptureRefusedError(
        f"dp_size is {runner.server_args.dp_size}, and this SGLang does not say which rank a process is: set --dp-size 1"
    )
