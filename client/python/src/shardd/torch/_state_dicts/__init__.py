"""State dicts of models and optimizers, ``torch.distributed.checkpoint``, safetensors."""
