"""What a process has by itself: environment variables, the compiled extension, memory that goes back to the system, progress.

Start with ``extension.py`` and ``environment.py``. Nothing here knows a model or a job. Tests: ``tests/python/process``.
"""
