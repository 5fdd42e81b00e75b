"""`sm_state_dict_type`: FULL, SHARDED or LOCAL state. This room gathers FULL."""
