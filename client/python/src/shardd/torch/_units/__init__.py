"""A fully sharded module: its state, its group of parameters in layout ``dim0`` or ``flat``, placement, mixed precision."""
