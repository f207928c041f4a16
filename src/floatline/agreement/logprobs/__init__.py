"""Log-probs of the same tokens by two engines: a trainer's model and what a rollout wrote down."""
