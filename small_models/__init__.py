"""Two small hybrid language models, trained here: Gated DeltaNet as Qwen3-Next, Kimi Delta Attention as Kimi-Linear.

    python -m small_models.train gdn kda --seconds 75      # on one GPU; writes small_models/gdn and small_models/kda

One module per question: what is learnt (``data``), the recurrence in parallel form (``delta``), the two models by the
names that published checkpoints use (``layers``, ``gdn``, ``kda``), how they learn (``train``), and the folder that
SGLang loads (``checkpoint``). Needs torch, numpy, safetensors and tokenizers; no data but Python's standard library.
"""
