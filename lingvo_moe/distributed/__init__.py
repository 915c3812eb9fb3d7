"""Several processes that train one model: who takes part, what they agree on, and the loss of one."""
