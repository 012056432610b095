"""Make the metadata of decode steps, eager and before a graph replay, and list what the host must wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from patches.outcome import conclude

CAPACITY, INTERVAL = 4, 8
SLOTS = [3, 5, 2]  # of three requests; a padded row follows
LENGTHS = [7, 8, 21]
CURSORS = [1, 2, CAPACITY - 1]
NEXT = [2, 0, 0]  # one more record; a track boundary; a full ring
# On a device, the shape of what these return depends on data that the host has to fetch.
DATA_DEPENDENT = ("aten._unique", "aten.unique", "aten.nonzero", "aten.masked_select", "aten._local_scalar_dense")


class Waits(TorchFunctionMode):
    """Names of operations that wait for the device: those whose result's shape depends on data, and copies.

    All tensors here lie on the CPU, where a copy to the device is no operation. It is known by its call: `to` with a
    device and without non_blocking, or a tensor made of host data on a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._quiet = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")  # the functions themselves may be wrapped by somebody
        to = name == "to" and (kwargs.get("device") or any(isinstance(a, (torch.device, str)) for a in args))
        made = name in ("tensor", "as_tensor") and kwargs.get("device") is not None
        if (made or to) and not kwargs.get("non_blocking") and not self._quiet:
            self.seen.append("a blocking copy to the device")
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Both kinds are listed inside."""
        with self, _DataDependent(self.seen):
            yield

    def enqueued(self, copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`copy`, whose own call of `to` is not counted: with a device it copies from pinned memory."""

        def quietly(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._quiet = True
            try:
                return copy(*args, **kwargs)
            finally:
                self._quiet = False

        return quietly


class _DataDependent(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        by_mask = any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in indices)
        if name.startswith(DATA_DEPENDENT) or by_mask:
            self._seen.append(name)
        return func(*args, **(kwargs or {}))


def main() -> None:
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    waits = Waits()
    if hasattr(module, "async_h2d"):
        module.async_h2d = waits.enqueued(module.async_h2d)
    module.get_exec = lambda: SimpleNamespace(mamba=SimpleNamespace(mamba_track_interval=INTERVAL))
    cursors = torch.zeros(8, dtype=torch.int32)
    rows, slots = torch.tensor([1, 2, 3, 0]), torch.tensor([*SLOTS, 0], dtype=torch.int32)
    mapping = torch.zeros(4, dtype=torch.int32)
    mapping[rows] = slots
    backend = object.__new__(module.MambaAttnBackendBase)
    backend.device = torch.device("cpu")
    backend.topk = 0
    backend.pad_slot_id = -1
    backend.req_to_token_pool = SimpleNamespace(
        mamba_pool=SimpleNamespace(
            replayssm_write_pos=cursors,
            enable_linear_replayssm=True,
            linear_replayssm_cache_len=CAPACITY,
            replayssm_is_kda=False,
        ),
        get_mamba_indices=lambda rows: mapping[rows],
        translate_mamba_indices=lambda indices: indices,
    )
    backend._translate_mamba_indices = lambda indices: indices
    lengths = torch.tensor([*LENGTHS, 1])
    batch = SimpleNamespace(
        batch_size=4,
        forward_mode=ForwardMode.DECODE,
        logical_forward_mode=ForwardMode.DECODE,
        req_pool_indices=rows,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        mamba_track_indices=None,
        mamba_track_mask=None,
        mamba_prefill_track_mask_cpu=None,
        extend_seq_lens_cpu=None,
        extend_prefix_lens_cpu=None,
    )
    tree = ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token")
    for each in ("state_indices", "query_start_loc", *tree):  # static buffers of graphs
        setattr(backend, f"{each}_list", [])
    backend._fused_state_indices_ok = False
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)

    def replay(in_capture: bool) -> Any:
        return backend._replay_metadata(
            4, rows.clone(), ForwardMode.DECODE, None, lengths, num_padding=1, in_capture=in_capture
        )

    def step(make: Callable[[], Any], following: list[int]) -> list[str]:
        """What one step waits for; its cursors, and those of the step that follows, must be right."""
        cursors.zero_()
        cursors[SLOTS] = torch.tensor(CURSORS, dtype=torch.int32)
        waits.seen.clear()
        with waits.watching():
            metadata = make()
        assert metadata.replayssm_write_pos[:3].tolist() == CURSORS
        seen = cursors[SLOTS].tolist()
        assert seen == following, f"the cursors advanced to {seen}, expected {following}"
        return list(waits.seen)

    eager = step(lambda: backend._forward_metadata(batch), NEXT)
    graph = step(lambda: replay(in_capture=False), NEXT)
    step(lambda: replay(in_capture=True), CURSORS)  # a capture advances nothing
    names = ", ".join(sorted({*eager, *graph}))
    seen = f"{len(eager)} waits per eager step, {len(graph)} before a graph replay"
    conclude(not eager and not graph, seen + (f": {names}" if names else ""))


if __name__ == "__main__":
    main()
