"""A registered model has a job: these modules describe it, open it, bind parameters to its memory, write it, give it up.

Start with ``job.py``; the README of ``shardd.torch`` says in which order the others run and what each owns. No module here
shards a module or makes a step. Tests: ``tests/python/job``.
"""
