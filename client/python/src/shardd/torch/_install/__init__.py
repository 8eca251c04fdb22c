"""PyTorch's names become shardd's in the whole process.

Start with ``install.py`` (names) and ``optimizers.py`` (methods). What the names then do is ``_sharding``'s and
``_daemon_optimizers``'. Tests: ``tests/python/install``.
"""
