"""``python -m bench_rag accuracy``: does a configuration change what a model says? One module per question.

``text`` and ``recall`` are what a model is asked about and what the small models of this repository learn from,
``tasks`` what is asked, ``score`` what the answers are worth, ``command`` the command line and its report.
"""
