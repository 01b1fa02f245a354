"""What a round costs: a model, its calibration, its check, and what would be otherwise."""
