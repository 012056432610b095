"""Device bytes that a decode step must move, with buffered decode and with a conventional one. Formulas, no tensors.

    buffered      B HV V K s_state (1 + 2 / L)   one read per step; a read and a write per fold
                  + B R (L - 1) / 2              records read, on average
                  + B R 2                        one record written, one read by the fold
    conventional  B HV V K s_state 2             the state is read and written in every step

    verify        B HV V K s_state (1 + 2 / n)   the same for steps of T tokens, of which c are committed;
                  + B R c (n - 1) / 2            n = (L - T) // c + 1 is the number of steps from fold to fold
                  + B R (T + c)                  T records written, c read by folds

    R, bytes of one token's record of all heads: HV (V s_u + 4) + H K s_k for GDN; for KDA 4 K instead of 4; with scaled
    keys fp32 keys of every v-head, and the accumulated gates of one record only.

Activations are left out: both kinds move the same ones, and they are less than a hundredth of a state.
"""

from __future__ import annotations

from .ring import RingShape


def buffered_bytes(shape: RingShape, batch: int, state_size: int) -> float:
    """Bytes per layer and step of buffered decode.

    Args:
        shape: the ring; its layers and rows do not matter here.
        batch: requests in the step.
        state_size: bytes of one number of the state.
    """
    return verify_bytes(shape, batch, state_size, 1, 1)


def verify_bytes(shape: RingShape, batch: int, state_size: int, width: int, accepted: int) -> float:
    """Bytes per layer and step of ring spec-verify. Args: as `buffered_bytes`; tokens per step, and how many of them
    are committed."""
    turn = (shape.capacity - width) // accepted + 1
    state = _state(shape, state_size) * (1 + 2 / turn)
    gate = shape.v_heads * shape.gate_width * 4
    record = shape.v_heads * shape.value_dim * shape.u_dtype.itemsize
    record += shape.k_shape[2] * shape.key_dim * shape.k_dtype.itemsize
    read = accepted * (turn - 1) / 2
    moved = read + width + accepted
    gates = 1 + width + 1 / turn if shape.scaled_keys else moved
    return batch * (state + record * moved + gate * gates)


def conventional_bytes(shape: RingShape, batch: int, state_size: int) -> float:
    """Bytes per layer and step where every step reads and writes the state. Args: as `buffered_bytes`."""
    return 2.0 * batch * _state(shape, state_size)


def _state(shape: RingShape, state_size: int) -> int:
    return shape.v_heads * shape.value_dim * shape.key_dim * state_size
