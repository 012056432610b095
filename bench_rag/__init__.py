"""bench_rag: prefix hits, time to first token and decode speed of SGLang servers under shared-prefix traffic.

``python -m bench_rag`` starts the named server configurations (*arms*) one after another, drives the same seeded
workload through each over HTTP, and reports them side by side. It talks to SGLang only over HTTP and the command
line, so it measures any build of it. One module per question: what is asked (``workloads``), of whom (``arms``,
``server``), how (``client``, ``driver``), what it means (``ceiling``, ``measures``) and how it is shown (``report``).
"""

__version__ = "0.1.0"
