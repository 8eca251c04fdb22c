"""A fully sharded module: its state, its group of parameters in layout ``dim0`` or ``flat``, placement, mixed precision.

Start with ``state.py`` (what a unit knows) and ``shard_group.py`` (its parameters in layout ``dim0``; ``flat_group.py``: in
layout ``flat``). No module here opens a job; ``_job`` does. Tests: ``tests/python/units``.
"""
