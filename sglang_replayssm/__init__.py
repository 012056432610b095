"""ReplaySSM for SGLang's hybrid linear-attention models, as an out-of-tree plugin.

Importing this package imports neither SGLang nor torch; `sglang_replayssm.plugin.register` is what SGLang
calls (entry-point group `sglang.srt.plugins`). docs/design.md walks one request through the modules.
"""

__version__ = "0.2.0"
