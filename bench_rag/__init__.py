"""bench_rag: prefix hits, time to first token and decode speed of SGLang servers under traffic that shares prefixes.

``python -m bench_rag`` starts the named server configurations (*arms*) one after another, drives the same seeded
workload through each over HTTP, and reports them side by side. It talks to SGLang only over HTTP and the command
line, so it measures any build of it. One module per question: what is asked (``workloads``, with ``corpus``,
``retrieve``, ``tokenise`` and ``traces`` behind them), of whom (``arms``, ``server``), how (``client``, ``driver``,
``metrics``), what it means (``ceiling``, ``measures``, ``noise``) and how it is shown (``report``, ``plot``,
``charts``, ``html``, ``compare``).
"""

__version__ = "0.1.0"
