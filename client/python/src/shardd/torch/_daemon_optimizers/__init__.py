"""The daemon's optimizers: the step, and state that is shown, saved and loaded.

Start with ``daemon_steps.py`` and ``daemon_state.py``. The arithmetic is the daemon's (``server/optimizer``). Tests:
``tests/python/optimizers``.
"""
