"""``summon_full_params``."""
