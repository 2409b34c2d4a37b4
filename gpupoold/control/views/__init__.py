"""Bodies of the admin API made from the state of the control plane. Read only."""
