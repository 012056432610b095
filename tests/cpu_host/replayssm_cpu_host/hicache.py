"""HiCache's copies between host pages and device rows (`--hicache-io-backend direct`), as torch indexing.

sgl_kernel implements them for CUDA only. Layouts: the device side is one [tokens or slots, ...] tensor per
layer; the host side is `page_first_direct`, [page, layer, token in page, ...] with pages numbered by their
first token over the page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def install(*args: Any, **kwargs: Any) -> None:
    """BEFORE hook of `UnifiedRadixCache.init_hicache`: patch the host pools' modules."""
    from sglang.srt.mem_cache.pool_host import common, mamba, mha, mla

    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory  # the default calls cudaHostRegister
    for module in (mha, mla, mamba):
        module.transfer_kv_direct = copy_rows
        module.transfer_kv_per_layer_direct_pf_lf = load_layer
        module.transfer_kv_all_layer_direct_lf_pf = store_layers


def copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int = 1,
) -> None:
    """Row by row between two `layer_first` sides."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices.long()] = src[src_indices.long()]


def load_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host pages to the device rows of one layer."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        pages = src[_pages(src_indices, page_size), layer_id]
        dst[dst_indices.long()] = pages.flatten(0, 1).view(-1, *dst.shape[1:])


def store_layers(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Device rows of all layers to host pages; `src_ptrs` holds every layer's k, then every layer's v."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = _pages(dst_indices, page_size)
    for part, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[part * layers + layer][src_indices.long()]
            dst[pages, layer] = rows.view(-1, *dst.shape[2:])


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices.long().reshape(-1, page_size)[:, 0] // page_size
