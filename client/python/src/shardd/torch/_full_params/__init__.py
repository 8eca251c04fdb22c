"""``summon_full_params``.

Start with ``summon.py``; ``forms.py`` has what the program holds inside. That ranks enter together is the library's part
(``client/c/job/full_params.h``). Tests: ``tests/python/full_params``.
"""
