"""What a program calls beside its model: ``resume``, ``ride``, ``steps``, ``commit``, ``memory_plan``, clipping.

Start with ``api.py``. How a model gets its job is in ``_job``, how a step is made in the packages of optimizers. Tests:
``tests/python/training``.
"""
