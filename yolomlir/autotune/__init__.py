"""Search space, cost model, tuner and its database."""
