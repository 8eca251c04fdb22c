"""What a program calls beside its model: ``resume``, ``ride``, ``steps``, ``commit``, ``memory_plan``, clipping."""
