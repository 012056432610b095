"""Make the metadata of decode forwards and list the operations whose result the host must wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patches.outcome import conclude

CAPACITY, INTERVAL = 4, 8
SLOTS = [3, 5, 2]  # of three requests; a padded row follows
LENGTHS = [7, 8, 21]
CURSORS = [1, 2, CAPACITY - 1]
NEXT = [2, 0, 0]  # one more record; a track boundary; a full ring
# On a device, the shape of what these return depends on data that the host has to fetch.
DATA_DEPENDENT = ("aten._unique", "aten.unique", "aten.nonzero", "aten.masked_select", "aten._local_scalar_dense")


class Waits(TorchDispatchMode):
    """Names of operations on cursors that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        by_mask = any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in indices)
        if name.startswith(DATA_DEPENDENT) or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def main() -> None:
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

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
    cursors[SLOTS] = torch.tensor(CURSORS, dtype=torch.int32)
    with Waits() as waits:
        metadata = backend._forward_metadata(batch)
    assert metadata.replayssm_write_pos[:3].tolist() == CURSORS
    assert cursors[SLOTS].tolist() == NEXT, f"the cursors advanced to {cursors[SLOTS].tolist()}, expected {NEXT}"
    names = ", ".join(sorted(set(waits.seen)))
    conclude(not waits.seen, f"{len(waits.seen)} waits per step" + (f": {names}" if names else ""))


if __name__ == "__main__":
    main()
