"""Planning: memory, traffic and time of layouts, computed from `xtrain.plan`."""
