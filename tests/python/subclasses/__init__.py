"""Parameters that are tensor subclasses with fsdp_pre_all_gather."""
