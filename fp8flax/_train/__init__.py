"""Training: the scaling state in a tree of variables, its gradients, the train state, calibration."""
