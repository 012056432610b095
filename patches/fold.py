"""A method for SGLang's MambaPool that two patches need: apply what a slot's ring still holds to its state."""

from __future__ import annotations

import libcst as cst

from patches.edit import add_method

SOURCE = '''
def fold_replayssm(self, indices: torch.Tensor):
    """Apply the pending decode records of these slots (1-D) to ``temporal``."""
    if self.replayssm_write_pos is None:
        return
    slots = indices.reshape(-1).to(torch.int64)
    cache = self.mamba_cache
    pending = self.replayssm_write_pos[slots]
    d, k, g = (
        ring[:, slots].float()
        for ring in (cache.replayssm_d, cache.replayssm_k, cache.replayssm_g)
    )
    if g.dim() == 4:  # one gate per head; KDA has one per key channel
        g = g.unsqueeze(-1)
    length = d.shape[3]
    is_valid = torch.arange(length, device=slots.device) < pending[:, None]
    is_valid = is_valid[None, :, None, :, None]
    g = g.masked_fill(~is_valid, 0.0)
    d = d.masked_fill(~is_valid, 0.0)
    # Gates of the younger records: summed, not taken as a difference of sums.
    younger = torch.nn.functional.pad(g[..., 1:, :], (0, 0, 0, 1))
    younger = younger.flip(-2).cumsum(-2).flip(-2)
    k = k.repeat_interleave(d.shape[2] // k.shape[2], dim=2)
    k = k.masked_fill(~is_valid, 0.0) * younger.exp()
    decay = g.sum(dim=-2).exp().unsqueeze(-2)
    state = cache.temporal[:, slots]
    folded = state.float() * decay + torch.einsum("nbhlv,nbhlk->nbhvk", d, k)
    cache.temporal[:, slots] = folded.to(state.dtype)
    self.replayssm_write_pos[slots] = 0
'''


def add_fold(module: cst.Module) -> cst.Module:
    """Give MambaPool its `fold_replayssm`."""
    return add_method(module, "MambaPool", SOURCE)
