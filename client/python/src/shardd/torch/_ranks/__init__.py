"""Who the ranks are and how they agree: meshes, nodes, meetings, the name of a job, whole tensors out of the ranks' pieces.

Start with ``nodes.py`` (which numbers ranks have at their daemons) and ``agreement.py`` (how they meet). No module here opens
a job. Tests: ``tests/python/ranks``.
"""
