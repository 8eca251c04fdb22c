"""State dicts of models and optimizers, ``torch.distributed.checkpoint``, safetensors.

Start with ``model_state_dict.py`` (flat units), ``full_state_dict.py`` (DTensors) or ``safetensors.py``. Files of
``torch.distributed.checkpoint`` are torch's own. Tests: ``tests/python/state_dicts``.
"""
